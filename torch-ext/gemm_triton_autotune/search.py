"""The search of `tune_gemm`: which configurations are tried for a problem, and which one wins."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import (
    Any,
    Callable,
    NamedTuple,
)

import torch
import triton

from . import kernels
from .config import Config, default_config
from .device import DeviceProperties, device_guard, device_properties

logger = logging.getLogger("gemm_triton_autotune")

Timer = Callable[[Callable[[], Any]], float]

# (BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages) of the `tiled` family. Few rows are
# bound by memory and want many loads in flight: deep K and many stages; many rows want a large tile.
_TILED = [
    *[(16, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 5), (128, 3), (128, 5), (256, 3))],
    *[(16, n, 256, w, 4) for n in (16, 32) for w in (2, 4)],
    *[(32, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 5), (128, 3), (128, 5))],
    *[(64, n, k, 4, s) for n in (32, 64, 128, 256) for k, s in ((64, 3), (64, 5), (128, 3))],
    *[
        (128, n, k, w, s)
        for n in (64, 128)
        for k, w, s in ((64, 4, 3), (64, 4, 5), (64, 8, 4), (128, 8, 3))
    ],
    *[(m, n, k, 8, s) for m, n in ((128, 256), (256, 128)) for k, s in ((32, 4), (64, 3), (64, 4))],
    # what fits where shared memory is small
    *[(128, n, 32, w, s) for n in (64, 128) for w, s in ((4, 3), (4, 4), (8, 3))],
    *[(m, 64, 32, 4, s) for m in (32, 64) for s in (3, 5)],
    (16, 128, 32, 4, 3),
]


def candidate_configs(
    M: int | None = None,
    N: int | None = None,
    K: int | None = None,
    properties: DeviceProperties | None = None,
) -> list[Config]:
    """The configurations worth measuring for (M, N, K) on such a device, the default first.

    What is None does not narrow them. A tile twice as large as the problem on one side only computes
    padding, so it is left out, and so is what cannot fit the device.
    """
    candidates = [] if None in (M, N, K) else [default_config(M, N, K)]
    for block_m, block_n, block_k, num_warps, num_stages in _TILED:
        sides = ((block_m, M, 16), (block_n, N, 64), (block_k, K, 64))
        if any(size is not None and block >= 2 * max(size, least) for block, size, least in sides):
            continue
        # 256 and more rows never fill up with a tile made for a few.
        if M is not None and M >= 256 and block_m < 64:
            continue
        config = {
            "BLOCK_SIZE_M": block_m,
            "BLOCK_SIZE_N": block_n,
            "BLOCK_SIZE_K": block_k,
            "GROUP_SIZE_M": 8,
            "num_warps": num_warps,
            "num_stages": num_stages,
        }
        if config not in candidates and kernels.config_problem(config, properties) is None:
            candidates.append(config)
    return candidates


class Result(NamedTuple):
    """What the search found for one M. Times in milliseconds; `skipped` counts by reason."""

    M: int
    config: Config
    default_ms: float
    tuned_ms: float
    torch_ms: float
    measured: int
    skipped: dict[str, int]


def gpu_timer(fn: Callable[[], Any]) -> float:
    """Median milliseconds of ``fn`` on the current GPU, its L2 cache cold."""
    return triton.testing.do_bench(fn, warmup=10, rep=50, return_mode="median")


def cpu_timer(fn: Callable[[], Any]) -> float:
    """Median milliseconds of ``fn`` by the clock: says nothing of a GPU, but makes the tuner run."""
    fn()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def make_weight(
    N: int, K: int, dtype: torch.dtype, layout: str, device: torch.device
) -> torch.Tensor:
    """A random b (K, N) in ``layout``, scaled so that a product with it has a variance of 1."""
    shape = (N, K) if layout == "NT" else (K, N)
    weight = torch.randn(shape, dtype=dtype, device=device).mul_(K**-0.5)
    return weight.t() if layout == "NT" else weight


def search(
    M: int,
    b: torch.Tensor,
    candidates: Sequence[Config],
    timer: Timer,
    on_progress: Callable[[int, int, int, float], None] | None = None,
) -> Result:
    """Measure ``candidates`` on a random a (M, K) with ``b`` (K, N); the fastest right one wins.

    The first of equals stays, so the default (the first candidate) is only given up for a gain.
    Raises: RuntimeError if no candidate runs; torch.OutOfMemoryError if the operands do not fit.
    """
    K, N = b.shape
    a = torch.randn(M, K, dtype=b.dtype, device=b.device)
    out = torch.empty(M, N, dtype=b.dtype, device=b.device)
    check = _Check(a, b)
    times: list[tuple[float, Config]] = []
    default_ms = math.nan
    skipped: dict[str, int] = {}
    with device_guard(b.device):
        for index, config in enumerate(candidates):
            try:
                time_ms = _measure(a, b, out, config, check, timer)
            except _Skip as skip:
                skipped[str(skip)] = skipped.get(str(skip), 0) + 1
                logger.info("Skipped %s for M=%d: %s", config, M, skip.__cause__ or skip)
            else:
                times.append((time_ms, config))
                if config == default_config(M, N, K):
                    default_ms = time_ms
            if on_progress is not None:
                best_ms = min((time_ms for time_ms, _ in times), default=math.nan)
                on_progress(M, index + 1, len(candidates), best_ms)
        if not times:
            raise RuntimeError(
                f"None of {len(candidates)} candidates runs for M={M}, N={N}, K={K} in {b.dtype} on "
                f"{b.device}: {_counts(skipped)}"
            )
        torch_ms = timer(lambda: torch.mm(a, b, out=out))
    tuned_ms, config = min(times, key=lambda entry: entry[0])
    return Result(M, config, default_ms, tuned_ms, torch_ms, len(times), skipped)


class _Skip(Exception):
    """A candidate is not chosen; the text is the reason that it is counted under."""


def _measure(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    config: Mapping[str, Any],
    check: _Check,
    timer: Timer,
) -> float:
    problem = kernels.config_problem(config, device_properties(a.device))
    problem = problem or kernels.operand_problem(config, a, b, out)
    if problem:
        raise _Skip("does not fit") from ValueError(problem)
    # NaN in every element: what an earlier candidate wrote cannot cover for this one.
    out.fill_(math.nan)
    try:
        kernels.launch_gemm_kernel(a, b, out, config)
        right = check(out)
        time_ms = (
            timer(lambda: kernels.launch_gemm_kernel(a, b, out, config)) if right else math.nan
        )
    except triton.runtime.errors.OutOfResources as error:
        raise _Skip("out of resources") from error
    # A compiler fails in many ways (Triton's own errors, ptxas, RuntimeError from a pass, IndexError),
    # and one candidate must not end the run.
    except Exception as error:
        raise _Skip(f"failed with {type(error).__name__}") from error
    if not right:
        raise _Skip("wrong result")
    if not (math.isfinite(time_ms) and time_ms > 0):
        raise _Skip(f"timed as {time_ms} ms")
    return time_ms


class _Check:
    """Is a result right? The error may be twice what rounding the exact result costs."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        with _full_float32():
            self.reference = a.float() @ b.float()
        self.bound = 2 * self._max(lambda exact: exact.to(a.dtype).float() - exact) + 1e-5

    def __call__(self, out: torch.Tensor) -> bool:
        rows = iter(out.split(self._rows_at_once()))
        return self._max(lambda exact: next(rows).float() - exact) <= self.bound

    def _rows_at_once(self) -> int:
        return max(1, (1 << 26) // self.reference.shape[1])

    def _max(self, difference: Callable[[torch.Tensor], torch.Tensor]) -> float:
        # By blocks of rows, so that the temporaries stay small beside the operands. NaN stays NaN in
        # amax, and no comparison with it holds.
        blocks = self.reference.split(self._rows_at_once())
        return torch.stack([difference(exact).abs().amax() for exact in blocks]).amax().item()


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _counts(skipped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in skipped.items())
