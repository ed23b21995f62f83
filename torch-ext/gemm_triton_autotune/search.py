"""The search of `tune_gemm`: which one of the candidates for a problem wins.

A quick look at every candidate, then the best few against the default in interleaved rounds. The
default is given up only for a gain beyond the noise.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, NamedTuple

import torch
import triton

from . import kernels
from .candidates import refinements
from .config import Config, default_config
from .device import device_guard, device_properties
from .measure import (
    ExactProduct,
    GraphedCalls,
    Rotation,
    Timer,
    interleaved_ms,
)

logger = logging.getLogger("gemm_triton_autotune")

# Those whose quick time is within this factor of the best, and no more than so many, go to the final.
_FINALIST_FACTOR = 1.1
_FINALISTS = 4
_FINAL_ROUNDS = 9
# Of so many leaders the refinements are tried.
_REFINED = 3
# The least gain that the default, the first candidate, is given up for.
_LEAST_GAIN = 0.01


class Result(NamedTuple):
    """What the search found for one M. Times in milliseconds; `skipped` counts by reason."""

    M: int
    config: Config
    default_ms: float
    tuned_ms: float
    torch_ms: float
    measured: int
    skipped: dict[str, int]


def _time(entry: tuple[float, Config]) -> float:
    return entry[0]


class _Skip(Exception):
    """A candidate is not chosen; the text is the reason that it is counted under."""


def search(
    M: int,
    weights: Sequence[torch.Tensor],
    candidates: Sequence[Config],
    timer: Timer | None = None,
    on_progress: Callable[[int, int, int, float], None] | None = None,
) -> Result:
    """Find the fastest right one of ``candidates`` for a random a (M, K) with ``weights``, each (K, N).

    timer: instead of CUDA graphs, and then without a final: the first of equals stays.
    Raises: RuntimeError if no candidate runs; torch.OutOfMemoryError if the operands do not fit.
    """
    with device_guard(weights[0].device):
        return _Search(M, weights, timer, on_progress).run(list(candidates))


class _Search:
    def __init__(
        self,
        M: int,
        weights: Sequence[torch.Tensor],
        timer: Timer | None,
        on_progress: Callable[[int, int, int, float], None] | None,
    ) -> None:
        K, N = weights[0].shape
        like = {"dtype": weights[0].dtype, "device": weights[0].device}
        self.M = M
        self.weights = weights
        self.default = default_config(M, N, K)
        self.a = torch.randn(M, K, **like)
        self.out = torch.empty(M, N, **like)
        self.exact = ExactProduct(self.a, weights[0])
        self.timer = timer
        self.on_progress = on_progress
        self.skipped: dict[str, int] = {}
        self.times: list[tuple[float, Config]] = []
        self.graphs: dict[int, GraphedCalls] = {}

    def run(self, candidates: list[Config]) -> Result:
        self._look(candidates)
        if self.timer is None:
            leaders = [config for _, config in sorted(self.times, key=_time)[:_REFINED]]
            self._look([refined for config in leaders for refined in refinements(config)])
        if not self.times:
            counts = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            K, N = self.weights[0].shape
            raise RuntimeError(
                f"None of {len(candidates)} candidates runs for M={self.M}, N={N}, K={K} in "
                f"{self.a.dtype} on {self.a.device}: {counts}"
            )
        times, measured = self.times, len(self.times)
        torch_call = self._rotation(lambda b: torch.mm(self.a, b, out=self.out))
        if self.timer is None:
            times, torch_ms = self._final(GraphedCalls(torch_call))
        else:
            torch_ms = self.timer(torch_call)
        tuned_ms, config = min(times, key=_time)
        default_ms = next((ms for ms, config in times if config == self.default), math.nan)
        if tuned_ms > default_ms * (1 - _LEAST_GAIN):
            tuned_ms, config = default_ms, self.default
        return Result(self.M, config, default_ms, tuned_ms, torch_ms, measured, self.skipped)

    def _look(self, candidates: list[Config]) -> None:
        """A quick time of each candidate that runs and is right."""
        problems = self._compile(candidates)
        for index, (config, problem) in enumerate(zip(candidates, problems)):
            try:
                if problem is not None:
                    raise problem
                self.times.append((self._quick_ms(config), config))
            except Exception as error:
                self._skip(config, error)
            if self.on_progress is not None:
                best_ms = min((time_ms for time_ms, _ in self.times), default=math.nan)
                self.on_progress(self.M, index + 1, len(candidates), best_ms)

    def _compile(self, candidates: list[Config]) -> list[Exception | None]:
        """Compile all candidates at once; for each what stands against it."""

        def compile_one(config: Config) -> Exception | None:
            problem = kernels.config_problem(config, device_properties(self.a.device))
            problem = problem or kernels.operand_problem(config, self.a, self.weights[0], self.out)
            if problem:
                error = _Skip("does not fit")
                error.__cause__ = ValueError(problem)
                return error
            if kernels.INTERPRETED:
                return None
            try:
                kernels.compile_kernel(self.a, self.weights[0], self.out, config)
            except Exception as error:
                return error
            return None

        # Triton's passes and ptxas run outside of Python's lock.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return list(pool.map(compile_one, candidates))

    def _quick_ms(self, config: Config) -> float:
        call = self._rotation(lambda b: kernels.launch_gemm_kernel(self.a, b, self.out, config))
        self._check(config)
        if self.timer is not None:
            time_ms = self.timer(call)
        else:
            graph = GraphedCalls(call)
            self.graphs[id(config)] = graph
            time_ms = min(graph.time_ms() for _ in range(3))
        if not (math.isfinite(time_ms) and time_ms > 0):
            raise _Skip(f"timed as {time_ms} ms")
        return time_ms

    def _final(self, torch_graph: GraphedCalls) -> tuple[list[tuple[float, Config]], float]:
        """Medians of the finalists, the default among them, and of torch, from interleaved rounds."""
        ranked = sorted(self.times, key=_time)
        close = [config for ms, config in ranked if ms <= ranked[0][0] * _FINALIST_FACTOR]
        finalists = close[:_FINALISTS]
        finalists += [c for _, c in ranked if c == self.default and c not in finalists]
        calls = [*(self.graphs[id(config)] for config in finalists), torch_graph]
        *medians, torch_ms = map(statistics.median, interleaved_ms(calls, _FINAL_ROUNDS))
        return list(zip(medians, finalists)), torch_ms

    def _check(self, config: Config) -> None:
        # NaN in every element: what an earlier candidate wrote cannot cover for this one.
        self.out.fill_(math.nan)
        kernels.launch_gemm_kernel(self.a, self.weights[0], self.out, config)
        if not self.exact.is_right(self.out):
            raise _Skip("wrong result")

    def _rotation(self, call: Callable[[torch.Tensor], Any]) -> Rotation:
        return Rotation(call, self.weights)

    def _skip(self, config: Mapping[str, Any], error: Exception) -> None:
        # A compiler fails in many ways (Triton's own errors, ptxas, RuntimeError from a pass, IndexError),
        # and one candidate must not end the run.
        if isinstance(error, triton.runtime.errors.OutOfResources):
            reason = "out of resources"
        else:
            reason = (
                str(error) if isinstance(error, _Skip) else f"failed with {type(error).__name__}"
            )
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        logger.info("Skipped %s for M=%d: %s", config, self.M, error.__cause__ or error)
