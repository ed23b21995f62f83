"""Split-K: several programs share the sum over K of one tile, and the last one to arrive finishes it.

Each program writes its partial sum to scratch and counts itself in at the tile's counter. The last one
adds the partial sums in the order of k, so that the bits never depend on who was late, and sets
the counter back to zero: no launch has anything to clear, and none leaves anything behind.
"""

from __future__ import annotations

import threading
from typing import Callable

import torch
import triton
import triton.language as tl

from ..config import IntRange, Parameter

PARAMETER = Parameter(IntRange(1, 16), default=1)

# More tiles than this fill any GPU without a split.
_MAX_TILES = 1024
# As much as torch keeps for cuBLAS on Hopper: the partial sums shall stay in L2.
_MAX_PARTIALS_BYTES = 32 << 20
# Four MiB: one hundred captured launches of a hundred tiles for each of a hundred CUDA graphs.
_RESERVED_COUNTERS = 1 << 20
# Slices of the reserve begin at a 128-byte line: aligned as a compiled kernel takes every tensor to be.
_LINE = 32


@triton.jit
def block_range(K, split, BLOCK_SIZE_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """The first k block of a split and the one behind its last: all splits alike to within one block."""
    blocks = (K - 1) // BLOCK_SIZE_K + 1
    base = blocks // SPLIT_K
    more = blocks % SPLIT_K
    first = split * base + tl.minimum(split, more)
    return first, first + base + (split < more).to(tl.int32)


@triton.jit
def sum_splits(acc, offs, partials_ptr, counters_ptr, tile, split, SPLIT_K: tl.constexpr):
    """Hand in `acc`, the part of `tile` that `split` computed; returns (sum of all parts, is it complete).

    `offs` gives each element of acc its own place from 0 to the number of elements. The sum is complete
    in the one program of a tile that arrives last.
    """
    size: tl.constexpr = acc.numel
    partials_ptrs = partials_ptr + tile * (SPLIT_K * size) + offs
    # .cg: past L1, which is not coherent between multiprocessors.
    tl.store(partials_ptrs + split * size, acc, cache_modifier=".cg")
    # The atomic is one thread's: its release covers what the others wrote before this barrier.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        # Its own part is read back too: one code, one order. Unrolled, so that the loads overlap.
        acc = tl.load(partials_ptrs, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT_K):
            acc += tl.load(partials_ptrs + other * size, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    return acc, is_last


def operand_problem(SPLIT_K: int, tiles: int, tile_size: int) -> str | None:
    """Why a launch of ``tiles`` tiles with ``tile_size`` elements each is not split, or None."""
    if SPLIT_K == 1:
        return None
    if tiles > _MAX_TILES:
        return f"SPLIT_K {SPLIT_K} is for at most {_MAX_TILES} tiles, these are {tiles}"
    needed = tiles * tile_size * SPLIT_K * 4
    if needed > _MAX_PARTIALS_BYTES:
        return f"SPLIT_K {SPLIT_K} needs {needed} bytes of scratch, at most {_MAX_PARTIALS_BYTES} are used"
    return None


def operands(
    SPLIT_K: int, tiles: int, tile_size: int
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple]:
    """The `operands` of a launch: a, b, out, partials, counters; without a split the last two are None."""
    if SPLIT_K == 1:
        return _without_scratch
    size = tiles * tile_size * SPLIT_K

    def with_scratch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple:
        # From torch at each launch: its allocator orders reuse by stream, and gives a CUDA graph that
        # is captured memory of its own.
        partials = torch.empty(size, dtype=torch.float32, device=a.device)
        return a, b, out, partials, _get_counters(a.device, tiles)

    return with_scratch


def _without_scratch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple:
    return a, b, out, None, None


class _Reserve:
    """Zeroed counters of one GPU. A slice is given out for good, and each kernel leaves it zeroed."""

    def __init__(self, device: torch.device) -> None:
        self._used = 0
        self._lock = threading.Lock()
        # In a thread of its own: the memory is kept, so it must not come from a pool that the caller's
        # allocations are directed to (torch.cuda.use_mem_pool; torch.compile warms up in the pool of
        # its CUDA graphs, and raises for what is left there).
        thread = threading.Thread(target=self._allocate, args=(device,))
        thread.start()
        thread.join()

    def _allocate(self, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            self._counters = torch.zeros(_RESERVED_COUNTERS, dtype=torch.int32, device=device)
        # Zero for every stream from here on, also for a graph that waits for no other stream.
        stream.synchronize()

    def take(self, count: int) -> torch.Tensor | None:
        """``count`` counters that nobody else has, or None if so many are not left."""
        with self._lock:
            start = self._used
            end = start + -(-count // _LINE) * _LINE
            if end > _RESERVED_COUNTERS:
                return None
            self._used = end
        return self._counters[start:end]


_reserves: dict[int, _Reserve] = {}
_stream_counters: dict[tuple[int, int], torch.Tensor] = {}
_lock = threading.Lock()


def _get_counters(device: torch.device, tiles: int) -> torch.Tensor:
    """At least ``tiles`` counters that are zero when the launch which is about to follow starts.

    Two launches may have the same counters only if one never starts before the other has ended. So
    they belong to a stream: what is launched on it runs in order. (A handle that is used again after its
    stream was destroyed is as good here as in torch's allocator, which goes by handles too.)
    A captured launch runs on whatever stream its graph is replayed on, so it has counters of its own,
    from memory that was zeroed before: clearing them in the graph would cost a node at each replay. They
    are never given back, because nothing tells when the graph is gone; when the reserve is used up,
    as on devices other than CUDA's, a launch clears counters of its own.
    """
    counters = None
    if device.type == "cuda":
        # The device is the current one, as for every launch.
        if torch.cuda.is_current_stream_capturing():
            # Without a launch before the capture there is no reserve, and a capture forbids to make one.
            if device.index in _reserves:
                counters = _reserves[device.index].take(tiles)
        else:
            key = device.index, triton.runtime.driver.active.get_current_stream(device.index)
            counters = _stream_counters.get(key)
            if counters is None:
                counters = _add_stream(device, key)
    if counters is None:
        counters = torch.zeros(tiles, dtype=torch.int32, device=device)
    return counters


def _add_stream(device: torch.device, key: tuple[int, int]) -> torch.Tensor | None:
    with _lock:
        if device.index not in _reserves:
            _reserves[device.index] = _Reserve(device)
        if key not in _stream_counters:
            counters = _reserves[device.index].take(_MAX_TILES)
            if counters is None:
                return None
            _stream_counters[key] = counters
        return _stream_counters[key]
