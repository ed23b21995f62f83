"""Compare `gemm` with torch.mm (cuBLAS) and others over weight shapes and values of M, side by side in one run.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python benchmarks/compare.py --json results.json

Device time as deployed: CUDA graphs, weights rotated so that the L2 cache is cold, all that is compared
interleaved, medians. The GPU rests before each launch, so that its clock stays up; `--sustained` is without that.
A ratio above 1 is faster than torch.mm. Each result is checked first; what fails at a point is left out there, with
the reason. The floor is what the bytes of all three matrices take at the bandwidth of a copy, or the multiply-adds at
the rate that torch.mm reaches on 8192 x 8192 x 8192, both measured in the same run.
CPU time is that of an eager call, of all kinds in turn, for products so small that the GPU waits for the host.

`--json` writes environment, cpu (a row for each kind of launch, microseconds) and rows, one for each point:

    {"N": 4096, "K": 4096, "layout": "NT", "M": 16, "floor_us": 7.9,
     "us": {"gemm": 10.2, "default": 18.3, "torch": 12.7},      medians; null where there is none
     "ratio": 1.245,                                            the median of torch / gemm of each round
     "multiples": {"default": 1.79, "torch": 1.245},            the same, of each provider / gemm
     "configs": {"gemm": {...}}, "missing": {"compile": "why"}}
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kernels
import torch

import host
import machine
import providers
from results_file import write_results
from tables import comparison_summary

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning, measure = gemm_kernel.tuning, gemm_kernel.measure

# (N, K) of Llama 3.1 8B and 70B (on one GPU and on 8) and Qwen3 32B
SUITE = (
    (4096, 4096), (14336, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1280, 8192),
    (8192, 1024), (7168, 8192), (8192, 3584), (10240, 5120), (5120, 8192), (51200, 5120),
    (5120, 25600), (128256, 4096),
)  # fmt: skip
SUITE_MS = (
    1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192,
)  # fmt: skip
WRONG = "wrong result"


def compare_weight(
    problem: Any,
    Ms: Sequence[int],
    compared: Mapping[str, providers.Provider],
    bandwidth: float,
    rate: float,
    device: torch.device,
    rests: bool = True,
) -> list[dict[str, Any]]:
    """One row for each M of a `bench.Problem`; bandwidth in bytes and rate in operations per microsecond."""
    N, K, layout, name = problem
    dtype = getattr(torch, name)
    weights = measure.make_weights(N, K, dtype, layout, device)
    rows = []
    for M in Ms:
        a = torch.randn(M, K, dtype=dtype, device=device)
        out = torch.empty(M, N, dtype=dtype, device=device)
        floor_us = max(2 * (M * K + N * K + M * N) / bandwidth, 2 * M * N * K / rate)
        point = {"N": N, "K": K, "layout": layout, "M": M, "floor_us": round(floor_us, 3)}
        operands = providers.Operands(a, weights, out, layout)
        rows.append({**point, **compare_point(operands, compared, rests)})
    return rows


def compare_point(
    operands: providers.Operands, compared: Mapping[str, providers.Provider], rests: bool = True
) -> dict[str, Any]:
    """Times of all that is compared; what fails or is wrong has none, and costs the others nothing."""
    missing: dict[str, str] = {}
    prepared: dict[str, providers.Prepared] = {}
    exact = measure.ExactProduct(operands.a, operands.weights[0])
    for name, provider in compared.items():
        try:
            prepared[name] = provider(operands)
            if not providers.is_right(prepared[name], operands, exact):
                raise providers.Unavailable(WRONG)
        # Compilers and libraries fail in many ways, and none is worth the run.
        except Exception as error:
            missing[name] = machine.first_line(error)
    del exact  # as large as out in float32
    calls: dict[str, machine.Timed] = {}
    for name in prepared:
        try:
            if name not in missing:
                rotation = measure.Rotation(prepared[name].call, operands.weights)
                calls[name] = machine.timed(rotation, operands.a.device, rests)
        except Exception as error:
            missing[name] = machine.first_line(error)
    rounds = dict(zip(calls, measure.interleaved_ms(list(calls.values()), machine.ROUNDS)))
    ours = rounds.get("gemm")
    multiples = {
        name: round(statistics.median(their / our for their, our in zip(times, ours)), 4)
        for name, times in rounds.items()
        if ours is not None and name != "gemm"
    }
    us = {name: round(statistics.median(times) * 1e3, 3) for name, times in rounds.items()}
    row = {
        "us": {name: us.get(name) for name in compared},
        "ratio": multiples.get("torch"),
        "multiples": multiples,
        # The default follows from the shape, and the file of configs: is at hand.
        "configs": {
            name: prepared[name].config
            for name in ("gemm", "autotune", "upstream")
            if name in rounds
        },
    }
    return {**row, "missing": missing} if missing else row


def _weight(text: str) -> tuple[int, int]:
    N, _, K = text.partition("x")
    if not (N.isdecimal() and K.isdecimal()):
        raise argparse.ArgumentTypeError(f"expects NxK, as in 14336x4096, got {text!r}")
    return int(N), int(K)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", type=_weight, default=list(SUITE), metavar="NxK")
    parser.add_argument("--m", type=int, nargs="+", default=list(SUITE_MS))
    parser.add_argument("--layouts", nargs="+", choices=("NN", "NT"), default=["NT", "NN"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--providers",
        nargs="+",
        default=["gemm", "default", "torch"],
        metavar="NAME",
        help=f"of {', '.join(providers.PROVIDERS)}, configs:DIR for the tuned files in a folder, and "
        "gemm:KEY=VALUE,... for its configuration with other values",
    )
    parser.add_argument(
        "--sustained",
        action="store_true",
        help="without rests between the launches: a large card is then at the limit of its power",
    )
    parser.add_argument("--no-cpu", action="store_true", help="leave out the CPU times")
    parser.add_argument("--json", type=Path, help="write all rows here, after each weight")
    return parser


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    try:
        compared = providers.named_providers(arguments.providers)
    except ValueError as error:
        parser.error(f"--providers {error}")

    device = tuning.resolve_device(None)
    dtype = getattr(torch, arguments.dtype)
    weights = [
        gemm_kernel.bench.Problem(*shape, layout, arguments.dtype)
        for shape in arguments.shapes
        for layout in arguments.layouts
    ]
    providers.compile_ahead(compared, weights, arguments.m, device)
    rests = not arguments.sustained
    bandwidth, rate = machine.copy_bandwidth(device), machine.multiply_rate(dtype, device, rests)
    environment = machine.environment(
        device,
        "benchmarks/compare.py",
        rests,
        dtype=arguments.dtype,
        copy_tb_s=round(bandwidth / 1e6, 3),
        mm_tflop_s=round(rate / 1e6, 1),
    )
    has_cpu = device.type == "cuda" and not arguments.no_cpu
    results = {"cpu": host.cpu_times(dtype) if has_cpu else [], "rows": []}
    for problem in weights:
        results["rows"] += compare_weight(
            problem, arguments.m, compared, bandwidth, rate, device, rests
        )
        print(f"{problem.N}x{problem.K} {problem.layout}", file=sys.stderr)
        if arguments.json:
            write_results(arguments.json, environment, **results)
    print(comparison_summary({"environment": environment, **results}))
    reasons = [reason for row in results["rows"] for reason in row.get("missing", {}).values()]
    wrong = reasons.count(WRONG)
    left_out = len(reasons) - wrong
    print(f"\n{len(results['rows'])} points, {wrong} results wrong, {left_out} left out")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
