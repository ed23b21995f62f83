"""What an eager call costs the host, for products so small that the GPU waits for it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernels
import torch

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning


def _plain(block_m: int, block_n: int, block_k: int) -> dict[str, Any]:
    return gemm_kernel.config.plain_config(block_m, block_n, block_k, 4, 3)


# Weights so small that launching takes longer than computing, by what launches them.
CASES = {
    "default": (16, 256, 256, None),
    "swap": (16, 256, 512, {"kernel": "swap", **_plain(16, 64, 64)}),
    "swap, split": (16, 256, 1024, {"kernel": "swap", **_plain(16, 64, 64), "SPLIT_K": 2}),
    "tma": (64, 512, 512, {"kernel": "tma", **_plain(64, 64, 64)}),
    "gluon": (64, 1024, 512, {"kernel": "gluon", **_plain(64, 128, 64)}),
}


def cpu_times(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Microseconds of the host for an eager call of each kind, all in turn, the least of many loops."""
    rows = []
    for name, (M, N, K, config) in CASES.items():
        weight = torch.randn(N, K, dtype=dtype, device="cuda")
        a = torch.randn(M, K, dtype=dtype, device="cuda")
        b, out = weight.t(), torch.empty(M, N, dtype=dtype, device="cuda")
        with _tuned_for(N, K, {str(M): config} if config else {}):
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
        rows.append({"family": name, **{call: round(min(own), 2) for call, own in times.items()}})
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
def _tuned_for(N: int, K: int, entries: dict) -> Iterator[None]:
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
