"""Compare `gemm` with torch.mm (cuBLAS) over weight shapes and values of M, side by side in one run.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python benchmarks/compare.py --json results.json

Device time as deployed: CUDA graphs, weights rotated so that the L2 cache is cold, the two and the
default interleaved, medians. A ratio above 1 is faster than torch.mm. Each result is checked first.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import kernels
import torch
import triton
from tabulate import tabulate

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning, measure = gemm_kernel.tuning, gemm_kernel.measure

# (N, K) of Llama 3.1 8B and 70B (on one GPU and on 8) and Qwen3 32B
SUITE = (
    (4096, 4096), (14336, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1280, 8192),
    (8192, 1024), (7168, 8192), (8192, 3584), (10240, 5120), (5120, 8192), (51200, 5120),
    (5120, 25600), (128256, 4096),
)  # fmt: skip
BANDS = {"M <= 16": (1, 16), "M 17 to 1023": (17, 1023), "M >= 1024": (1024, 1 << 40)}
ROUNDS = 9


def compare(N: int, K: int, layout: str, Ms: list[int], dtype: torch.dtype) -> list[dict]:
    """One row for each M: microseconds of gemm, of the default and of torch.mm, and the configuration."""
    device = tuning.resolve_device(None)
    weights = measure.make_weights(N, K, dtype, layout, device)
    rows = []
    for M in Ms:
        a = torch.randn(M, K, dtype=dtype, device=device)
        out = torch.empty(M, N, dtype=dtype, device=device)
        config = tuning.get_config(M, N, K, device, layout)
        default = tuning.default_config(M, N, K)
        exact = measure.ExactProduct(a, weights[0])
        right = exact.is_right(gemm_kernel.gemm(a, weights[0], out=out.fill_(math.nan)))
        del exact
        calls = {
            "torch": lambda b, a=a, out=out: torch.mm(a, b, out=out),
            "gemm": lambda b, a=a, out=out: gemm_kernel.gemm(a, b, out=out),
            "default": lambda b, a=a, out=out, config=default: (
                gemm_kernel.kernels.launch_gemm_kernel(a, b, out, config)
            ),
        }
        graphs = [measure.GraphedCalls(measure.Rotation(call, weights)) for call in calls.values()]
        times = measure.interleaved_ms(graphs, ROUNDS)
        pairs = zip(times[0], times[1])
        rows.append(
            {
                "N": N, "K": K, "layout": layout, "M": M, "right": right,
                **{f"{name}_us": statistics.median(own) * 1e3 for name, own in zip(calls, times)},
                "ratio": statistics.median(theirs / ours for theirs, ours in pairs),
                "config": config,
            }
        )  # fmt: skip
    return rows


def summary(rows: list[dict]) -> str:
    """Geometric means by layout and band of M, and the ten slowest points."""
    lines = []
    for layout in dict.fromkeys(row["layout"] for row in rows):
        of_layout = [row for row in rows if row["layout"] == layout]
        table = []
        for name, (low, high) in {**BANDS, "all": (1, 1 << 40)}.items():
            band = [row for row in of_layout if low <= row["M"] <= high]
            if band:
                worst = min(row["ratio"] for row in band)
                default = [row["torch_us"] / row["default_us"] for row in band]
                own = statistics.geometric_mean(row["ratio"] for row in band)
                below = sum(row["ratio"] < 0.97 for row in band)
                table.append(
                    (name, len(band), f"{own:.3f}", f"{worst:.3f}", below)
                    + (f"{statistics.geometric_mean(default):.3f}",)
                )
        headers = (layout, "points", "ratio", "worst", "below 0.97", "default's ratio")
        lines += [tabulate(table, headers, tablefmt="github", disable_numparse=True), ""]
    worst = sorted(rows, key=lambda row: row["ratio"])[:10]
    table = [
        (row["layout"], f"{row['M']} x {row['N']} x {row['K']}", f"{row['torch_us']:.1f}")
        + (f"{row['gemm_us']:.1f}", f"{row['ratio']:.3f}", row["config"].get("kernel", "tiled"))
        for row in worst
    ]
    headers = ("worst", "M x N x K", "torch µs", "gemm µs", "ratio", "family")
    return "\n".join([*lines, tabulate(table, headers, tablefmt="github", disable_numparse=True)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", default=[f"{N}x{K}" for N, K in SUITE], metavar="NxK"
    )
    parser.add_argument("--m", type=int, nargs="+", default=list(tuning.TUNED_MS))
    parser.add_argument("--layouts", nargs="+", choices=("NN", "NT"), default=["NT", "NN"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="write all rows here")
    arguments = parser.parse_args()

    rows = []
    for shape in arguments.shapes:
        N, K = map(int, shape.split("x"))
        for layout in arguments.layouts:
            rows += compare(N, K, layout, arguments.m, getattr(torch, arguments.dtype))
            print(f"{shape} {layout}", file=sys.stderr)
    if arguments.json:
        environment = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "dtype": arguments.dtype,
        }
        arguments.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))
    print(summary(rows))
    wrong = [row for row in rows if not row["right"]]
    print(f"\n{len(rows)} points, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
