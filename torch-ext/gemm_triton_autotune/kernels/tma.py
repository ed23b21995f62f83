"""The `tma` family: tiles loaded by Hopper's tensor memory accelerator (TMA), through host descriptors.

The hardware copies whole tiles into shared memory, clips them at the edges and fills with zeros, so
there are no pointers, no masks and few registers beside the accumulator. In return a and b must be
aligned and contiguous along their rows (b along its columns, when it is a transposed weight).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import torch
import triton
import triton.language as tl

from ..config import IntRange, Parameter
from ..device import DeviceProperties, device_properties
from .descriptor import descriptor_problem, row_stride
from .launch import INTERPRETED, Launch, cdiv, shared_memory_problem
from .raster import grouped_tile

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
    "BLOCK_SIZE_M": Parameter(IntRange(64, 256, power_of_two=True)),
    "BLOCK_SIZE_N": Parameter(IntRange(min(_PARTS), max(_PARTS))),
    "BLOCK_SIZE_K": Parameter(IntRange(64, 128, power_of_two=True)),
    "GROUP_SIZE_M": Parameter(IntRange(1, 1 << 20)),
    # 1: a program on each multiprocessor takes tile after tile, and loads the next while it stores one.
    "PERSISTENT": Parameter(IntRange(0, 1), default=0),
    # The parts in which a persistent program stores a tile: shared memory holds one of them.
    "EPILOGUE_SUBTILE": Parameter(IntRange(1, 2), default=1),
}


@triton.jit
def _load_b(b_desc, offset_k, offset_n, B_TRANSPOSED: tl.constexpr):
    return (
        b_desc.load([offset_n, offset_k]).T if B_TRANSPOSED else b_desc.load([offset_k, offset_n])
    )


@triton.jit
def _store(
    out_ptr,
    acc,
    offset_m,
    offset_n,
    M,
    N,
    stride_om,
    stride_on,
    BLOCK_SIZE_M: tl.constexpr,
    PART_N: tl.constexpr,
):
    # 64 bits: an index times a stride passes 2**31 elements in real batches.
    offs_m = offset_m.to(tl.int64) + tl.arange(0, BLOCK_SIZE_M)
    offs_n = offset_n.to(tl.int64) + tl.arange(0, PART_N)
    out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_n[None, :] * stride_on
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _tma_kernel(
    # descriptors of a and of b, for each part of the tile's width its own, and a pointer
    a_desc,
    b_desc,
    b2_desc,
    out_ptr,
    # shape
    M,
    N,
    K,
    # strides in elements
    stride_om,
    stride_on,
    # tile
    BLOCK_SIZE_M: tl.constexpr,
    PART_N: tl.constexpr,
    PART_N2: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    """out = a @ b; a (M, K), b (K, N) or its transpose behind the descriptor, out (M, N).

    A program computes one tile of out, BLOCK_SIZE_M rows of PART_N + PART_N2 columns. Each part has its
    own accumulator, and both are fed by one load of a.
    """
    # A loop that may be empty gives the accumulator a second start value, and ptxas then waits after
    # every single wgmma (its message C7515).
    tl.assume(K > 0)

    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, PART_N + PART_N2)
    pid_m, pid_n = grouped_tile(tl.program_id(0), num_pid_m, num_pid_n, GROUP_SIZE_M)
    offset_m = pid_m * BLOCK_SIZE_M
    offset_n = pid_n * (PART_N + PART_N2)

    acc = tl.zeros((BLOCK_SIZE_M, PART_N), dtype=tl.float32)
    if PART_N2 > 0:
        acc2 = tl.zeros((BLOCK_SIZE_M, PART_N2), dtype=tl.float32)
    for k in range(0, K, BLOCK_SIZE_K):
        a = a_desc.load([offset_m, k])
        b = _load_b(b_desc, k, offset_n, B_TRANSPOSED)
        acc = tl.dot(a, b, acc)
        if PART_N2 > 0:
            b2 = _load_b(b2_desc, k, offset_n + PART_N, B_TRANSPOSED)
            acc2 = tl.dot(a, b2, acc2)

    _store(out_ptr, acc, offset_m, offset_n, M, N, stride_om, stride_on, BLOCK_SIZE_M, PART_N)
    if PART_N2 > 0:
        offset_n += PART_N
        _store(out_ptr, acc2, offset_m, offset_n, M, N, stride_om, stride_on, BLOCK_SIZE_M, PART_N2)


@triton.jit(do_not_specialize=["M"])
def _tma_persistent_kernel(
    # descriptors
    a_desc,
    b_desc,
    out_desc,
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
    B_TRANSPOSED: tl.constexpr,
):
    """out = a @ b; a (M, K), b (K, N) or its transpose behind the descriptor, out (M, N).

    A program computes every num_programs-th tile of out. The loops over tiles and over k are flattened
    into one, so that the loads of the next tile are under way while this one is stored, as in Triton's
    tutorial 09 (https://triton-lang.org/main/getting-started/tutorials/09-persistent-matmul.html).
    """
    tl.assume(K > 0)  # as above

    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_tiles = num_pid_m * num_pid_n
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_tile(tile, num_pid_m, num_pid_n, GROUP_SIZE_M)
        offset_m = pid_m * BLOCK_SIZE_M
        offset_n = pid_n * BLOCK_SIZE_N

        acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_SIZE_K):
            a = a_desc.load([offset_m, k])
            b = _load_b(b_desc, k, offset_n, B_TRANSPOSED)
            acc = tl.dot(a, b, acc)

        if EPILOGUE_SUBTILE == 1:
            out_desc.store([offset_m, offset_n], acc.to(out_desc.dtype))
        else:
            halves = tl.reshape(acc, (BLOCK_SIZE_M, 2, BLOCK_SIZE_N // 2))
            left, right = tl.split(tl.permute(halves, (0, 2, 1)))
            out_desc.store([offset_m, offset_n], left.to(out_desc.dtype))
            out_desc.store([offset_m, offset_n + BLOCK_SIZE_N // 2], right.to(out_desc.dtype))


def config_problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    num_warps, num_stages = config["num_warps"], config["num_stages"]
    persistent, subtile = config.get("PERSISTENT", 0), config.get("EPILOGUE_SUBTILE", 1)
    if TensorDescriptor is None:
        return "needs Triton 3.4 or newer"
    if properties and not _has_tma(properties):
        return "needs a CUDA device of compute capability 9.0 or newer"
    if block_n not in _PARTS:
        return f"BLOCK_SIZE_N must be one of {list(_PARTS)}, got {block_n}"
    if persistent and _PARTS[block_n][1]:
        return f"a persistent kernel takes no two-part tile, got BLOCK_SIZE_N {block_n}"
    if subtile > 1 and not persistent:
        return "EPILOGUE_SUBTILE 2 needs PERSISTENT 1"
    # wgmma belongs to four warps and 64 rows; 16 warps would have too few registers each.
    if num_warps not in (4, 8) or block_m < 16 * num_warps:
        return f"num_warps must be 4, or 8 from 128 rows on, got {num_warps} for {block_m} rows"
    if num_stages < 2:
        return f"num_stages must be 2 or more, got {num_stages}"
    if "maxnreg" in config:
        return "takes no maxnreg: an accumulator needs its registers"
    # Of the 255 registers of a thread the accumulator may take 192; the rest is enough, nothing spills.
    if block_m * block_n > 192 * 32 * num_warps:
        return f"a {block_m}x{block_n} tile needs more than the registers of {num_warps} warps"
    return shared_memory_problem(_shared_memory(config), properties)


def _has_tma(properties: DeviceProperties) -> bool:
    if properties.backend == "cuda":
        return properties.capability is not None and properties.capability >= (9, 0)
    return properties.backend == "cpu"  # the interpreter knows descriptors


def _shared_memory(config: Mapping[str, Any]) -> int:
    """The bytes that a kernel keeps in shared memory: what `metadata.shared` of the compiled one says."""
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    num_stages = config["num_stages"]
    barriers = 8 * num_stages
    if _PARTS[block_n][1]:
        barriers += cdiv(barriers, 16) * 16  # one more for each second part, aligned
    needed = num_stages * (block_m + block_n) * block_k * 2 + barriers
    if config.get("PERSISTENT", 0):
        needed += block_m * block_n * 2 // config.get("EPILOGUE_SUBTILE", 1)
    return needed


def operand_problem(
    config: Mapping[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> str | None:
    if INTERPRETED and a.dtype == torch.bfloat16:
        a, b, out = a.float(), b.float(), out.float()  # what is launched in their place
    return (
        descriptor_problem("a", a)
        or descriptor_problem("b", b.t() if _is_transposed(b) else b)
        or (descriptor_problem("out", out, written=True) if config.get("PERSISTENT", 0) else None)
    )


def _is_transposed(b: torch.Tensor) -> bool:
    return b.stride(0) == 1 and b.stride(1) != 1


def _describe(tensor: torch.Tensor, block: tuple[int, int]) -> Callable[[torch.Tensor], Any]:
    """What makes the descriptor of a tensor like this: all but its address is known before the launch."""
    lists = list(tensor.shape), [row_stride(tensor), 1], list(block)
    return lambda tensor: _Descriptor(tensor, *lists)


def prepare(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: Mapping[str, Any]
) -> Launch:
    M, K = a.shape
    N = b.shape[1]
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    group_size_m = config["GROUP_SIZE_M"]
    part_n, part_n2 = parts = _PARTS[block_n]
    transposed = _is_transposed(b)
    tiles = cdiv(M, block_m) * cdiv(N, block_n)

    describe_a = _describe(a, (block_m, block_k))
    rows_of_b = b.t() if transposed else b
    describe_b, describe_b2 = (
        _describe(rows_of_b, (part, block_k) if transposed else (block_k, part)) for part in parts
    )

    if not config.get("PERSISTENT", 0):
        return Launch(
            kernel=_tma_kernel,
            grid=(tiles, 1, 1),
            operands=lambda a, b, out: (
                describe_a(a),
                describe_b(b),
                describe_b2(b) if part_n2 else None,
                out,
            ),
            values=(M, N, K, *out.stride())
            + (block_m, part_n, part_n2, block_k, group_size_m, transposed),
        )

    subtile = config.get("EPILOGUE_SUBTILE", 1)
    describe_out = _describe(out, (block_m, block_n // subtile))
    # The interpreter has no multiprocessors: one program takes all tiles.
    programs = device_properties(a.device).multiprocessors or 1
    return Launch(
        kernel=_tma_persistent_kernel,
        grid=(min(programs, tiles), 1, 1),
        operands=lambda a, b, out: (describe_a(a), describe_b(b), describe_out(out)),
        values=(M, N, K, block_m, block_n, block_k, group_size_m, subtile, transposed),
    )
