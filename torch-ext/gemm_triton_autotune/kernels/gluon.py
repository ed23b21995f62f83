"""The `gluon` family: warp-specialised, persistent tiles for Hopper, as wide as most multiples of 8.

Plain Triton has neither tiles of 192 rows or 168 columns nor a loader that runs ahead across tile borders. Both keep
the last wave of programs full where cuBLAS does, so this family is for many rows and for sizes that powers of
two divide badly. Its device code, and the order of its barriers, is in `gluon_kernel.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Callable

import torch
import triton

from ..config import IntRange, Parameter
from ..device import DeviceProperties, device_properties
from . import dependent_launch
from .dependent_launch import dependent_launch_problem
from .descriptor import descriptor_problem, is_transposed, row_stride
from .launch import INTERPRETED, Described, Launch, cdiv, shared_memory_problem

# Gluon is experimental, and each release renames something: no version that was not compiled is taken.
_TRITON = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
try:
    if not (3, 6) <= _TRITON <= (3, 9):
        raise ImportError(f"Triton {triton.__version__} is not one of 3.6 to 3.9")
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .gluon_kernel import gluon_gemm_kernel
except ImportError as error:
    IMPORT_PROBLEM = f"needs Triton's Gluon: {error}"
else:
    IMPORT_PROBLEM = None

NAME = "gluon"

PARAMETERS = {
    # One is 64 for each consumer, the other a multiple of 8, but not 8 less than one of 64.
    "BLOCK_SIZE_M": Parameter(IntRange(64, 352)),
    "BLOCK_SIZE_N": Parameter(IntRange(64, 352)),
    # 64 elements are the 128 bytes of a swizzled row of shared memory
    "BLOCK_SIZE_K": Parameter(IntRange(64, 64)),
    "GROUP_SIZE_M": Parameter(IntRange(1, 1 << 20)),
    # Swap the operands, so that the rows are the multiple of 8.
    "SWAP": Parameter(IntRange(0, 1), default=0),
    "PDL": dependent_launch.PARAMETERS["PDL"],
}

# A consumer is one warpgroup; the compiler adds those of the further consumers and the loader's warp.
_NUM_WARPS = 4
# By rows of the product, as wgmma has them. Up to these widths each tile compiles without a spill with Triton 3.6, 3.7,
# 3.8 and 3.9.
_MOST_COLUMNS = {64: 352, 128: 352, 192: 200}
# A descriptor of b for each size of its boxes.
_MOST_BOX_SIZES = 3
# Barriers, the arguments of the partitions and what aligns them: under 400 bytes in each version.
_SHARED_MEMORY_EXTRA = 1024
# From Triton 3.8 on a view of shared memory must not be larger than what it is one of. A box of 64 rows is then a view of
# the whole ring, at a multiple of 64 rows, and each stage begins at one.
_STAGE_ROWS_MULTIPLE = 8 if _TRITON < (3, 8) else 64
_HOPPER_SHARED_MEMORY = 227 * 1024


def tiles() -> Iterator[tuple[int, int]]:
    """Rows and columns of all that there are: BLOCK_SIZE_M and BLOCK_SIZE_N, or if SWAP the other way round."""
    for rows, most in _MOST_COLUMNS.items():
        for columns in range(64, most + 1, 8):
            if len(_box_sizes(columns)) <= _MOST_BOX_SIZES:
                yield rows, columns


def _box_sizes(columns: int) -> list[int]:
    """Of each of the boxes of TMA: as many of 64 as there are, then powers of two, as Triton wants them."""
    return [64, *(size for size in (32, 16, 8) if columns & size)]


def most_stages(rows: int, columns: int, b_is_nt: bool, limit: int | None = None) -> int:
    """How deep a ring of such `tiles` fits into ``limit`` bytes of shared memory; deeper than 12 brings nothing.

    b_is_nt: are the columns rows along K?
    """
    stage = stage_rows(rows, columns, b_is_nt)
    left = (limit or _HOPPER_SHARED_MEMORY) - shared_memory(rows, stage, num_stages=0)
    return min(left // (stage * 128), 12)


def stage_rows(rows: int, columns: int, b_is_nt: bool) -> int:
    """Rows of 128 bytes in a stage: those of a tile, then its columns, which if they are not along K come by 64."""
    count = rows + (columns if b_is_nt else cdiv(columns, 64) * 64)
    return cdiv(count, _STAGE_ROWS_MULTIPLE) * _STAGE_ROWS_MULTIPLE


def shared_memory(rows: int, stage: int, num_stages: int, staging: int = 1) -> int:
    """Bytes of shared memory for stages of so many rows (`stage_rows`), and ``staging`` times 64 columns of all rows of a
    tile, with a margin of less than a KiB."""
    return (num_stages * stage + staging * rows) * 128 + _SHARED_MEMORY_EXTRA


def config_problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    return (
        _problem(config, properties)
        or dependent_launch_problem(config, properties)
        or shared_memory_problem(_least_shared_memory(config), properties)
    )


def tile_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of the tile, as wgmma has them."""
    size = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]
    return size[::-1] if config.get("SWAP") else size


def _least_shared_memory(config: Mapping[str, Any]) -> int:
    # Where a stage has more rows, fewer of them are used.
    rows, columns = tile_size(config)
    return shared_memory(rows, rows + columns, config["num_stages"])


def _problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    rows, columns = tile_size(config)
    of_rows, of_columns = ("N", "M") if config.get("SWAP") else ("M", "N")
    if rows not in _MOST_COLUMNS:
        return (
            f"BLOCK_SIZE_{of_rows} must be one of {', '.join(map(str, _MOST_COLUMNS))}, got {rows}"
        )
    if columns % 8 or len(_box_sizes(columns)) > _MOST_BOX_SIZES:
        return f"BLOCK_SIZE_{of_columns} must be a multiple of 8, but not 8 less than a multiple of 64, got {columns}"
    if columns > _MOST_COLUMNS[rows]:
        return f"BLOCK_SIZE_{of_columns} must be at most {_MOST_COLUMNS[rows]} where BLOCK_SIZE_{of_rows} is {rows}, got {columns}"
    if config["num_warps"] != _NUM_WARPS:
        return (
            f"num_warps must be {_NUM_WARPS}, the warps of one consumer, got {config['num_warps']}"
        )
    if config["num_stages"] < 2:
        return "num_stages must be at least 2: a stage is freed while the next one is in use"
    if "maxnreg" in config:
        return "maxnreg must be absent: the partitions share out the registers themselves"
    if properties is None:
        return None
    if properties.backend != "cuda" or properties.capability != (9, 0):
        return "needs compute capability 9.0 (Hopper)"
    if IMPORT_PROBLEM or INTERPRETED:
        return IMPORT_PROBLEM or "does not run in Triton's interpreter"
    return None


def operand_problem(
    config: Mapping[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> str | None:
    return (
        descriptor_problem("a", a)
        or descriptor_problem("b", b.t() if is_transposed(b) else b)
        or descriptor_problem("out", out, written=True)
    )


def prepare(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: Mapping[str, Any]
) -> Launch:
    swap = bool(config.get("SWAP"))
    b_is_nt = is_transposed(b)
    rows_of_b = b.t() if b_is_nt else b
    (M, K), N = a.shape, b.shape[1]
    rows, columns = tile_size(config)
    block_k = config["BLOCK_SIZE_K"]
    # What the kernel calls a and b: if SWAP the caller's b.T and a.T.
    of_a, of_b = ("a", a, True), ("b", rows_of_b, b_is_nt)
    first, second = (of_b, of_a) if swap else (of_a, of_b)
    first_name, first_rows, first_along_k = first
    second_name, second_rows, second_along_k = second
    boxes = [(size, block_k) for size in _box_sizes(columns)] if second_along_k else [(block_k, 64)]
    seconds = [Described(second_name, _describe(second_rows, box)) for box in boxes]
    properties = device_properties(a.device)
    limit = properties.shared_memory or _HOPPER_SHARED_MEMORY
    stage = stage_rows(rows, columns, second_along_k)
    num_stages = min(config["num_stages"], most_stages(rows, columns, second_along_k, limit))
    # One CTA fills a multiprocessor, and each takes as many tiles as the others, or one less.
    tiles = cdiv(M, config["BLOCK_SIZE_M"]) * cdiv(N, config["BLOCK_SIZE_N"])
    return Launch(
        kernel=gluon_gemm_kernel,
        grid=(min(tiles, properties.multiprocessors or tiles), 1, 1),
        operands=(
            # 64 x 64 in either layout
            Described(first_name, _describe(first_rows, (64, block_k))),
            *seconds,
            *[None] * (_MOST_BOX_SIZES - len(seconds)),
            Described("out", _describe(out, (64, 64))),
            "bias",
        ),
        values=((N, M, K) if swap else (M, N, K))
        + (rows, columns, block_k, config["GROUP_SIZE_M"], num_stages, stage)
        + (
            2 if shared_memory(rows, stage, num_stages, staging=2) <= limit else 1,
            # A step stays in flight while the next one is waited for, unless two other consumers multiply meanwhile or
            # the ring is short: its stage is free a step later (`benchmarks/NOTES.md`, section 31).
            1 if rows == 64 or rows == 128 and num_stages >= 5 else 0,
            first_along_k,
            second_along_k,
            swap,
            config.get("PDL", 0),
        ),
        options=dependent_launch.options(config),
    )


def _describe(rows: torch.Tensor, box: tuple[int, int]) -> Callable[[torch.Tensor], Any]:
    """What makes the descriptor of a tensor whose rows are as these: all but its address is known before."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    first = TensorDescriptor(rows, list(rows.shape), [row_stride(rows), 1], list(box), layout)
    fields = {name: value for name, value in vars(first).items() if name != "base"}

    def describe(tensor: torch.Tensor) -> Any:
        # Not through __init__, which checks again what `operand_problem` has.
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__.update(fields, base=tensor)
        return descriptor

    return describe
