"""The main job on this machine's best device: an untuned call, a small tuning run, the tuned call.

Run by `make demo`, which sets LOCAL_KERNELS to the staged build.
"""

from __future__ import annotations

import os
import tempfile

import torch

ON_GPU = torch.cuda.is_available() or torch.xpu.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is loaded

import kernels  # noqa: E402
from tabulate import tabulate  # noqa: E402

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)


def main() -> None:
    tuning = gemm_kernel.tuning
    device = tuning.resolve_device(None)
    if ON_GPU:
        print(f"Running on {device}: {tuning.device_name(device)}.")
        N, K, Ms = 2048, 2048, (1, 16, 256, 4096)
    else:
        print("No GPU here: running on the CPU in Triton's interpreter, with small shapes.")
        N, K, Ms = 96, 80, (1, 40)
    dtype = torch.float16
    with tempfile.TemporaryDirectory() as directory:
        # Only what this run writes is looked up: neither your cache nor an earlier run decides.
        os.environ["GEMM_TUNED_CONFIG_DIR"] = directory
        os.environ["XDG_CACHE_HOME"] = directory

        print(
            f"\n1. A call with a weight ({N}, {K}) that has no tuned file here: it warns, and uses the default.\n"
        )
        x = torch.randn(Ms[-1], K, dtype=dtype, device=device)
        weight = torch.randn(N, K, dtype=dtype, device=device) * K**-0.5
        gemm_kernel.gemm(x, weight.t())
        print(gemm_kernel.explain(Ms[-1], N, K, device, layout="NT"))

        print("\n2. A small tuning run.\n")
        results = []
        path = gemm_kernel.tune_gemm(
            N, K, Ms, dtype, directory, layout="NT", device=device, on_result=results.append
        )
        print(f"wrote {path}:\n{path.read_text()}")

        print("3. The same call, now tuned.\n")
        print(gemm_kernel.explain(Ms[-1], N, K, device, layout="NT"))
        out = gemm_kernel.gemm(x, weight.t())
        exact = x.double() @ weight.double().t()
        error = (out.double() - exact).abs().max().item()
        rounding = (exact.to(dtype).double() - exact).abs().max().item()
        print(
            f"largest error against float64: {error:.2e}; rounding the exact result alone: {rounding:.2e}"
        )
        if not error <= 2 * rounding:
            raise SystemExit("the result is wrong")
        if ON_GPU:
            rows = [
                (r.M, *(f"{ms * 1e3:.1f}" for ms in (r.default_ms, r.tuned_ms, r.torch_ms)))
                for r in results
            ]
            print()
            print(tabulate(rows, ("M", "default µs", "tuned µs", "torch µs"), tablefmt="github"))
        else:
            print("Times in the interpreter mean nothing, so none are shown.")


if __name__ == "__main__":
    main()
