"""Split-K: several programs share the sum over K of one tile, and the last one to arrive finishes it.

Each program writes its partial sum to scratch and counts itself in at the tile's counter. The last one
adds the partial sums in the order of k, so that the bits never depend on who was late, and sets
the counter back to zero: no launch has anything to clear, and none leaves anything behind. It is the method
of CUDA's sample threadFenceReduction
(https://github.com/NVIDIA/cuda-samples/tree/master/Samples/2_Concepts_and_Techniques/threadFenceReduction).
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
    store_partial(acc, offs, partials_ptr, tile, split, SPLIT_K)
    is_last = arrive_last(counters_ptr, tile, SPLIT_K)
    if is_last:
        acc = sum_partials(acc, offs, partials_ptr, tile, SPLIT_K)
    return acc, is_last


@triton.jit
def store_partial(acc, offs, partials_ptr, tile, split, SPLIT_K: tl.constexpr):
    # .cg: past L1, which is not coherent between multiprocessors.
    partials_ptrs = partials_ptr + (tile * SPLIT_K + split) * acc.numel + offs
    tl.store(partials_ptrs, acc, cache_modifier=".cg")


@triton.jit
def arrive_last(counters_ptr, tile, SPLIT_K: tl.constexpr):
    """Count this program in at `tile`, after its partial sums; returns whether all others were there."""
    # The atomic is one thread's: its release covers what the others wrote before this barrier.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        tl.store(counters_ptr + tile, 0)
    return is_last


@triton.jit
def sum_partials(acc, offs, partials_ptr, tile, SPLIT_K: tl.constexpr):
    """The sum of all parts of `tile`, which have the shape of `acc`."""
    # Its own part is read back too: one code, one order. Unrolled, so that the loads overlap.
    partials_ptrs = partials_ptr + tile * (SPLIT_K * acc.numel) + offs
    acc = tl.load(partials_ptrs, cache_modifier=".cg")
    for other in tl.static_range(1, SPLIT_K):
        acc += tl.load(partials_ptrs + other * acc.numel, cache_modifier=".cg")
    return acc


@triton.jit
def mask_if(condition, mask):
    """`mask` where the scalar `condition` holds, else a mask of nothing."""
    # By integers, because Triton 3.9's interpreter spreads no truth value; a GPU's code is the same.
    return mask & (tl.full(mask.shape, 0, tl.int32) + condition != 0)


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
