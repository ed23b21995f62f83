"""A process that `latency.py` measures: import, make the operands, wait for a line, call, answer.

    python benchmarks/first_call.py CALL M N K

Its answers are lines of JSON: when it is ready, and when it has called.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

_started = time.perf_counter()

from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from autotuned import Autotuned  # noqa: E402
from providers import compiled_product, gemm_kernel  # noqa: E402

_imported = time.perf_counter()

tuning, measure = gemm_kernel.tuning, gemm_kernel.measure


class _Call:
    """Computes a @ b; counts the configurations that were timed, where it can."""

    def __init__(self, compute: Callable, autotuned: Autotuned | None = None) -> None:
        self.compute = compute
        self._autotuned = autotuned

    @property
    def configs_measured(self) -> int | None:
        return None if self._autotuned is None else self._autotuned.measured


def _autotuned(a: torch.Tensor, b: torch.Tensor, cache_results: bool) -> _Call:
    kernel = Autotuned(a.shape[0], a.device, cache_results)
    return _Call(lambda: kernel(a, b, a.new_empty(a.shape[0], b.shape[1])), kernel)


def _gemm(a: torch.Tensor, b: torch.Tensor) -> _Call:
    return _Call(lambda: gemm_kernel.gemm(a, b))


def _default(a: torch.Tensor, b: torch.Tensor) -> _Call:
    os.environ.pop("GEMM_TUNED_CONFIG_DIR", None)
    tuning._CONFIGS_DIR = Path(tempfile.mkdtemp())
    return _gemm(a, b)


def _compile(a: torch.Tensor, b: torch.Tensor) -> _Call:
    product = compiled_product()
    return _Call(lambda: product(a, b))


# What a module of a user's does when it is imported, such as to decorate, is done before the call.
CALLS = {
    "torch": lambda a, b: _Call(lambda: torch.mm(a, b)),
    "gemm": _gemm,
    "default": _default,
    "autotune": lambda a, b: _autotuned(a, b, cache_results=False),
    "autotune-cached": lambda a, b: _autotuned(a, b, cache_results=True),
    "compile": _compile,
}


def main(name: str, M: int, N: int, K: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else writes to the standard output does not disturb the answers

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    start = time.perf_counter()
    device = tuning.resolve_device(None)
    # Triton's interpreter cannot multiply bfloat16.
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    a = torch.randn(M, K, dtype=dtype, device=device)
    b = measure.make_weight(N, K, dtype, "NT", device)
    a.cpu()  # which waits for all that was queued
    device_ms = (time.perf_counter() - start) * 1e3
    start = time.perf_counter()
    call = CALLS[name](a, b)
    import_ms = (time.perf_counter() - start + _imported - _started) * 1e3
    answer(import_ms=import_ms, device_ms=device_ms)

    if not sys.stdin.readline():
        return
    times_ms = []
    for _ in range(2):
        start = time.perf_counter()
        out = call.compute()
        out.cpu()
        times_ms.append((time.perf_counter() - start) * 1e3)
    has_file = tuning._load_tuned_configs(N, K, device, "NT") is not None
    if name in ("gemm", "default") and has_file != (name == "gemm"):
        raise RuntimeError(f"there is {'a' if has_file else 'no'} tuned file for N={N}, K={K}, NT")
    answer(
        first_ms=times_ms[0],
        second_ms=times_ms[1],
        configs_measured=call.configs_measured,
        right=measure.ExactProduct(a, b).is_right(out),
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
