"""Split-K: several programs share the sum over K of one tile, and then the summing of their partial sums.

Each program writes its partial sum to scratch and counts itself in at the tile's counter. A power of two of
them, the sharers, wait until all are there, and each adds up its share of the tile's rows, in the order of
k, so that the bits never depend on who was late. One alone would read all partial sums through one multiprocessor:
the last to arrive does that where they are few.

Nobody waits for long: programs that a GPU starts late, or one after the other, must not hold each other up. A
sharer that has waited enough marks its share as left and ends; the last one to arrive adds up what was left.
That makes it the method of CUDA's sample threadFenceReduction
(https://github.com/NVIDIA/cuda-samples/tree/master/Samples/2_Concepts_and_Techniques/threadFenceReduction)
where no sharer waits, and needs no launch that starts all programs at once.

A counter is one word: from below 16 marks, one for each share that was left; four bits of arrivals, which come
to sixteen in each launch and carry into the rest, the number of launches so far. So the lower two are zero after a
launch as before it: no launch has anything to clear, and none leaves anything behind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..config import IntRange, Parameter
from .launch import ScratchSize
from .scratch import MAX_COUNTERS

PARAMETER = Parameter(IntRange(1, 16), default=1)

# As much as torch keeps for cuBLAS on Hopper: the partial sums shall stay in L2.
_MAX_PARTIALS_BYTES = 32 << 20

# Two sharers halve what one would read, but to wait costs 0.3 us on an H200.
_LEAST_SHARED_BYTES = 80 << 10


@triton.jit
def block_range(K, split, BLOCK_SIZE_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """The first k block of a split and the one behind its last: all splits alike to within one block."""
    blocks = (K - 1) // BLOCK_SIZE_K + 1
    base = blocks // SPLIT_K
    more = blocks % SPLIT_K
    first = split * base + tl.minimum(split, more)
    return first, first + base + (split < more).to(tl.int32)


@triton.jit
def store_partial(acc, offs, partials_ptr, tile, split, SPLIT_K: tl.constexpr):
    """Hand in `acc`, the part of `tile` that `split` computed; `offs` gives each element its own place."""
    # .cg: past L1, which is not coherent between multiprocessors.
    partials_ptrs = partials_ptr + (tile * SPLIT_K + split) * acc.numel + offs
    tl.store(partials_ptrs, acc, cache_modifier=".cg")


@triton.jit
def count_in(counters_ptr, tile, split, SPLIT_K: tl.constexpr, SHARES: tl.constexpr):
    """Count this program in at `tile`, after its partial sums; returns which shares it adds up, a bit for each.

    If there is one, all partial sums of the tile can be read. If SHARES is 1, nobody waits for it.
    """
    # Not in the module: Triton's key of a kernel that calls one that uses a global differs by which
    # of them it met first, and a key of its own is a compile of its own.
    ARRIVAL: tl.constexpr = 1 << 16
    LAUNCH: tl.constexpr = 1 << 20
    counter_ptr = counters_ptr + tile
    # Sixteen in a launch, whatever SPLIT_K is.
    arrivals = tl.where(split == 0, 17 - SPLIT_K, 1) * ARRIVAL
    # The atomic is one thread's: its release covers what the others wrote before this barrier.
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, arrivals, sem="acq_rel")
    is_last = (before & (LAUNCH - 1)) + arrivals >= LAUNCH
    if SHARES == 1:
        shares = is_last.to(tl.int32)
    else:
        own_share = (split < SHARES).to(tl.int32) << split
        shares = 0
        if is_last:
            left = before & (ARRIVAL - 1)
            if left != 0:
                tl.atomic_add(counter_ptr, -left, sem="relaxed")
            shares = left | own_share
        elif own_share != 0:  # noqa: SIM102 - `and` would wait in any case: Triton evaluates both sides
            if _wait_for_last(counter_ptr, before, own_share, LAUNCH):
                shares = own_share
    return shares


@triton.jit
def _wait_for_last(counter_ptr, before, own_share, LAUNCH: tl.constexpr):
    """Whether all arrived in time; if not, `own_share` is left to the last."""
    # Each is a way to L2 and back. Programs that run at once end further apart than all of them only by mischance.
    MAX_POLLS: tl.constexpr = 16
    now = before
    polls = 0
    while _is_same_launch(before, now, LAUNCH) & (polls < MAX_POLLS):
        now = tl.atomic_add(counter_ptr, 0, sem="acquire")
        polls += 1
    if _is_same_launch(before, now, LAUNCH):
        now = tl.atomic_add(counter_ptr, own_share, sem="acq_rel")
        if not _is_same_launch(before, now, LAUNCH):
            # The last one came meanwhile, and saw no mark.
            tl.atomic_add(counter_ptr, -own_share, sem="relaxed")
    return not _is_same_launch(before, now, LAUNCH)


@triton.jit
def _is_same_launch(counter, later, LAUNCH: tl.constexpr):
    return (counter ^ later) & -LAUNCH == 0


@triton.jit
def sum_partials(offs, partials_ptr, tile, TILE_SIZE: tl.constexpr, SPLIT_K: tl.constexpr):
    """The sum of all parts of `tile`, which has TILE_SIZE elements, at the places `offs`."""
    # Unrolled, so that the loads overlap.
    partials_ptrs = partials_ptr + tile * (SPLIT_K * TILE_SIZE) + offs
    acc = tl.load(partials_ptrs, cache_modifier=".cg")
    for other in tl.static_range(1, SPLIT_K):
        acc += tl.load(partials_ptrs + other * TILE_SIZE, cache_modifier=".cg")
    return acc


def shares(SPLIT_K: int, tile_size: int) -> int:
    """The number of sharers of a tile with ``tile_size`` elements: rows are shared out by powers of two."""
    if SPLIT_K < 4 and SPLIT_K * tile_size * 4 < _LEAST_SHARED_BYTES:
        return 1
    return 1 << SPLIT_K.bit_length() - 1


def operand_problem(SPLIT_K: int, tiles: int, tile_size: int) -> str | None:
    """Why a launch of ``tiles`` tiles with ``tile_size`` elements each is not split, or None."""
    if SPLIT_K == 1:
        return None
    # That many fill any GPU without a split.
    if tiles > MAX_COUNTERS:
        return f"SPLIT_K {SPLIT_K} is for at most {MAX_COUNTERS} tiles, these are {tiles}"
    needed = tiles * tile_size * SPLIT_K * 4
    if needed > _MAX_PARTIALS_BYTES:
        return f"SPLIT_K {SPLIT_K} needs {needed} bytes of scratch, at most {_MAX_PARTIALS_BYTES} are used"
    return None


def scratch(SPLIT_K: int, tiles: int, tile_size: int) -> ScratchSize | None:
    """What a launch of ``tiles`` tiles with ``tile_size`` elements each shares its sums through."""
    return None if SPLIT_K == 1 else ScratchSize(tiles * tile_size * SPLIT_K, tiles)


def operands(SPLIT_K: int) -> tuple[str | None, str | None]:
    """The pointers to what `scratch` gives."""
    return (None, None) if SPLIT_K == 1 else ("partials", "counters")
