"""Compare `gemm` with torch.mm (cuBLAS) over weight shapes and values of M, side by side in one run.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python benchmarks/compare.py --json results.json

Device time as deployed: CUDA graphs, weights rotated so that the L2 cache is cold, the two and the
default interleaved, medians. A ratio above 1 is faster than torch.mm. Each result is checked first. The floor
is what the bytes of all three matrices take at the bandwidth of a copy, or the multiply-adds at the rate that
torch.mm reaches on 8192 x 8192 x 8192, both measured in the same run. CPU time is that of an eager call, of
all kinds in turn, for products so small that the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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


def copy_bandwidth() -> float:
    """Bytes per microsecond, read and written, of a copy on the device that is much larger than L2."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    # Not in a graph: there the copy engine does it, at two thirds of this rate.
    times = [measure.elapsed_ms(lambda: target.copy_(source)) for _ in range(ROUNDS + 3)]
    return 2 * source.nbytes / (statistics.median(times[3:]) * 1e3)


def multiply_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per microsecond of a large torch.mm on random data."""
    a, b = (torch.randn(8192, 8192, dtype=dtype, device="cuda") for _ in range(2))
    calls = [measure.GraphedCalls(measure.Rotation(lambda b: torch.mm(a, b), [b]))]
    return 2 * 8192**3 / (statistics.median(measure.interleaved_ms(calls, ROUNDS)[0]) * 1e3)


def plain(block_m: int, block_n: int, block_k: int) -> dict:
    return gemm_kernel.config.plain_config(block_m, block_n, block_k, 4, 3)


# Weights so small that launching takes longer than computing, by what launches them.
CPU_CASES = {
    "default": (16, 256, 256, None),
    "swap": (16, 256, 512, {"kernel": "swap", **plain(16, 64, 64)}),
    "swap, split": (16, 256, 1024, {"kernel": "swap", **plain(16, 64, 64), "SPLIT_K": 2}),
    "tma": (64, 512, 512, {"kernel": "tma", **plain(64, 64, 64)}),
    "gluon": (64, 1024, 512, {"kernel": "gluon", **plain(64, 128, 64)}),
}


def cpu_times(dtype: torch.dtype) -> list[dict]:
    """Microseconds of the host for an eager call of each kind."""
    rows = []
    for name, (M, N, K, config) in CPU_CASES.items():
        weight = torch.randn(N, K, dtype=dtype, device="cuda")
        a = torch.randn(M, K, dtype=dtype, device="cuda")
        b, out = weight.t(), torch.empty(M, N, dtype=dtype, device="cuda")
        with tuned_for(N, K, {str(M): config} if config else {}):
            used = tuning.get_config(M, N, K, a.device, "NT")
            calls = {
                "a @ b": lambda a=a, b=b: a @ b,
                "torch.mm(out=)": lambda a=a, b=b, out=out: torch.mm(a, b, out=out),
                "gemm": lambda a=a, b=b: gemm_kernel.gemm(a, b),
                "gemm(out=)": lambda a=a, b=b, out=out: gemm_kernel.gemm(a, b, out=out),
                "JIT launch": lambda a=a, b=b, out=out, used=used: (
                    gemm_kernel.kernels.launch_gemm_kernel(a, b, out, used)
                ),
            }
            times = {call: [] for call in calls}
            for _ in range(21):
                for call, fn in calls.items():
                    times[call].append(_host_us(fn))
        rows.append({"family": name, **{call: min(own) for call, own in times.items()}})
    return rows


def _host_us(fn: Callable[[], object], count: int = 500) -> float:
    for _ in range(20):
        fn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        fn()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / count * 1e6


@contextlib.contextmanager
def tuned_for(N: int, K: int, entries: dict) -> Iterator[None]:
    """A tuned file with these entries, and no other, for weights (N, K) in layout NT."""
    before = os.environ.get("GEMM_TUNED_CONFIG_DIR")
    with tempfile.TemporaryDirectory() as folder:
        if entries:
            name = tuning.config_file_name(N, K, layout="NT")
            (Path(folder) / name).write_text(json.dumps(entries))
        os.environ["GEMM_TUNED_CONFIG_DIR"] = folder
        tuning._load_tuned_configs.cache_clear()
        try:
            yield
        finally:
            os.environ.pop("GEMM_TUNED_CONFIG_DIR")
            if before is not None:
                os.environ["GEMM_TUNED_CONFIG_DIR"] = before
            tuning._load_tuned_configs.cache_clear()


def compare(
    N: int, K: int, layout: str, Ms: list[int], dtype: torch.dtype, bandwidth: float, rate: float
) -> list[dict]:
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
                "floor_us": max(2 * (M * K + N * K + M * N) / bandwidth, 2 * M * N * K / rate),
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
                floor = statistics.geometric_mean(row["floor_us"] / row["gemm_us"] for row in band)
                table.append(
                    (name, len(band), f"{own:.3f}", f"{worst:.3f}", below)
                    + (f"{statistics.geometric_mean(default):.3f}", f"{floor:.3f}")
                )
        headers = (
            layout,
            "points",
            "ratio",
            "worst",
            "below 0.97",
            "default's ratio",
            "of the floor",
        )
        lines += [tabulate(table, headers, tablefmt="github", disable_numparse=True), ""]
    decode = [
        (row["layout"], f"{row['N']} x {row['K']}", f"{row['gemm_us']:.1f}")
        + (f"{row['floor_us'] / row['gemm_us']:.3f}", f"{row['floor_us'] / row['torch_us']:.3f}")
        for row in rows
        if row["M"] == 1 and row["N"] * row["K"] >= 32 << 20
    ]
    headers = ("M = 1", "N x K", "gemm µs", "of copy bandwidth", "torch's")
    lines += [tabulate(decode, headers, tablefmt="github", disable_numparse=True), ""]
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
    parser.add_argument("--no-cpu", action="store_true", help="leave out the CPU times")
    parser.add_argument("--json", type=Path, help="write all rows here")
    arguments = parser.parse_args()

    dtype = getattr(torch, arguments.dtype)
    bandwidth, rate = copy_bandwidth(), multiply_rate(dtype)
    cpu_rows = [] if arguments.no_cpu else cpu_times(dtype)
    rows = []
    for shape in arguments.shapes:
        N, K = map(int, shape.split("x"))
        for layout in arguments.layouts:
            rows += compare(N, K, layout, arguments.m, dtype, bandwidth, rate)
            print(f"{shape} {layout}", file=sys.stderr)
    if arguments.json:
        environment = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "dtype": arguments.dtype,
            "copy_tb_s": bandwidth / 1e6,
            "mm_tflop_s": rate / 1e6,
        }
        results = {"environment": environment, "cpu": cpu_rows, "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=1))
    print(f"copy {bandwidth / 1e6:.2f} TB/s, torch.mm {rate / 1e6:.0f} TFLOP/s\n")
    if cpu_rows:
        cells = [
            [f"{v:.1f}" if isinstance(v, float) else v for v in row.values()] for row in cpu_rows
        ]
        headers = ["CPU µs", *list(cpu_rows[0])[1:]]
        print(tabulate(cells, headers, tablefmt="github", disable_numparse=True), "\n")
    print(summary(rows))
    wrong = [row for row in rows if not row["right"]]
    print(f"\n{len(rows)} points, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
