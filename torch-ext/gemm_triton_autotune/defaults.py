"""Which configuration a call gets for which nothing was tuned: the best of a short list, by the cost model.

The list for Hopper, and how near the choice comes to what tuning finds, is from measurements on an H200
(`benchmarks/NOTES.md`, section 16). Elsewhere it is reasoned; a device that is not known gets the one tile
for its number of rows that launches everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from . import kernels
from .config import DEFAULT_KERNEL, Config, conservative_config, family_of, make_config
from .cost_model import Rates, cost, rates_for
from .device import DeviceProperties
from .device_tables import Table, device_kind, table_for
from .kernels.launch import cdiv

# A part of K shorter than this does not pay for its share of the partial sums.
_LEAST_PART = 512
_MOST_PARTS = 16
# A row of a that is shorter is over before `gemv` has as many bytes on their way as memory takes.
_LEAST_GEMV_K = 4096
# Elements of b; a call with more takes so long that what it fetches before its start no longer counts.
_SMALL_WEIGHT = {"swap": 1 << 24, "tma": 1 << 26}

# Of `gluon`: rows whose tiles share columns of b in L2.
_GROUP_ROWS = 1536

_ANY = 1 << 62

# By kind of device: what the default reached of the tuned speed on weights that its list was not made from, in
# geometric mean and at worst (`benchmarks/results/unseen.json`). With Gluon, which many rows need for it.
_REACHED = {"sm_90": (0.98, 0.81)}


def speed_in_words(properties: DeviceProperties) -> str:
    """What is known of the default's speed on such a device, after "the default is used"."""
    reached = _REACHED.get(device_kind(properties) or "")
    if reached is None or kernels.gluon.IMPORT_PROBLEM:
        return "which may be slower"
    mean, worst = reached
    return f"which on GPUs of this kind reached {mean:.2f} of the tuned speed in geometric mean, {worst:.2f} at worst"


class _Option(NamedTuple):
    """A configuration, and for which calls it is in the list."""

    config: Config
    more_rows_than: int = 0
    rows_up_to: int = _ANY
    # K may be split until there is a program for each multiprocessor.
    splits: bool = False
    # Only where there are at most as many tiles of 64 columns as multiprocessors (True), or more (False).
    one_wave: bool | None = None
    # Only where this Triton has no `gluon`, and for a b whose columns it does not take.
    without_gluon: bool = False


def _hopper_options(layout: str) -> Iterator[_Option]:
    yield from _few_rows_options(layout)
    yield from _gluon_options(layout)
    yield from _tma_options()
    # What TMA does not take; the others are always faster.
    for tile in ((64, 64, 128, 4, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3)):
        yield _Option(make_config(DEFAULT_KERNEL, *tile), 64)


def _few_rows_options(layout: str) -> Iterator[_Option]:
    # Of equals the first is chosen.
    if layout == "NT":
        for tile in ((2, 1024, 4, 1), (4, 512, 4, 3)):
            yield _Option(make_config("gemv", 1, *tile), 0, 1)
        swap = make_config("swap", 64, 64, 128, 4, 6)
        yield _Option(swap, 32, 48, splits=True, one_wave=True)
    for block_n, num_stages in ((128, 8), (192, 6), (256, 5), (320, 4)):
        yield _Option(make_config("tma", 64, block_n, 64, 4, num_stages), 64, 256)
    yield _Option(make_config("tma", 64, 128, 128, 4, 4), 32, 64)
    yield _Option(make_config("tma", 64, 64, 128, 4, 6), 32, 1024)
    # All rows in one tile, so that b is read once.
    for block_m, block_n, block_k, num_stages, low in (
        *((64, 64, 128, 7, 48), (96, 64, 128, 5, 64), (128, 64, 128, 4, 96)),
        *((160, 64, 128, 4, 128), (192, 64, 64, 7, 160), (256, 64, 64, 5, 192)),
        *((96, 128, 64, 8, 64), (160, 128, 64, 6, 128), (192, 128, 64, 5, 160)),
    ):
        config = make_config("tma", block_m, block_n, block_k, 4, num_stages, SWAP=1)
        yield _Option(config, low, block_m, splits=block_n == 64)
    # Few rows are bound by memory, so as many bytes in flight as fit.
    # For more than 32 rows only where TMA cannot load.
    several_waves = (64, 128, 4, 4) if layout == "NT" else (128, 64, 4, 6)
    for block_m, low in ((16, 0), (32, 16), (64, 32)):
        for tile, one_wave in (((64, 128, 4, 6), True), (several_waves, False)):
            config = make_config("swap", block_m, *tile)
            yield _Option(config, low, block_m, splits=one_wave, one_wave=one_wave)
    yield _Option(make_config("swap", 64, 64, 128, 4, 6), 64, 128, one_wave=True)


def _gluon_options(layout: str) -> Iterator[_Option]:
    # Of all tiles those that are missed the most (`benchmarks/NOTES.md`, section 33), as each one is a compile. A
    # row-major b is loaded by boxes of 64 columns, and slowly where they do not begin at a multiple of 64.
    columns = {
        "NT": {
            64: (64, 80, 96, 112, 128, 144, 160, 192, 200, 224, 240, 256),
            128: (128, 160, 176, 192, 200, 224, 256, 280, 320, 328, 352),
            192: (96, 112, 160, 192),
        },
        "NN": {
            64: (64, 128, 192, 256, 320),
            128: (128, 192, 208, 224, 256, 320, 352),
            192: (112, 128, 144, 160, 192),
        },
    }
    for block_m, widths in columns[layout].items():
        for block_n in widths:
            yield _Option(gluon_config(block_m, block_n, layout), 32)


def gluon_config(
    block_m: int, block_n: int, layout: str, properties: DeviceProperties | None = None
) -> Config:
    """A `gluon` tile with as deep a ring as fits."""
    limit = properties.shared_memory if properties else None
    stages = kernels.gluon.most_stages(block_m, block_n, layout == "NT", limit)
    config = make_config("gluon", block_m, block_n, 64, 4, stages)
    return {**config, "GROUP_SIZE_M": _GROUP_ROWS // block_m}


def _tma_options() -> Iterator[_Option]:
    """Not measured as a list: tile for tile among the best `candidates`."""
    for tile in (
        *[(64, n, 64, 4, s) for n, s in ((128, 8), (192, 6), (256, 5))],
        *[(128, n, 64, 8, s) for n, s in ((128, 6), (192, 5), (256, 4))],
    ):
        yield _Option(make_config("tma", *tile), 32, without_gluon=True)


def _table_options(table: Table | None) -> Iterator[_Option]:
    for tile in table.defaults if table else ():
        config = {**make_config(DEFAULT_KERNEL, *tile), **table.options[0]}
        rows = tile[0]
        # The model does not know what padding costs where memory is the bound, nor that small tiles multiply slowly.
        low = rows // 2 if rows > 16 else 0
        yield _Option(config, low, 4 * rows if rows < 64 else _ANY)


@functools.cache
def _options(properties: DeviceProperties | None, layout: str) -> list[_Option]:
    """The list for such a device, without what it or this Triton cannot run."""
    if device_kind(properties) == "sm_90":
        options = _hopper_options(layout)
    else:
        options = _table_options(table_for(properties))
    possible = []
    for option in options:
        # Started early where that can be: on an H200 it takes a few percent off a short call. The tables for
        # other devices have none but `tiled`, which cannot.
        for config in ({**option.config, "PDL": 2}, option.config):
            if kernels.config_problem(config, properties) is None:
                possible.append(option._replace(config=config))
                break
    return possible


@functools.lru_cache(maxsize=1024)
def default_configs(
    M: int, N: int, K: int, properties: DeviceProperties | None = None, layout: str = "NN"
) -> tuple[Config, ...]:
    """What a (M, K) @ (K, N) on such a device runs with if nothing was tuned: the best of each family, by the
    cost model, the best first and the one that runs everywhere last.

    properties: None stands for any device. The configurations are shared: they are not to be changed.
    """
    rates = rates_for(properties)
    best: dict[str, tuple[tuple[int, float, float], Config]] = {}
    for config in _choices(M, N, K, properties, layout, rates.multiprocessors):
        family = family_of(config)
        rank = _rank(config, M, N, K, rates, layout)
        if family not in best or rank < best[family][0]:
            best[family] = rank, config
    ranked = sorted(best.values(), key=lambda one: one[0])
    found = [_started_well(config, M, N, K, rates.multiprocessors) for _, config in ranked]
    conservative = conservative_config(M)
    return (*(config for config in found if config != conservative), conservative)


def _choices(
    M: int,
    N: int,
    K: int,
    properties: DeviceProperties | None,
    layout: str,
    multiprocessors: int,
) -> Iterator[Config]:
    """What the list has for such a call, each split along K, too, where that may pay."""
    options = [each for each in _options(properties, layout) if _takes(each.config, N, K, layout)]
    has_gluon = any(family_of(option.config) == "gluon" for option in options)
    for option in options:
        config = option.config
        if not option.more_rows_than < M <= option.rows_up_to:
            continue
        if option.without_gluon and has_gluon:
            continue
        rows = cdiv(M, config["BLOCK_SIZE_M"])
        if option.one_wave not in (None, rows * cdiv(N, 64) <= multiprocessors):
            continue
        yield config
        tiles = rows * cdiv(N, config["BLOCK_SIZE_N"])
        parts = min(multiprocessors // tiles, K // _LEAST_PART, _MOST_PARTS)
        if option.splits and parts > 1:
            yield {**config, "SPLIT_K": parts}


def _rank(
    config: Config, M: int, N: int, K: int, rates: Rates, layout: str
) -> tuple[int, float, float]:
    """The less the better: a kind, then what the model says."""
    if family_of(config) == "gemv":
        # The best for a row of a, and as fast as memory where it needs no padding.
        return 0, cdiv(K, config["BLOCK_SIZE_K"]) * config["BLOCK_SIZE_K"], 0
    # On Hopper the plain kernel is there for what the others do not take.
    kind = 2 if family_of(config) == DEFAULT_KERNEL else 1
    return (kind, *cost(config, M, N, K, rates, layout))


def _started_well(config: Config, M: int, N: int, K: int, multiprocessors: int) -> Config:
    """``config``, which may start early, as early as is good for such a call.

    Where one wave of small `gluon` tiles has more than two rows of them, it matters more that neighbours stay
    neighbours. What else starts early brings 32 KiB of a small b into L2 meanwhile; `swap` starts as early as can be.
    """
    family = family_of(config)
    if not config.get("PDL"):
        return config
    if family == "gluon":
        rows = cdiv(M, config["BLOCK_SIZE_M"])
        is_one_wave = rows * cdiv(N, config["BLOCK_SIZE_N"]) <= multiprocessors
        is_small = config["BLOCK_SIZE_M"] == 64
        return {**config, "PDL": 3} if is_one_wave and is_small and rows > 2 else config
    if _SMALL_WEIGHT.get(family, 0) < N * K:
        return config
    # At least a block: some are larger.
    blocks = max(16384 // (config["BLOCK_SIZE_N"] * config["BLOCK_SIZE_K"]), 1)
    earliest = {"PDL": 1} if family == "swap" and config.get("SPLIT_K", 1) == 1 else {}
    return {**config, **earliest, "PREFETCH": blocks}


def _takes(config: Config, N: int, K: int, layout: str) -> bool:
    """Does the family take such a weight: rows that TMA's descriptors can have, and for `gemv` long ones?"""
    family = family_of(config)
    if family == "tma":
        return K % 8 == 0 and (layout == "NT" or N % 8 == 0)
    if family == "gemv":
        return K >= _LEAST_GEMV_K
    return family != "gluon" or N % 8 == K % 8 == 0
