"""How a launch is timed and checked: as it is deployed, and against the exact product."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import torch
import triton

Timer = Callable[[Callable[[], Any]], float]

# A replay of this length is long against the launch of a graph and the resolution of an event.
_REPLAY_MS = 0.5
_MAX_CALLS = 64
# The least time that the GPU idles before what is timed: longer than the host takes to queue that.
_REST_MS = 0.5
# The same without rests: what the launch of a graph takes the host, and so long a replay that it is little beside that.
_SUSTAINED_REPLAY_MS = 2.0
_SUSTAINED_REST_MS = 0.2
_CYCLES_PER_MS = 2_000_000
_WARM_UP_S = 0.2


def make_weight(
    N: int, K: int, dtype: torch.dtype, layout: str, device: torch.device
) -> torch.Tensor:
    """A random b (K, N) in ``layout``, scaled so that a product with it has a variance of 1."""
    shape = (N, K) if layout == "NT" else (K, N)
    weight = torch.randn(shape, dtype=dtype, device=device).mul_(K**-0.5)
    return weight.t() if layout == "NT" else weight


def make_weights(
    N: int, K: int, dtype: torch.dtype, layout: str, device: torch.device
) -> list[torch.Tensor]:
    """As many weights as are together three times the L2 cache, so that each call finds its own cold.

    A model's layers follow each other, so a weight is read from memory. One that stays in L2 would show
    a bandwidth that no model sees.
    """
    count = 1
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        count = min(max(math.ceil(3 * cache / (N * K * dtype.itemsize)), 1) + 1, 64)
    first = make_weight(N, K, dtype, layout, device)
    # The values of one suffice, at different addresses; `clone` keeps the layout.
    return [first, *(first.clone() for _ in range(count - 1))]


class Rotation:
    """Calls ``call`` with each of ``weights`` in turn."""

    def __init__(
        self, call: Callable[[torch.Tensor], Any], weights: Sequence[torch.Tensor]
    ) -> None:
        self._call = call
        self._weights = weights
        self._next = 0

    @property
    def period(self) -> int:
        return len(self._weights)

    def __call__(self) -> None:
        self._call(self._weights[self._next])
        self._next = (self._next + 1) % self.period


class GraphedCalls:
    """A CUDA graph of several calls of ``fn``: what a server replays, without the host's share.

    rests: the GPU idles before each replay as long as that takes. Without rests a card is soon at the limit of its
    power, and its clock goes up and down: on an H200 by a fifth, one kernel's time by 3 to 5 % from replay to replay;
    with them it stays at its highest, and the times within 0.3 % (`benchmarks/NOTES.md`, section 38).
    """

    def __init__(self, fn: Rotation, rests: bool = True) -> None:
        self._stream = _side_stream(torch.cuda.current_device())
        self._stream.wait_stream(torch.cuda.current_stream())
        # `torch.cuda.graph` collects garbage before each capture, a tenth of a second each time.
        with torch.cuda.stream(self._stream):
            fn()
            estimate_ms = elapsed_ms(fn)
            replay_ms = _REPLAY_MS if rests else _SUSTAINED_REPLAY_MS
            wanted = replay_ms / max(estimate_ms, 1e-3)
            # Whole rounds of the weights, so that the next replay starts with the coldest.
            rounds = math.ceil(min(wanted, _MAX_CALLS) / fn.period)
            self._calls = rounds * fn.period if wanted > 1 else 1
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin()
            try:
                for _ in range(self._calls):
                    fn()
            finally:
                self._graph.capture_end()
            self._graph.replay()
        self._rest_ms = max(_REST_MS, estimate_ms * self._calls) if rests else _SUSTAINED_REST_MS

    def time_ms(self) -> float:
        """Milliseconds of one call, from one replay."""
        with torch.cuda.stream(self._stream):
            return elapsed_ms(self._graph.replay, self._rest_ms) / self._calls


@functools.cache
def _side_stream(device_index: int) -> torch.cuda.Stream:
    # Capturing needs a stream that is not the default one; with one for all, cuBLAS keeps one workspace.
    return torch.cuda.Stream(device_index)


def elapsed_ms(fn: Callable[[], Any], rest_ms: float = _REST_MS) -> float:
    """Milliseconds that what ``fn()`` queues takes on the current stream, which is waited for, after ``rest_ms`` idle ones.

    The host's time to queue it is no part of that, as long as it is less than ``rest_ms``.
    """
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # On an idle stream the first event would be over before the host has queued the rest: 20 us for a graph.
    torch.cuda._sleep(int(rest_ms * _CYCLES_PER_MS))
    started.record()
    fn()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended)


def interleaved_ms(
    calls: Sequence[GraphedCalls],
    rounds: int,
    on_turn: Callable[[int], None] = lambda index: None,
) -> list[list[float]]:
    """``rounds`` times of each.

    In turn, since a card slows as it warms, and so slows all of them; in another order each round, since what ran
    before is part of a time.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _, order in zip(range(rounds), _orders(len(calls))):
        for index in order:
            on_turn(index)
            times[index].append(calls[index].time_ms())
    return times


def _orders(count: int) -> Iterator[list[int]]:
    """Orders of ``count`` things, so that each comes after each of the others once in ``count`` of them, or twice in
    twice as many if it is odd.

    The balanced squares of E. J. Williams, Australian Journal of Scientific Research A 2 (1949), 149.
    """
    first = [count - 1 - i // 2 if i % 2 else i // 2 for i in range(count)]
    for shift in itertools.count():
        order = [(index + shift) % count for index in first]
        yield order[::-1] if shift // count % 2 else order


def do_bench_timer(fn: Callable[[], Any]) -> float:
    """Median milliseconds of ``fn`` on the current GPU, its L2 cache cold: where there are no graphs."""
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


def own_timer(device: torch.device) -> Timer | None:
    """What takes the place of CUDA graphs on ``device``; None where there are graphs."""
    return {"cuda": None, "cpu": cpu_timer}.get(device.type, do_bench_timer)


def protocol(device: torch.device, timer: Timer | None, rests: bool = True) -> str:
    """How times are taken on ``device``, in words."""
    if timer is None:
        pauses = "rests as long as the replays" if rests else "no rests"
        return f"CUDA graphs, weights rotated so that L2 is cold, {pauses}, medians of interleaved rounds"
    own = {"cpu": "the clock, in Triton's interpreter"}.get(device.type, "triton.testing.do_bench")
    return own if timer is own_timer(device) else "a timer of the caller's"


def warm_up(weight: torch.Tensor) -> None:
    """Bring the GPU from its idle clock to that of a busy one."""
    a = weight.new_zeros(1024, weight.shape[0])
    end = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < end:
        torch.mm(a, weight)
        torch.cuda.synchronize(weight.device)


class ExactProduct:
    """Is a result the product of ``a`` and ``b``? Its error may be twice what rounding costs.

    The product is computed in ``dtype``, rows at a time, so that the temporaries stay small beside the operands.
    """

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> None:
        with _full_float32():
            self._exact = a.to(dtype) @ b.to(dtype)
        self._rows = max(1, (1 << 26) // b.shape[1])
        self._bound = 2 * self._max_error(self._exact.to(a.dtype)) + 1e-5

    def is_right(self, out: torch.Tensor) -> bool:
        # NaN stays NaN in amax, and no comparison with it holds.
        return self._max_error(out) <= self._bound

    def _max_error(self, out: torch.Tensor) -> float:
        blocks = zip(out.split(self._rows), self._exact.split(self._rows))
        errors = [(block.to(exact.dtype) - exact).abs().amax() for block, exact in blocks]
        return torch.stack(errors).amax().item()


def is_exact_in_part(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """`ExactProduct` in float64, of up to 256 rows, from the first to the last: each tile has some of them."""
    M, (K, N) = a.shape[0], b.shape
    count = min(M, 256)
    rows = torch.arange(count, device=a.device) * (M - 1) // max(count - 1, 1)
    columns = max(1, (1 << 25) // K)
    # Intel's Arc has no float64.
    has_float64 = a.device.type != "xpu" or torch.xpu.get_device_properties(a.device).has_fp64
    exact = torch.float64 if has_float64 else torch.float32
    return all(
        ExactProduct(a[rows], b[:, start : start + columns], exact).is_right(
            out[rows, start : start + columns]
        )
        for start in range(0, N, columns)
    )


def device_works(device: torch.device) -> bool:
    """Does ``device`` still compute? After a fault in a kernel it does not, for the rest of the process."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
