"""The `tma` family: tiles loaded by Hopper's tensor memory accelerator (TMA), through host descriptors.

The hardware copies whole tiles into shared memory, clips them at the edges and fills with zeros, so
there are no pointers, no masks and few registers beside the accumulator. In return a and b must be
aligned and contiguous along one side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import torch
import triton
import triton.language as tl

from ..config import IntRange, Parameter
from ..device import DeviceProperties, device_properties
from . import dependent_launch, split_k
from .bias import load_bias
from .dependent_launch import (
    dependent_launch_problem,
    inputs_are_read,
    prefetch,
    prefetch_offsets,
    wait_for_inputs,
)
from .descriptor import descriptor_problem, is_transposed, row_stride
from .launch import INTERPRETED, Described, Launch, cdiv, shared_memory_problem
from .raster import first_row, grouped_tile
from .split_k import block_range, count_in, store_partial, sum_partials

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton 3.3
    TensorDescriptor = None
else:

    class _Descriptor(TensorDescriptor):
        """A descriptor that does not repeat `operand_problem`'s checks: 0.2 us on the host, not 1.2."""

        def __post_init__(self) -> None:
            pass


NAME = "tma"

# The widths of the one or two accumulators that a tile has side by side. Triton's tensors are powers of two
# on every side, and between these lie the tiles that fill the last wave of programs.
_PARTS = {
    16: (16, 0),
    32: (32, 0),
    48: (32, 16),
    64: (64, 0),
    96: (64, 32),
    128: (128, 0),
    160: (128, 32),
    192: (128, 64),
    256: (256, 0),
    288: (256, 32),
    320: (256, 64),
    384: (256, 128),
}

PARAMETERS = {
    "BLOCK_SIZE_M": Parameter(IntRange(16, 384)),
    "BLOCK_SIZE_N": Parameter(IntRange(64, 384)),
    "BLOCK_SIZE_K": Parameter(IntRange(64, 256, power_of_two=True)),
    "GROUP_SIZE_M": Parameter(IntRange(1, 1 << 20)),
    # 1: out.T = b.T @ a.T is computed, so that the columns of b are on the first side of wgmma, which takes
    # no less than 64, and the rows of a on the second, which takes 16 and is made of parts.
    "SWAP": Parameter(IntRange(0, 1), default=0),
    "SPLIT_K": split_k.PARAMETER,
    **dependent_launch.PARAMETERS,
    # 1: a program on each multiprocessor takes tile after tile, and loads the next while it stores one.
    "PERSISTENT": Parameter(IntRange(0, 1), default=0),
    # The parts in which a persistent program stores a tile: shared memory holds one of them.
    "EPILOGUE_SUBTILE": Parameter(IntRange(1, 2), default=1),
}


@triton.jit
def _load_a(a_desc, offset_m, offset_k, A_TRANSPOSED: tl.constexpr):
    return (
        a_desc.load([offset_k, offset_m]).T if A_TRANSPOSED else a_desc.load([offset_m, offset_k])
    )


@triton.jit
def _load_b(b_desc, offset_k, offset_n, B_TRANSPOSED: tl.constexpr):
    return (
        b_desc.load([offset_n, offset_k]).T if B_TRANSPOSED else b_desc.load([offset_k, offset_n])
    )


@triton.jit
def _store(
    out_ptr,
    bias_ptr,
    acc,
    offset_m,
    offset_n,
    M,
    N,
    strides,
    BLOCK_SIZE_M: tl.constexpr,
    PART_N: tl.constexpr,
    SWAP: tl.constexpr,
):
    # 64 bits: an index times a stride passes 2**31 elements in real batches.
    offs_m = offset_m.to(tl.int64) + tl.arange(0, BLOCK_SIZE_M)
    offs_n = offset_n.to(tl.int64) + tl.arange(0, PART_N)
    if bias_ptr is not None:
        if SWAP:
            acc += load_bias(bias_ptr, offs_m, M)[:, None]
        else:
            acc += load_bias(bias_ptr, offs_n, N)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * strides[0] + offs_n[None, :] * strides[1]
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


# The hardware clips, so no size decides how a load is made. And a K known to be one block, as K = 1 would
# be, makes another kernel: without a loop its barriers lie where tiles were, and on an H200 it faulted.
@triton.jit(do_not_specialize=["M", "N", "K"])
def _tma_kernel(
    # descriptors of a and of b, for each part of the tile's width its own, and pointers
    a_desc,
    b_desc,
    b2_desc,
    weight_ptr,
    out_ptr,
    bias_ptr,
    partials_ptr,
    counters_ptr,
    # shape
    M,
    N,
    K,
    # strides in elements
    stride_wk,
    stride_wn,
    stride_om,
    stride_on,
    # tile
    BLOCK_SIZE_M: tl.constexpr,
    PART_N: tl.constexpr,
    PART_N2: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SHARES: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    M_MULTIPLE_OF_16: tl.constexpr,
    N_MULTIPLE_OF_16: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """out = a @ b + bias; a (M, K) and b (K, N), or their transposes behind the descriptors, out (M, N).

    The bias is None, or one number for each column of out; if SWAP, for each row, a column of the caller's out.
    The weight, which is what is prefetched, is b; if SWAP, a. A program computes one of the SPLIT_K parts along
    K of one tile of out, BLOCK_SIZE_M rows of PART_N + PART_N2 columns. Each part of the columns has its own
    accumulator, and both are fed by one load of a.
    """
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, PART_N + PART_N2)
    split = tl.program_id(0) % SPLIT_K
    tile = tl.program_id(0) // SPLIT_K
    pid_m, pid_n = grouped_tile(tile, num_pid_m, num_pid_n, GROUP_SIZE_M)
    offset_m = pid_m * BLOCK_SIZE_M
    offset_n = pid_n * (PART_N + PART_N2)
    # The caller's rows, where they are rows in memory, too.
    if SWAP:
        if B_TRANSPOSED:
            offset_n = first_row(pid_n, N, PART_N + PART_N2)
    elif not A_TRANSPOSED:
        offset_m = first_row(pid_m, M, BLOCK_SIZE_M)
    if SPLIT_K == 1:
        first_k, last_k = 0, K
    else:
        first_block, last_block = block_range(K, split, BLOCK_SIZE_K, SPLIT_K)
        first_k, last_k = first_block * BLOCK_SIZE_K, last_block * BLOCK_SIZE_K
    # A loop that may be empty gives the accumulator a second start value, and ptxas then waits after
    # every single wgmma (its message C7515).
    tl.assume(last_k > first_k)

    if PREFETCH > 0:
        # The first part of its columns only: rows of a power of two.
        offs = prefetch_offsets(
            offset_m if SWAP else offset_n,
            first_k,
            M if SWAP else N,
            K,
            stride_wk,
            stride_wn,
            BLOCK_SIZE_M if SWAP else PART_N,
            PREFETCH * BLOCK_SIZE_K,
            not A_TRANSPOSED if SWAP else B_TRANSPOSED,
        )
        prefetch(weight_ptr + offs)
    wait_for_inputs(PDL)
    acc = tl.zeros((BLOCK_SIZE_M, PART_N), dtype=tl.float32)
    if PART_N2 > 0:
        acc2 = tl.zeros((BLOCK_SIZE_M, PART_N2), dtype=tl.float32)
    for k in range(first_k, last_k, BLOCK_SIZE_K):
        a = _load_a(a_desc, offset_m, k, A_TRANSPOSED)
        b = _load_b(b_desc, k, offset_n, B_TRANSPOSED)
        acc = tl.dot(a, b, acc)
        if PART_N2 > 0:
            b2 = _load_b(b2_desc, k, offset_n + PART_N, B_TRANSPOSED)
            acc2 = tl.dot(a, b2, acc2)
    inputs_are_read(PDL)

    # The same values, and the compiler sees that whole vectors of out are inside or outside.
    if M_MULTIPLE_OF_16:
        M = M // 16 * 16
    if N_MULTIPLE_OF_16:
        N = N // 16 * 16
    strides = (stride_om, stride_on)
    offset_n2 = offset_n + PART_N
    # fmt: off
    if SPLIT_K == 1:
        _store(out_ptr, bias_ptr, acc, offset_m, offset_n, M, N, strides, BLOCK_SIZE_M, PART_N, SWAP)
        if PART_N2 > 0:
            _store(out_ptr, bias_ptr, acc2, offset_m, offset_n2, M, N, strides, BLOCK_SIZE_M, PART_N2, SWAP)
    else:
        store_partial(acc, _offs(0, BLOCK_SIZE_M, PART_N), partials_ptr, tile, split, SPLIT_K)
        # Behind the partial sums of the first parts of all tiles.
        partials2_ptr = partials_ptr + num_pid_m * num_pid_n * (SPLIT_K * BLOCK_SIZE_M * PART_N)
        if PART_N2 > 0:
            store_partial(acc2, _offs(0, BLOCK_SIZE_M, PART_N2), partials2_ptr, tile, split, SPLIT_K)
        shares = count_in(counters_ptr, tile, split, SPLIT_K, SHARES)
        SHARE_M: tl.constexpr = BLOCK_SIZE_M // SHARES
        for share in range(SHARES):
            if (shares >> share) & 1:
                row = share * SHARE_M
                total = sum_partials(_offs(row, SHARE_M, PART_N), partials_ptr, tile, BLOCK_SIZE_M * PART_N, SPLIT_K)
                _store(out_ptr, bias_ptr, total, offset_m + row, offset_n, M, N, strides, SHARE_M, PART_N, SWAP)
                if PART_N2 > 0:
                    total2 = sum_partials(_offs(row, SHARE_M, PART_N2), partials2_ptr, tile, BLOCK_SIZE_M * PART_N2, SPLIT_K)
                    _store(out_ptr, bias_ptr, total2, offset_m + row, offset_n2, M, N, strides, SHARE_M, PART_N2, SWAP)
    # fmt: on


@triton.jit
def _offs(row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = row + tl.arange(0, ROWS)
    return rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit(do_not_specialize=["M", "N", "K"])
def _tma_persistent_kernel(
    # descriptors and a pointer
    a_desc,
    b_desc,
    out_desc,
    bias_ptr,
    # shape
    M,
    N,
    K,
    # tile
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = a @ b + bias; a (M, K) and b (K, N), or their transposes behind the descriptors, out (M, N).

    The bias is (N,) or None. A program computes every num_programs-th tile of out. The loops over tiles and over k are flattened
    into one, so that the loads of the next tile are under way while this one is stored, as in Triton's
    tutorial 09 (https://triton-lang.org/main/getting-started/tutorials/09-persistent-matmul.html).
    """
    tl.assume(K > 0)  # for the same reason as above

    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_tiles = num_pid_m * num_pid_n
    wait_for_inputs(PDL)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_tile(tile, num_pid_m, num_pid_n, GROUP_SIZE_M)
        offset_m = pid_m * BLOCK_SIZE_M
        offset_n = pid_n * BLOCK_SIZE_N
        if not A_TRANSPOSED:
            offset_m = first_row(pid_m, M, BLOCK_SIZE_M)

        acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_SIZE_K):
            a = _load_a(a_desc, offset_m, k, A_TRANSPOSED)
            b = _load_b(b_desc, k, offset_n, B_TRANSPOSED)
            acc = tl.dot(a, b, acc)

        if bias_ptr is not None:
            acc += load_bias(bias_ptr, offset_n + tl.arange(0, BLOCK_SIZE_N), N)[None, :]
        if EPILOGUE_SUBTILE == 1:
            out_desc.store([offset_m, offset_n], acc.to(out_desc.dtype))
        else:
            halves = tl.reshape(acc, (BLOCK_SIZE_M, 2, BLOCK_SIZE_N // 2))
            left, right = tl.split(tl.permute(halves, (0, 2, 1)))
            out_desc.store([offset_m, offset_n], left.to(out_desc.dtype))
            out_desc.store([offset_m, offset_n + BLOCK_SIZE_N // 2], right.to(out_desc.dtype))
    inputs_are_read(PDL)


def config_problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    rows, columns = _tile(config)
    num_warps, num_stages = config["num_warps"], config["num_stages"]
    persistent, subtile = config.get("PERSISTENT", 0), config.get("EPILOGUE_SUBTILE", 1)
    if properties and not _has_tma(properties):
        return "needs a CUDA device of compute capability 9.0 or newer"
    if rows not in (64, 128, 256) or columns not in _PARTS:
        first, second = ("BLOCK_SIZE_N", "BLOCK_SIZE_M") if config.get("SWAP") else _SIDES
        return (
            f"{first} must be 64, 128 or 256 and {second} one of {list(_PARTS)}, "
            f"got {rows} and {columns}"
        )
    alone = not (config.get("SWAP") or config.get("PREFETCH") or config.get("SPLIT_K", 1) > 1)
    if persistent and (_PARTS[columns][1] or not alone):
        return "a persistent kernel takes no two-part tile, no SWAP, no PREFETCH and no SPLIT_K"
    if subtile > 1 and not persistent:
        return "EPILOGUE_SUBTILE 2 needs PERSISTENT 1"
    # wgmma belongs to four warps and 64 rows; 16 warps would have too few registers each.
    if num_warps not in (4, 8) or rows < 16 * num_warps:
        return f"num_warps must be 4, or 8 from 128 rows on, got {num_warps} for {rows} rows"
    if num_stages < 2:
        return f"num_stages must be 2 or more, got {num_stages}"
    if "maxnreg" in config:
        return "takes no maxnreg: an accumulator needs its registers"
    # Of the 255 registers of a thread the accumulator may take 192; the rest is enough, on Hopper without a spill.
    if rows * columns > 192 * 32 * num_warps:
        return f"a {rows}x{columns} tile needs more than the registers of {num_warps} warps"
    problem = dependent_launch_problem(config, properties) or shared_memory_problem(
        _shared_memory(config), properties
    )
    if properties and TensorDescriptor is None:
        return problem or "needs Triton 3.4 or newer"
    return problem


_SIDES = "BLOCK_SIZE_M", "BLOCK_SIZE_N"


def _tile(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of what a program computes: a tile of out, or of out.T if swapped."""
    rows, columns = (config[side] for side in _SIDES)
    return (columns, rows) if config.get("SWAP", 0) else (rows, columns)


def _has_tma(properties: DeviceProperties) -> bool:
    if properties.backend == "cuda":
        return properties.capability is not None and properties.capability >= (9, 0)
    return properties.backend == "cpu"  # the interpreter knows descriptors


def _shared_memory(config: Mapping[str, Any]) -> int:
    """The bytes that a kernel keeps in shared memory, at most: some barriers may be one."""
    rows, columns = _tile(config)
    num_stages = config["num_stages"]
    # One for each stage of a, of b, and of the second part of b, aligned.
    barriers = cdiv(8 * num_stages, 16) * 16 * (3 if _PARTS[columns][1] else 2)
    needed = num_stages * (rows + columns) * config["BLOCK_SIZE_K"] * 2 + barriers
    if config.get("PERSISTENT", 0):
        needed += rows * columns * 2 // config.get("EPILOGUE_SUBTILE", 1)
    return needed


def operand_problem(
    config: Mapping[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> str | None:
    if INTERPRETED and a.dtype == torch.bfloat16:
        a, b, out = a.float(), b.float(), out.float()  # what is launched in their place
    split = config.get("SPLIT_K", 1)
    blocks = cdiv(a.shape[1], config["BLOCK_SIZE_K"])
    if split > blocks:
        return f"SPLIT_K {split} is for at least as many blocks of K, these are {blocks}"
    return (
        descriptor_problem("a", a.t() if is_transposed(a) else a)
        or descriptor_problem("b", b.t() if is_transposed(b) else b)
        or (descriptor_problem("out", out, written=True) if config.get("PERSISTENT", 0) else None)
        or split_k.operand_problem(split, _tiles(config, out), _tile_size(config))
    )


def _tiles(config: Mapping[str, Any], out: torch.Tensor) -> int:
    M, N = out.shape
    return cdiv(M, config["BLOCK_SIZE_M"]) * cdiv(N, config["BLOCK_SIZE_N"])


def _tile_size(config: Mapping[str, Any]) -> int:
    return config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"]


def _describe(tensor: torch.Tensor, block: tuple[int, int]) -> Callable[[torch.Tensor], Any]:
    """What makes the descriptor of a tensor like this: all but its address is known before the launch.

    ``block`` counts along the tensor's own sides; a transposed tensor is described by its rows.
    """
    rows = tensor.t() if is_transposed(tensor) else tensor
    block = block[::-1] if is_transposed(tensor) else block
    lists = list(rows.shape), [row_stride(rows), 1], list(block)
    return lambda tensor: _Descriptor(tensor, *lists)


def prepare(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: Mapping[str, Any]
) -> Launch:
    tiles = _tiles(config, out)
    if config.get("PERSISTENT", 0):
        return _prepare_persistent(a, b, out, config, tiles)
    swap, split = config.get("SWAP", 0), config.get("SPLIT_K", 1)
    block_k = config["BLOCK_SIZE_K"]
    rows, columns = _tile(config)
    parts = _PARTS[columns]
    a_transposed, b_transposed = is_transposed(a), is_transposed(b)
    # First what the kernel calls a, then what it calls b: swapped these are b.T and a.T, which are as
    # transposed as b and a are not.
    if swap:
        first = Described("b", _describe(b, (block_k, rows)))
        second = [Described("a", _describe(a, (part, block_k))) for part in parts if part]
        transposed = (not b_transposed, not a_transposed)
        shape, strides = out.t().shape, out.t().stride()
    else:
        first = Described("a", _describe(a, (rows, block_k)))
        second = [Described("b", _describe(b, (block_k, part))) for part in parts if part]
        transposed = (a_transposed, b_transposed)
        shape, strides = out.shape, out.stride()
    if len(second) == 1:
        second.append(None)

    prefetch = config.get("PREFETCH", 0)
    # N is a size of the model, so that a compile may count on it; M is not.
    n_multiple_of_16 = out.shape[1] % 16 == 0
    return Launch(
        kernel=_tma_kernel,
        grid=(tiles * split, 1, 1),
        operands=(
            first,
            *second,
            "b" if prefetch else None,
            "out",
            "bias",
            *split_k.operands(split),
        ),
        values=(*shape, a.shape[1], *b.stride(), *strides)
        + (rows, *parts, block_k, config["GROUP_SIZE_M"])
        + (split, split_k.shares(split, _tile_size(config)), *transposed)
        + ((n_multiple_of_16, False) if swap else (False, n_multiple_of_16))
        + (bool(swap), config.get("PDL", 0), prefetch),
        scratch=split_k.scratch(split, tiles, _tile_size(config)),
        options=dependent_launch.options(config),
    )


def _prepare_persistent(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: Mapping[str, Any], tiles: int
) -> Launch:
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    subtile = config.get("EPILOGUE_SUBTILE", 1)
    # The interpreter has no multiprocessors: one program takes all tiles.
    programs = device_properties(a.device).multiprocessors or 1
    return Launch(
        kernel=_tma_persistent_kernel,
        grid=(min(programs, tiles), 1, 1),
        operands=(
            Described("a", _describe(a, (block_m, block_k))),
            Described("b", _describe(b, (block_k, block_n))),
            Described("out", _describe(out, (block_m, block_n // subtile))),
            "bias",
        ),
        values=(*out.shape, a.shape[1], block_m, block_n, block_k)
        + (
            config["GROUP_SIZE_M"],
            subtile,
            is_transposed(a),
            is_transposed(b),
            config.get("PDL", 0),
        ),
        options=dependent_launch.options(config),
    )
