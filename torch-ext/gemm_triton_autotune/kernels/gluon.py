"""The `gluon` family: warp-specialised, persistent tiles for Hopper, some of them no powers of two.

Plain Triton has neither tiles of 192 rows nor a loader that runs ahead across tile borders. Both keep the
last wave of programs full where cuBLAS does, so this family is for many rows and for sizes that powers of
two divide badly. Its device code, and the order of its barriers, is in `gluon_kernel.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

import torch
import triton

from ..config import IntRange, Parameter
from ..device import DeviceProperties, device_properties
from . import dependent_launch
from .dependent_launch import dependent_launch_problem
from .descriptor import descriptor_problem, is_transposed, row_stride
from .launch import INTERPRETED, Described, Launch, cdiv, shared_memory_problem

# Gluon is experimental, and each release renames something: no version that was not compiled is taken.
try:
    if not (3, 6) <= tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) <= (3, 9):
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
    # the whole tile, one of _TILES
    "BLOCK_SIZE_M": Parameter(IntRange(64, 256)),
    "BLOCK_SIZE_N": Parameter(IntRange(96, 352)),
    # 64 elements are the 128 bytes of a swizzled row of shared memory
    "BLOCK_SIZE_K": Parameter(IntRange(64, 64)),
    "GROUP_SIZE_M": Parameter(IntRange(1, 1 << 20)),
    # 1: a goes to wgmma through registers, which saves shared memory bandwidth where a tile has two parts
    "A_IN_REGISTERS": Parameter(IntRange(0, 1), default=0),
    **dependent_launch.PARAMETERS,
}

# A consumer is one warpgroup; the compiler adds those of the further consumers and the loader's warp.
_NUM_WARPS = 4


class _Tile(NamedTuple):
    """How a tile is shared out: its rows among ``consumers``, its columns among one, two or three wgmma."""

    consumers: int
    parts: tuple[int, int, int]
    staging: int  # chunks of out that a consumer may have on their way to memory


# By (BLOCK_SIZE_M, BLOCK_SIZE_N). Each of them compiles without a spill with Triton 3.6, 3.7, 3.8 and 3.9,
# for both layouts of b and both places of a. A wgmma has at most 256 columns, and one of 32 takes as long
# as one of 48: a part narrower than 64 is there only for sizes that nothing else fits.
_TILES = {
    (64, 96): _Tile(1, (64, 32, 0), 1),
    (64, 128): _Tile(1, (128, 0, 0), 1),
    (64, 160): _Tile(1, (128, 32, 0), 1),
    (64, 192): _Tile(1, (128, 64, 0), 1),
    (64, 224): _Tile(1, (128, 64, 32), 1),
    (64, 256): _Tile(1, (256, 0, 0), 1),
    (64, 288): _Tile(1, (256, 32, 0), 1),
    (64, 320): _Tile(1, (256, 64, 0), 1),
    (64, 352): _Tile(1, (256, 64, 32), 1),
    (128, 128): _Tile(2, (128, 0, 0), 2),
    (128, 144): _Tile(2, (128, 16, 0), 1),
    (128, 192): _Tile(2, (128, 64, 0), 1),
    (128, 224): _Tile(2, (128, 64, 32), 1),
    (128, 256): _Tile(2, (256, 0, 0), 2),
    (128, 320): _Tile(2, (256, 64, 0), 2),
    (128, 352): _Tile(2, (256, 64, 32), 1),
    (192, 96): _Tile(3, (64, 32, 0), 1),
    (192, 192): _Tile(3, (128, 64, 0), 1),
    (256, 128): _Tile(2, (128, 0, 0), 1),
}

# Barriers, the arguments of the partitions and what aligns them: under 400 bytes in each version.
_SHARED_MEMORY_EXTRA = 1024


def _box_columns(tile: _Tile) -> int:
    """Columns of b in one TMA box: one descriptor serves all parts, so it is as wide as the narrowest."""
    return min(filter(None, tile.parts))


def _chunk_columns(tile: _Tile) -> int:
    """Columns of out in one TMA store."""
    return min(_box_columns(tile), 64)


def shared_memory(config: Mapping[str, Any]) -> int:
    """Bytes of shared memory that ``config`` needs, with a margin of less than a KiB."""
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    tile = _TILES[block_m, block_n]
    ring = config["num_stages"] * (block_m + block_n) * block_k * 2
    return ring + tile.staging * block_m * _chunk_columns(tile) * 2 + _SHARED_MEMORY_EXTRA


def config_problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    return (
        _problem(config, properties)
        or dependent_launch_problem(config, properties)
        or shared_memory_problem(shared_memory(config), properties)
    )


def _problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    size = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]
    if size not in _TILES:
        tiles = ", ".join(f"{rows}x{columns}" for rows, columns in _TILES)
        return f"has no {size[0]}x{size[1]} tile, only {tiles}"
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
    M, K = a.shape
    N = b.shape[1]
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    tile = _TILES[block_m, block_n]
    rows = block_m // tile.consumers
    b_is_nt = is_transposed(b)
    b_box = (_box_columns(tile), block_k) if b_is_nt else (block_k, _box_columns(tile))
    # One CTA fills a multiprocessor, and each takes as many tiles as the others, or one less.
    tiles = cdiv(M, block_m) * cdiv(N, block_n)
    multiprocessors = device_properties(a.device).multiprocessors or tiles
    return Launch(
        kernel=gluon_gemm_kernel,
        grid=(min(tiles, multiprocessors), 1, 1),
        operands=(
            Described("a", _describe(a, (rows, block_k))),
            Described("b", _describe(b.t() if b_is_nt else b, b_box)),
            Described("out", _describe(out, (rows, _chunk_columns(tile)))),
            "b" if config.get("PREFETCH", 0) else None,
            "bias",
        ),
        values=(M, N, K, *b.stride())
        + (block_m, block_n, block_k, config["GROUP_SIZE_M"], config["num_stages"])
        + (tile.consumers, *tile.parts, tile.staging)
        + (
            bool(config.get("A_IN_REGISTERS", 0)),
            b_is_nt,
            config.get("PDL", 0),
            config.get("PREFETCH", 0),
        ),
        options=dependent_launch.options(config),
    )


def _describe(rows: torch.Tensor, box: tuple[int, int]) -> Callable[[torch.Tensor], Any]:
    """What makes the descriptor of a tensor whose rows are as these: all but its address is known before."""
    layout = NVMMASharedLayout(swizzle_byte_width=min(2 * box[1], 128), element_bitwidth=16, rank=2)
    first = TensorDescriptor(rows, list(rows.shape), [row_stride(rows), 1], list(box), layout)
    fields = {name: value for name, value in vars(first).items() if name != "base"}

    def describe(tensor: torch.Tensor) -> Any:
        # Not through __init__, which checks again what `operand_problem` has.
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__.update(fields, base=tensor)
        return descriptor

    return describe
