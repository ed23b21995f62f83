"""What the programs of a split launch share: partial sums, and counters at which they count each other.

A launch finds counters fit for it, zero at first, and leaves them so (`split_k`). One that had to clear its own first
would be two, so they are kept: slices of one reserve for each GPU, each slice for launches that never overlap.
Partial sums are kept where they are small, because to allocate them at each launch costs microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, NamedTuple

import torch
import triton

from ..device import cuda_driver_function

# The most that one launch may need.
MAX_COUNTERS = 1024
# Four MiB: a stream, or a CUDA graph, takes one for each tile of its largest launch.
_RESERVED_COUNTERS = 1 << 20
# Slices of the reserve begin at a 128-byte line: aligned as a compiled kernel takes every tensor to be.
_LINE = 32

# Four MiB of partial sums for a stream: what cuBLAS keeps for one is eight times that. More, and those of
# further streams, are allocated at each launch.
_KEPT_PARTIALS = 1 << 20
_MAX_KEPT = 16
# More than torch has.
_MAX_STREAMS = 64

# A device, a stream and the capture on it, 0 for none.
_Owner = tuple[int, int, int]


class Scratch(NamedTuple):
    """The memory of a launch. It must live until the launch is on its stream."""

    partials: torch.Tensor
    counters: torch.Tensor
    addresses: tuple[int, int]
    counter_count: int
    # For good, and for all launches on this stream outside of captures.
    is_kept: bool


def get_scratch(
    device: torch.device, partials: int, counters: int, stream: int | None = None
) -> Scratch:
    """Float32 elements, and counters that are fit for use when the launch that is about to follow starts.

    As many as are asked for or more of each, for a launch on ``stream``, by default the current one.
    Two launches may have the same only if one never starts before the other has ended. So both
    belong to a stream, whose launches run in order, and outside of CUDA graphs to that alone.
    (A handle that is used again after its stream was destroyed is as good here as in torch's allocator,
    which goes by handles too.) Graphs captured on one stream may be replayed at once on others, so in a
    capture they belong to that capture and that stream. All of these were zeroed beforehand: clearing
    them in a graph would cost a node at each replay. Where there are none, the launch clears its own.
    """
    if stream is not None and not torch.cuda.is_current_stream_capturing():
        # The usual case, by the shortest way.
        scratch = _scratches.get((device.index, stream))
        if scratch is not None and counters <= scratch.counter_count and partials <= _KEPT_PARTIALS:
            return scratch
    owner = _owner(device, stream) if device.type == "cuda" else None
    both = _get_partials(device, owner, partials), _get_counters(device, owner, counters)
    addresses = tuple(tensor.data_ptr() for tensor in both)
    is_kept = both[0] is _kept.get(owner) and both[1] is _owned.get(owner)
    scratch = Scratch(*both, addresses, len(both[1]), is_kept)
    if is_kept:
        _scratches[owner[:2]] = scratch
    return scratch


def _get_counters(device: torch.device, owner: _Owner | None, count: int) -> torch.Tensor:
    counters = None
    if owner is not None:
        counters = _owned.get(owner)
        if counters is None or len(counters) < count:
            counters = _take_counters(device, owner, count)
    if counters is None:
        counters = torch.zeros(count, dtype=torch.int32, device=device)
    return counters


def _get_partials(device: torch.device, owner: _Owner | None, count: int) -> torch.Tensor:
    kept = None
    # In a capture they come from torch, which takes them from the graph's own memory.
    if owner is not None and not owner[2] and count <= _KEPT_PARTIALS:
        kept = _kept.get(owner)
        if kept is None and len(_kept) < _MAX_KEPT:
            kept = _kept.setdefault(owner, _apart(_new_partials, device))
    return torch.empty(count, dtype=torch.float32, device=device) if kept is None else kept


def _owner(device: torch.device, stream: int | None = None) -> _Owner | None:
    """Whose launch is about to follow; None in a capture of which the driver does not tell the number."""
    if stream is None:
        stream = triton.runtime.driver.active.get_current_stream(device.index)
    # Of the current device, which is this one, as for every launch.
    capture = _capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
    return None if capture is None else (device.index, stream, capture)


def _capture_id(stream: int) -> int | None:
    """The number of the capture that ``stream`` is in: no other capture of this process has it."""
    query = _capture_query()
    if query is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    failed = query(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if failed else number.value or None


@functools.cache
def _capture_query() -> Any:
    # Torch does not hand out the number, so the driver is asked. Not on ROCm, whose streams are no streams of
    # CUDA's driver, which may be there all the same.
    if torch.version.hip is not None:
        return None
    query = cuda_driver_function("cuStreamGetCaptureInfo_v2")
    if query is not None:
        query.argtypes = [ctypes.c_void_p] * 6
    return query


class _Reserve:
    """Counters of one GPU, zeroed. A slice is given out for good, and each launch leaves it fit for the next."""

    def __init__(self, device: torch.device) -> None:
        self._used = 0
        self._counters = _apart(_zeroed_counters, device)

    def take(self, count: int) -> torch.Tensor | None:
        """``count`` or more counters that nobody else has, or None if so many are not left."""
        start = self._used
        end = start + -(-count // _LINE) * _LINE
        if end > _RESERVED_COUNTERS:
            return None
        self._used = end
        return self._counters[start:end]


def _apart(allocate: Callable[[torch.device], torch.Tensor], device: torch.device) -> torch.Tensor:
    """What ``allocate`` gives for ``device``, for the use of any stream.

    In a thread of its own: what is kept must not come from a pool that the caller's allocations are
    directed to (torch.cuda.use_mem_pool; torch.compile warms up in the pool of its CUDA graphs, and raises
    for what is left there). And with nothing queued: torch gives out memory again for the stream that freed
    it, while that stream may still have work to do on it.
    """

    def allocate_and_wait() -> torch.Tensor:
        for _ in range(_MAX_STREAMS):
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                # Torch hands out the same streams in turn, and another thread may be capturing on this one.
                if not torch.cuda.is_current_stream_capturing():
                    memory = allocate(device)
                    stream.synchronize()
                    return memory
        raise RuntimeError("split-K finds no stream for its memory that is not being captured")

    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(allocate_and_wait).result()


def _new_partials(device: torch.device) -> torch.Tensor:
    return torch.empty(_KEPT_PARTIALS, dtype=torch.float32, device=device)


def _zeroed_counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(_RESERVED_COUNTERS, dtype=torch.int32, device=device)


_reserves: dict[int, _Reserve] = {}
_owned: dict[_Owner, torch.Tensor] = {}
_kept: dict[_Owner, torch.Tensor] = {}
# Both, where a device and a stream have both outside of captures.
_scratches: dict[tuple[int, int], Scratch] = {}
_lock = threading.Lock()


def _take_counters(device: torch.device, owner: _Owner, count: int) -> torch.Tensor | None:
    with _lock:
        if device.index not in _reserves:
            if owner[2]:
                # A capture forbids what it takes to make one; any launch before it would have.
                return None
            _reserves[device.index] = _Reserve(device)
        # Never given back, because nothing tells when a stream or a graph is gone: bounded by the
        # reserve, and what comes after its end clears its own.
        counters = _reserves[device.index].take(count)
        if counters is not None:
            _owned[owner] = counters
        return counters
