"""How long a configuration takes, by a work model: good enough to rank configurations, not to time them.

The unit of work is a block of 64 x 64 of out and 64 along K. A program takes its blocks one after the other, and
a wave of programs as long as one of them; no product is faster than memory brings its operands. That waves are
what matters on Hopper, and what a block takes there, was measured (`benchmarks/NOTES.md`, section 16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .config import family_of
from .device import DeviceProperties
from .device_tables import device_kind
from .kernels import gluon
from .kernels.launch import cdiv

_SPLIT_US = 2.0


class Rates(NamedTuple):
    """What is assumed of a device, and of each of its multiprocessors."""

    multiprocessors: int  # in `_RATES` those of the example
    block_us: float  # for a block of work
    tile_bytes_per_us: float  # at which tiles of a and b come in, mostly from L2
    memory_bytes_per_us: float  # its share of the memory's bandwidth
    # Of `swap` with few rows, where it was measured: to store small partial sums and to count them in, and how much more
    # slowly a b comes in whose rows are along K.
    few_rows_split_us: float = _SPLIT_US
    rows_along_k: float = 1.0


# Measured for sm_90 on an H200. For the others two thirds of the matrix rate and 0.85 of the bandwidth that the vendor
# gives for the example, and tiles that come in three times as fast as memory brings them.
_RATES = {
    "sm_75": Rates(40, 3.9, 20e3, 6.8e3),  # T4, by its float32 units: Triton uses no others there
    "sm_80": Rates(108, 0.27, 45e3, 15e3),  # A100
    "sm_89": Rates(58, 0.38, 13e3, 4.4e3),  # L4
    "sm_90": Rates(132, 0.085, 109e3, 30e3, few_rows_split_us=1.0, rows_along_k=1.3),
    "sm_100": Rates(148, 0.052, 130e3, 45e3),  # B200
    "gfx9": Rates(304, 0.18, 45e3, 15e3),  # MI300X
    "gfx950": Rates(256, 0.088, 80e3, 26e3),  # MI355X
    "gfx11": Rates(96, 0.61, 25e3, 8.5e3),  # RX 7900 XTX
    "xpu": Rates(128, 0.12, 65e3, 22e3),  # Data Center GPU Max 1550
}
_LAUNCH_US = 3.0
_WAVE_US = 0.1
# Of `swap` (`benchmarks/NOTES.md`, section 36).
_FEW_ROWS = 32
# A wgmma of 16 or 32 columns takes as long as one of 16 more; `gluon` has none.
_NARROW_PART = 16
# Of `gluon` (`benchmarks/NOTES.md`, sections 31, 33 and 38): how much faster tiles come in, as its loader waits for no
# multiplication, at the first step along K and from the last of these on: neighbours that load the same at the same time
# get out of step; how much more slowly where there is one row of them, so that no neighbour loads the same columns of b
# (of swapped ones that was not seen); and boxes of a row-major b that begin at no multiple of 64 columns.
_LOADER = (1.5, 1.2)
_OUT_OF_STEP = 200
_ALONE = 1.5
_MISALIGNED = 2.0
# A smooth maximum of loading and multiplying: the higher, the less one hinders the other.
_OVERLAP = 8
# How much longer a multiplication takes the more it uses shared memory, to which a step's rows and columns are written
# and from which each consumer reads its rows and all columns; and if a lone consumer has two for each step.
_SHARED_MEMORY = 4.0
_TWO_PARTS = 1.05
# What it takes to store a tile before the next.
_STORE_US = 0.9


def rates_for(properties: DeviceProperties | None) -> Rates:
    """The rates of such a device; of an H200 where its kind is not known."""
    rates = _RATES[device_kind(properties) or "sm_90"]
    if properties is None or properties.multiprocessors is None:
        return rates
    return rates._replace(multiprocessors=properties.multiprocessors)


def cost(
    config: Mapping[str, Any], M: int, N: int, K: int, rates: Rates, layout: str | None = None
) -> tuple[float, float]:
    """The less the better: microseconds, and of equals what is loaded for an element of out."""
    loads = 1 / config["BLOCK_SIZE_M"] + 1 / config["BLOCK_SIZE_N"]
    return time_us(config, M, N, K, rates, layout), loads


def _block_us(block_m: int, block_n: int, is_swapped: bool, slower: float, rates: Rates) -> float:
    """Microseconds for 64 along K of a tile that is loaded ``slower`` by that factor."""
    rows, columns = (block_n, block_m) if is_swapped else (block_m, block_n)
    if columns > 64 and columns % 64:
        columns += _NARROW_PART
    return max(_multiply_us(rows, columns, rates), _load_us(block_m + block_n, rates) * slower)


def _gluon_block_us(
    config: Mapping[str, Any], M: int, steps: float, rates: Rates, layout: str | None
) -> float:
    """The same for a tile of `gluon` and ``M`` rows, where a program takes so many ``steps`` along K."""
    rows, columns = gluon.tile_size(config)
    loaded = rows + columns
    if layout == "NN" and columns % 64 and not config.get("SWAP"):
        loaded = rows + _MISALIGNED * cdiv(columns, 64) * 64
    is_alone = config["BLOCK_SIZE_M"] >= M and not config.get("SWAP")
    first, last = _LOADER
    loader = first + (last - first) * min(steps / _OUT_OF_STEP, 1)
    load_us = _load_us(loaded, rates) * ((_ALONE if is_alone else 1) / loader)
    # 128 x 256 uses 1 / 32.
    used = 1 / rows + 1 / columns + 1 / 64 + 1 / columns
    longer = (1 + _SHARED_MEMORY * used) / (1 + _SHARED_MEMORY / 32)
    parts = _TWO_PARTS if rows == 64 and columns > 256 else 1
    multiply_us = _multiply_us(rows, columns, rates) * longer * parts
    return (multiply_us**_OVERLAP + load_us**_OVERLAP) ** (1 / _OVERLAP)


def _multiply_us(rows: int, columns: int, rates: Rates) -> float:
    return rows * columns * (rates.block_us / 4096)


def _load_us(rows: float, rates: Rates) -> float:
    return rows * 128 / rates.tile_bytes_per_us


def time_us(
    config: Mapping[str, Any], M: int, N: int, K: int, rates: Rates, layout: str | None = None
) -> float:
    """Microseconds for (M, K) @ (K, N) with ``config``."""
    block_m, block_n, split = (
        config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"], config.get("SPLIT_K", 1)
    )  # fmt: skip
    is_gluon = family_of(config) == "gluon"
    is_few_rows = family_of(config) == "swap" and block_m <= _FEW_ROWS
    waves = cdiv(cdiv(M, block_m) * cdiv(N, block_n) * split, rates.multiprocessors)
    # K is padded to whole steps.
    block_k = config["BLOCK_SIZE_K"]
    blocks = cdiv(cdiv(K, block_k), split) * block_k / 64
    if is_gluon:
        block_us = _gluon_block_us(config, M, waves * blocks, rates, layout)
    else:
        slower = rates.rows_along_k if is_few_rows and layout == "NT" else 1
        block_us = _block_us(block_m, block_n, bool(config.get("SWAP")), slower, rates)
    work_us = waves * (blocks * block_us + _WAVE_US)
    if is_gluon:
        work_us += (waves - 1) * _STORE_US
    bandwidth = rates.multiprocessors * rates.memory_bytes_per_us
    memory_us = 2 * (M * K + N * K + M * N) / bandwidth
    # A smooth maximum: where both are near each other, each hinders the other.
    total_us = _LAUNCH_US + (work_us**4 + memory_us**4) ** 0.25
    if split > 1:
        total_us += rates.few_rows_split_us if is_few_rows else _SPLIT_US
        # Partial sums in float32, written and read; those of few rows stay in L2.
        through = rates.tile_bytes_per_us if is_few_rows else rates.memory_bytes_per_us
        total_us += 8 * split * M * N / (rates.multiprocessors * through)
    return total_us
