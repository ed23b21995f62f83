"""Which tiles of the `gluon` family may be the best for a problem: with as many waves the narrowest."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from .config import Config, make_config
from .device import DeviceProperties
from .kernels import gluon
from .kernels.launch import cdiv

# Rows whose tiles share columns of b in L2.
_GROUP_ROWS = 1536
# Up to so many rows of swapped tiles the narrowest are found for each number of rows, not of waves alone.
_ROWS_OF_SWAPPED = 4


def gluon_config(
    rows: int,
    columns: int,
    layout: str,
    properties: DeviceProperties | None = None,
    swap: bool = False,
) -> Config:
    """One of the `gluon.tiles`, swapped or not, with as deep a ring as fits."""
    limit = properties.shared_memory if properties else None
    stages = gluon.most_stages(rows, columns, swap or layout == "NT", limit)
    block_m, block_n = (columns, rows) if swap else (rows, columns)
    config = make_config("gluon", block_m, block_n, 64, 4, stages, SWAP=int(swap))
    return {**config, "GROUP_SIZE_M": _GROUP_ROWS // block_m}


@functools.cache
def _tiles(layout: str | None) -> tuple[tuple[tuple[int, int], bool], ...]:
    # A row-major b in columns that begin at no multiple of 32 bytes was up to 1.9 times as slow.
    tiles = [(tile, False) for tile in gluon.tiles() if layout != "NN" or tile[1] % 16 == 0]
    # Of equal sides, one that is swapped is the same.
    return (*tiles, *((tile, True) for tile in gluon.tiles() if tile[0] != tile[1]))


def narrowest_tiles(
    M: int | None, N: int | None, multiprocessors: int, layout: str | None
) -> Sequence[tuple[tuple[int, int], bool]]:
    """Of the `gluon.tiles`, swapped (True) or not, with as many rows and waves the narrowest, which pads the least; of
    swapped ones also of those that as many hold all rows of a.

    What is None does not narrow them.
    """
    tiles = _tiles(layout)
    if M is None or N is None:
        return tiles
    narrowest: dict[tuple, tuple[tuple[int, int], bool]] = {}
    for each in tiles:
        (rows, columns), swap = each
        along_rows, along_columns = (N, M) if swap else (M, N)
        tiles_along_columns = cdiv(along_columns, columns)
        waves = cdiv(cdiv(along_rows, rows) * tiles_along_columns, multiprocessors)
        narrowest.setdefault((swap, rows, waves), each)
        if swap and tiles_along_columns <= _ROWS_OF_SWAPPED:
            narrowest.setdefault(("rows", rows, tiles_along_columns), each)
    return list(dict.fromkeys(narrowest.values()))
