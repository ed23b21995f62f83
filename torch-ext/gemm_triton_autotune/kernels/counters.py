"""Counters at which the programs of a launch count each other: zero before it, and zero again after it.

A launch that had to clear its counters first would be two, so they are kept: slices of one reserve for
each GPU, each slice for launches that never overlap.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

# The most that one launch may need.
MAX_COUNTERS = 1024
# Four MiB: a stream, or a CUDA graph, takes one for each tile of its largest launch.
_RESERVED_COUNTERS = 1 << 20
# Slices of the reserve begin at a 128-byte line: aligned as a compiled kernel takes every tensor to be.
_LINE = 32

# A device, a stream and the capture on it, 0 for none.
_Owner = tuple[int, int, int]


def get_counters(device: torch.device, count: int) -> torch.Tensor:
    """``count`` or more counters that are zero when the launch that is about to follow starts.

    Two launches may have the same counters only if one never starts before the other has ended. So
    counters belong to a stream, whose launches run in order, and outside of CUDA graphs to that alone.
    (A handle that is used again after its stream was destroyed is as good here as in torch's allocator,
    which goes by handles too.) Graphs captured on one stream may be replayed at once on others, so in a
    capture they belong to that capture and that stream. All of these were zeroed beforehand: clearing
    them in a graph would cost a node at each replay. Where there are none, the launch clears its own.
    """
    counters = None
    if device.type == "cuda" and (owner := _owner(device)) is not None:
        counters = _owned.get(owner)
        if counters is None or len(counters) < count:
            counters = _take_counters(device, owner, count)
    if counters is None:
        counters = torch.zeros(count, dtype=torch.int32, device=device)
    return counters


def _owner(device: torch.device) -> _Owner | None:
    """Whose launch is about to follow; None in a capture of which the driver does not tell the number."""
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
    try:
        query = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    query.argtypes = [ctypes.c_void_p] * 6
    return query


class _Reserve:
    """Zeroed counters of one GPU. A slice is given out for good, and each launch leaves it zeroed."""

    def __init__(self, device: torch.device) -> None:
        self._used = 0
        # In a thread of its own: the memory is kept, so it must not come from a pool that the caller's
        # allocations are directed to (torch.cuda.use_mem_pool; torch.compile warms up in the pool of
        # its CUDA graphs, and raises for what is left there).
        with ThreadPoolExecutor(max_workers=1) as executor:
            self._counters = executor.submit(_zeroed_counters, device).result()

    def take(self, count: int) -> torch.Tensor | None:
        """``count`` or more counters that nobody else has, or None if so many are not left."""
        start = self._used
        end = start + -(-count // _LINE) * _LINE
        if end > _RESERVED_COUNTERS:
            return None
        self._used = end
        return self._counters[start:end]


def _zeroed_counters(device: torch.device) -> torch.Tensor:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        counters = torch.zeros(_RESERVED_COUNTERS, dtype=torch.int32, device=device)
    # Zero for every stream from here on, also for a graph that waits for no other stream.
    stream.synchronize()
    return counters


_reserves: dict[int, _Reserve] = {}
_owned: dict[_Owner, torch.Tensor] = {}
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
