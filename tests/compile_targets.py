"""Compile configurations for GPUs that are not here, as a launch would, and report what came out.

    python tests/compile_targets.py cuda:90 < configs.json

A configuration a line in, with `layout`, `dtype`, `M` and `bias` if they are not the usual ones; a JSON
object a line out: what the compiler made of it for a weight of (N, K) = (4096, 4096), or its error. Run without TRITON_INTERPRET: interpreted functions do not compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import kernels
import torch
import triton
from triton.backends.compiler import GPUTarget

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class TargetDriver:
    """What the JIT asks of a driver before it launches, answered for a device that is not here."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def parse_target(name: str) -> GPUTarget:
    """`cuda:90` or `hip:gfx942`."""
    backend, arch = name.split(":")
    return GPUTarget(
        backend, int(arch) if arch.isdigit() else arch, 32 if backend == "cuda" else 64
    )


def compile_config(config: dict, layout: str, dtype: torch.dtype, M: int, has_bias: bool) -> dict:
    N = K = 4096
    a = torch.empty(M, K, dtype=dtype)
    b = torch.empty(N, K, dtype=dtype).t() if layout == "NT" else torch.empty(K, N, dtype=dtype)
    out = torch.empty(M, N, dtype=dtype)
    bias = torch.empty(N, dtype=dtype) if has_bias else None
    family = gemm_kernel.kernels.FAMILIES[config.get("kernel", "tiled")]
    problem = family.operand_problem(config, a, b, out)
    if problem:
        return {"refused": problem}
    launch = family.prepare(a, b, out, config)
    options = gemm_kernel.config.launch_options(config, triton.runtime.driver.active.target.backend)
    options.update(launch.options)
    compiled = launch.kernel.warmup(*launch.arguments(a, b, out, bias), grid=launch.grid, **options)
    report = {"shared": compiled.metadata.shared}
    if "ptx" in compiled.asm:
        ptx = compiled.asm["ptx"]
        report["wgmma"] = len(re.findall(r"wgmma\.mma_async", ptx))
        report["mma"] = len(re.findall(r"\bmma\.sync", ptx))
        report["async_copies"] = len(
            re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x10", ptx)
        )
        report["bulk_copies"] = len(re.findall(r"cp\.async\.bulk\.tensor", ptx))
        if "griddepcontrol.wait" in ptx:
            before = ptx[: ptx.index("griddepcontrol.wait")]
            accesses = r"\b(ld\.global|st\.global|cp\.async|atom)"
            report["accesses_before_wait"] = len(re.findall(accesses, before))
            report["prefetches_before_wait"] = before.count("prefetch.global.L2")
        report.update(_resources(compiled.asm["cubin"]))
        if report["wgmma"]:
            # Waits for each: 1 or more where ptxas could not leave several in flight (its message C7515).
            code = _cuobjdump("-sass", compiled.asm["cubin"])
            report["wgmma_waits"] = len(re.findall(r"WARPGROUP\.DEPBAR", code)) / code.count(
                "HGMMA"
            )
    elif "amdgcn" in compiled.asm:
        code = compiled.asm["amdgcn"]
        report["mfma"] = len(re.findall(r"v_mfma_|v_wmma_", code))
        report["spills"] = int(re.search(r"vgpr_spill_count:\s*(\d+)", code)[1])
    return report


def _resources(cubin: bytes) -> dict:
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _cuobjdump("-res-usage", cubin)))
    return {"registers": int(usage["REG"]), "stack": int(usage["STACK"]) + int(usage["LOCAL"])}


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    triton.runtime.driver.set_active(TargetDriver(parse_target(sys.argv[1])))
    for line in sys.stdin:
        request = json.loads(line)
        dtype = getattr(torch, request.get("dtype", "bfloat16"))
        try:
            report = compile_config(
                request["config"],
                request.get("layout", "NT"),
                dtype,
                request.get("M", 512),
                request.get("bias", False),
            )
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps({**request, **report}), flush=True)


if __name__ == "__main__":
    main()
