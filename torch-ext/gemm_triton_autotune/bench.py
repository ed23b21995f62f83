"""The test bench of the tuner: one weight shape on one device, on which configurations are timed and checked.

It decides nothing. `worker.py` gives it a process of its own, since a configuration can hang or kill one.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import torch
import triton

from . import kernels, measure
from .config import Config
from .device import device_guard, device_properties


class Problem(NamedTuple):
    """A weight: b (K, N) in a layout and a dtype ("bfloat16")."""

    N: int
    K: int
    layout: str
    dtype: str


# The reason of a `Skip` for a result that is not the product.
WRONG = "wrong result"


class Skip(Exception):
    """A configuration is not chosen. ``reason`` is short, and counted; ``detail`` is for the log.

    turn: where several were launched in turn, the index of the one that it is about.
    """

    def __init__(self, reason: str, detail: str = "", turn: int | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.turn = turn

    @classmethod
    def because_of(cls, error: Exception) -> Skip:
        """A compiler fails in many ways (Triton's own errors, ptxas, RuntimeError from a pass, IndexError)."""
        if isinstance(error, cls):
            return error
        if isinstance(error, triton.runtime.errors.OutOfResources):
            return cls("out of resources", str(error))
        return cls(f"failed with {type(error).__name__}", str(error))


def awkward_rows(M: int) -> int:
    """The odd number above ``M``: a tile that fits M leaves a row of it over, which needs its masks."""
    return M + 1 if M % 2 == 0 else M + 2


class Bench:
    """Times and checks configurations for a (M, K) @ (K, N); `set_rows` comes first.

    timer: instead of CUDA graphs; then there are no rounds.
    """

    def __init__(
        self, problem: Problem, device: torch.device, timer: measure.Timer | None = None
    ) -> None:
        self._device = device
        self._timer = timer
        self._dtype = getattr(torch, problem.dtype)
        with device_guard(device):
            self._weights = measure.make_weights(
                problem.N, problem.K, self._dtype, problem.layout, device
            )

    @property
    def has_rounds(self) -> bool:
        """Are there CUDA graphs, whose replays can be interleaved?"""
        return self._timer is None

    def warm_up(self) -> None:
        """Bring a GPU from its idle clock to that of a busy one."""
        if self._device.type == "cuda":
            with device_guard(self._device):
                measure.warm_up(self._weights[0])

    def set_rows(self, M: int) -> None:
        """Make operands for ``M`` rows. Raises torch.OutOfMemoryError if they do not fit."""
        self._a = self._out = self._exact = self._rows = None
        self._graphs: dict[str, measure.GraphedCalls] = {}
        K, N = self._weights[0].shape
        like = {"dtype": self._dtype, "device": self._device}
        with device_guard(self._device):
            # With room for the awkward M, so that checking it takes no memory of its own.
            most = awkward_rows(M)
            self._rows = torch.randn(most, K, **like), torch.empty(most, N, **like)
            self._a, self._out = (rows[:M] for rows in self._rows)
            self._exact = measure.ExactProduct(self._a, self._weights[0])

    def quick_ms(self, config: Config) -> float:
        """A quick time of ``config``; Skip if it does not fit, does not run or gives a wrong result."""
        with device_guard(self._device), _skips():
            self._check(config)
            if self._timer is not None:
                time_ms = self._timer(self._rotation(config))
            else:
                graph = self._graphed(config)
                time_ms = min(graph.time_ms() for _ in range(2))
            if not (math.isfinite(time_ms) and time_ms > 0):
                raise Skip(f"timed as {time_ms} ms")
            return time_ms

    def torch_ms(self) -> float:
        """The time of torch.mm."""
        with device_guard(self._device):
            if self._timer is not None:
                return self._timer(self._rotation(None))
            return self._graphed(None).time_ms()

    def interleaved_ms(
        self,
        configs: Sequence[Config | None],
        rounds: int,
        on_turn: Callable[[int], None] = lambda index: None,
    ) -> list[list[float]]:
        """``rounds`` times of each, taken in turn; None stands for torch.mm.

        on_turn: told the index of each one before it is launched.
        """
        with device_guard(self._device), _skips():
            graphs = []
            for index, config in enumerate(configs):
                on_turn(index)
                graphs.append(self._graphed(config))
            return measure.interleaved_ms(graphs, rounds, on_turn)

    def verify(self, config: Config) -> None:
        """Skip if ``config`` is wrong in float64, for this M or the awkward one beside it."""
        b = self._weights[0]
        with device_guard(self._device), _skips():
            for M in (len(self._a), awkward_rows(len(self._a))):
                a, out = (rows[:M] for rows in self._rows)
                # At another M another family may have to take over, as it does in a call.
                if kernels.operand_problem(config, a, b, out) is None:
                    kernels.launch_gemm_kernel(a, b, out.fill_(math.nan), config)
                    if not measure.is_exact_in_part(out, a, b):
                        raise Skip(WRONG, f"at M={M}, against float64")

    def _check(self, config: Config) -> None:
        problem = kernels.config_problem(config, device_properties(self._device))
        problem = problem or kernels.operand_problem(config, self._a, self._weights[0], self._out)
        if problem:
            raise Skip("does not fit", problem)
        # NaN in every element: what an earlier candidate wrote cannot cover for this one.
        self._out.fill_(math.nan)
        kernels.launch_gemm_kernel(self._a, self._weights[0], self._out, config)
        if not self._exact.is_right(self._out):
            raise Skip(WRONG)

    def _rotation(self, config: Config | None) -> measure.Rotation:
        if config is None:
            call = lambda b: torch.mm(self._a, b, out=self._out)  # noqa: E731
        else:
            call = lambda b: kernels.launch_gemm_kernel(self._a, b, self._out, config)  # noqa: E731
        return measure.Rotation(call, self._weights)

    def _graphed(self, config: Config | None) -> measure.GraphedCalls:
        key = json.dumps(config)
        if key not in self._graphs:
            self._graphs[key] = measure.GraphedCalls(self._rotation(config))
        return self._graphs[key]


@contextlib.contextmanager
def _skips() -> Iterator[None]:
    """Turns what a configuration raises into a `Skip`."""
    try:
        yield
    except Skip:
        raise
    except Exception as error:
        raise Skip.because_of(error) from error


class CompileTarget:
    """What Triton's JIT asks of a driver before it launches, answered without a device.

    So compiling needs none: its processes leave the GPU and its memory alone. Triton's own cache on disk
    hands what they compile to the process that measures.
    """

    def __init__(self, backend: str, arch: Any, warp_size: int) -> None:
        self._target = triton.backends.compiler.GPUTarget(backend, arch, warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def current_target() -> tuple[str, Any, int]:
    """The arguments of `CompileTarget` for the current device."""
    target = triton.runtime.driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def compile_config(problem: Problem, M: int, config: Config, backend: str) -> None:
    """Compile what a launch of ``config`` needs, for the target that is active; Skip if that fails.

    backend: as in `DeviceProperties`. Its operands have no memory behind them, and only their kind counts.
    """
    N, K, layout, dtype = problem
    like = {"dtype": getattr(torch, dtype)}
    a, out = torch.empty(M, K, **like), torch.empty(M, N, **like)
    b = torch.empty(N, K, **like).t() if layout == "NT" else torch.empty(K, N, **like)
    with _skips():
        unfit = kernels.config_problem(config) or kernels.operand_problem(config, a, b, out)
        if unfit:
            raise Skip("does not fit", unfit)
        kernels.compile_kernel(a, b, out, config, backend=backend)
