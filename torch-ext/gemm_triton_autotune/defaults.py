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
from .gluon_tiles import gluon_config, narrowest_tiles
from .kernels.launch import cdiv

# A part of K shorter than this does not pay for its share of the partial sums.
_LEAST_PART = 512
_MOST_PARTS = 16
# Of `gemv`; shorter rows were not measured.
_LEAST_GEMV_K = 1024
# Elements of b; a call of `tma` with more takes so long that what it fetches before its start no longer counts.
_SMALL_WEIGHT = 1 << 26
# Of the multiprocessors: where a wave is as good as full, for the next launch and for a split, and where the next one
# easily fits beside it.
_FULL = 0.9
_NEARLY_FULL = 0.8
_FIT_BESIDE = 0.4

# Of what is in the list: where its tiles and limits begin and end, and how many rows are still split along K.
_ROWS_MULTIPLE = 8
_MOST_SPLIT_ROWS = 256

_ANY = 1 << 62
_ONE_WAVE = (0, 1)

# So many times as long the best tile of the list must take by the model, or no other one is worth its compile; and rows
# above which `gluon` is that good (`benchmarks/NOTES.md`, section 39).
_WORTH_A_COMPILE = 1.03
_ANY_TILE_ABOVE = 64

# By kind of device: what the default reached of the tuned speed on weights that its list was not made from, in
# geometric mean and at worst (`benchmarks/results/unseen.json`). With Gluon, which many rows need for it.
_REACHED = {"sm_90": (0.99, 0.90)}


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
    # K may be split until there is a program for each multiprocessor, or for every other one (`_parts`).
    splits: bool = False
    # Of tiles of 64 columns there are more than, and up to, so many times the multiprocessors.
    waves: tuple[float, float] = (0, _ANY)
    # Only where this Triton has no `gluon`, and for a b whose columns it does not take.
    without_gluon: bool = False


def _hopper_options(layout: str) -> Iterator[_Option]:
    yield from _few_rows_options(layout)
    yield from _some_rows_options(layout)
    yield from _gluon_options(layout)
    yield from _tma_options()
    # What TMA does not take; the others are always faster.
    for tile in ((64, 64, 128, 4, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3)):
        yield _Option(make_config(DEFAULT_KERNEL, *tile), 64)


def _few_rows_options(layout: str) -> Iterator[_Option]:
    """Up to 32 rows: bound by memory, so as many bytes in flight as fit, of one program or of two."""
    rows = ((16, 0), (32, 16))
    for block_m, low in rows:
        swap = make_config("swap", block_m, 64, 128, 4, 6)
        yield _Option(swap, low, block_m, splits=True, waves=_ONE_WAVE)
    if layout == "NN":
        for block_m, low, block_k, num_stages, waves in (
            (16, 0, 64, 6, (1, 2)),
            (16, 0, 128, 3, (2, _ANY)),
            (32, 16, 64, 6, (1, 2)),
            (32, 16, 64, 4, (2, _ANY)),
        ):
            swap = make_config("swap", block_m, 128, block_k, 4, num_stages)
            yield _Option(swap, low, block_m, waves=waves)
        return
    for *tile, waves in (
        (1, 1024, 4, 1, (0, 0.2)),
        (4, 512, 4, 3, (0.2, 2 / 3)),
        (2, 1024, 4, 1, (0.2, 0.3)),
        # Between, where one wave of `swap` is nearly full, that one reads faster.
        (4, 512, 4, 3, (1, _ANY)),
    ):
        yield _Option(make_config("gemv", 1, *tile), 0, 1, waves=waves)
    for block_m, *tile, low, waves in (
        # No split fills a wave here.
        (16, 64, 128, 4, 8, 1, (1 / 3, _FIT_BESIDE)),
        (16, 128, 128, 8, 3, 0, (2, _ANY)),
        (32, 128, 128, 8, 5, 16, (1, 2)),
        (32, 128, 64, 4, 5, 16, (2, _ANY)),
    ):
        swapped = make_config("tma", block_m, *tile, SWAP=1)
        yield _Option(swapped, low, block_m, waves=waves)
    for block_m, low in rows:
        swap = make_config("swap", block_m, 64, 128, 4, 4)
        yield _Option(swap, low, block_m, waves=(1, _ANY))


def _some_rows_options(layout: str) -> Iterator[_Option]:
    # Of equals the first is chosen.
    swap = make_config("swap", 64, 64, 128, 4, 6)
    if layout == "NT":
        yield _Option(swap, 32, 48, splits=True, waves=_ONE_WAVE)
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
        # With more rows and no split `gluon` does the same faster.
        slower = block_n == 128 and block_m > 128
        yield _Option(config, low, block_m, splits=block_n == 64, without_gluon=slower)
    # Where TMA cannot load.
    several_waves = (64, 128, 4, 4) if layout == "NT" else (128, 64, 4, 6)
    yield _Option(swap, 32, 64, splits=True, waves=_ONE_WAVE)
    yield _Option(make_config("swap", 64, *several_waves), 32, 64, waves=(1, _ANY))
    yield _Option(swap, 64, 128, waves=_ONE_WAVE)


def _gluon_options(layout: str) -> Iterator[_Option]:
    # Of all tiles those that are missed the most by the cost model (`benchmarks/NOTES.md`, section 38), as each one is a
    # compile: for so many rows of the product, as wgmma has them, so many columns.
    plain = {
        "NT": {
            64: (64, 80, 96, 128, 144, 160, 200, 240),
            128: (128, 144, 160, 192, 200, 224, 240, 256, 280, 296, 320, 328, 352),
            192: (112, 200),
        },
        # A row-major b is loaded by boxes of 64 columns, and slowly where they do not begin at a multiple of 64; 224 pays
        # for the multiples of 7168 that some models have.
        "NN": {64: (64, 128, 192, 256), 128: (128, 192, 224, 256, 320), 192: (192,)},
    }
    swapped = {
        "NT": {64: (112,), 128: (80, 96, 112, 144, 160, 176, 224, 288)},
        "NN": {
            64: (80, 96, 112),
            128: (80, 96, 112, 144, 160, 176, 200, 224, 240, 280, 352),
            192: (112, 144),
        },
    }
    # Up to 64 rows the families for few of them read b faster than what is swapped.
    for sizes, swap, low in ((plain, False, 32), (swapped, True, 64)):
        for rows, widths in sizes[layout].items():
            for columns in widths:
                yield _Option(gluon_config(rows, columns, layout, swap=swap), low)


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


@functools.lru_cache(maxsize=64)
def _options_for(N: int, K: int, properties: DeviceProperties | None, layout: str) -> list[_Option]:
    """Those of the list that such a weight gets."""
    taking = [each for each in _options(properties, layout) if _takes(each.config, N, K, layout)]
    has_gluon = any(family_of(option.config) == "gluon" for option in taking)
    return [option for option in taking if not (option.without_gluon and has_gluon)]


@functools.cache
def _options(properties: DeviceProperties | None, layout: str) -> list[_Option]:
    """The list for such a device, without what it or this Triton cannot run."""
    if device_kind(properties) == "sm_90":
        options = _hopper_options(layout)
    else:
        options = _table_options(table_for(properties))
    options = (each._replace(config=launched_early(each.config, properties)) for each in options)
    return [each for each in options if kernels.config_problem(each.config, properties) is None]


def launched_early(config: Config, properties: DeviceProperties | None) -> Config:
    """``config``, launched before the kernel in front of it has ended, where such a device can: on an H200 it takes a
    few percent off a short call."""
    early = {**config, "PDL": 2}
    return early if kernels.config_problem(early, properties) is None else config


def default_configs(
    M: int, N: int, K: int, properties: DeviceProperties | None = None, layout: str = "NN"
) -> tuple[Config, ...]:
    """What a (M, K) @ (K, N) on such a device runs with if nothing was tuned: the best of each family, by the
    cost model, the best first and the one that runs everywhere last.

    properties: None stands for any device. The configurations are shared: they are not to be changed.
    """
    # Tiles have a multiple of 8 rows, and what is not split the model ranks by tiles alone: so M in a row are one choice.
    if M > _MOST_SPLIT_ROWS:
        M = cdiv(M, _ROWS_MULTIPLE) * _ROWS_MULTIPLE
    return _default_configs(M, N, K, properties, layout)


# For as many calls as `calls` keeps plans of.
@functools.lru_cache(maxsize=4096)
def _default_configs(
    M: int, N: int, K: int, properties: DeviceProperties | None, layout: str
) -> tuple[Config, ...]:
    rates = rates_for(properties)
    best: dict[str, tuple[tuple[int, float, float], Config]] = {}
    for config in _choices(M, N, K, properties, layout, rates.multiprocessors):
        family = family_of(config)
        rank = _rank(config, M, N, K, rates, layout)
        if family not in best or rank < best[family][0]:
            best[family] = rank, config
    if "gluon" in best and M > _ANY_TILE_ABOVE:
        _, listed_us, _ = min(rank for rank, _ in best.values())
        rank, config = _best_gluon(M, N, K, properties, layout, rates)
        if rank[1] * _WORTH_A_COMPILE < listed_us:
            best["gluon"] = rank, config
    ranked = sorted(best.values(), key=lambda one: one[0])
    found = [_started_well(config, M, N, K, rates.multiprocessors) for _, config in ranked]
    conservative = conservative_config(M)
    return (*(config for config in found if config != conservative), conservative)


def _best_gluon(
    M: int, N: int, K: int, properties: DeviceProperties | None, layout: str, rates: Rates
) -> tuple[tuple[int, float, float], Config]:
    """The best of all tiles of `gluon`, and before it its rank."""
    tiles = narrowest_tiles(M, N, rates.multiprocessors, layout)
    configs = (_gluon(*tile, layout, properties, swap) for tile, swap in tiles)
    ranked = ((_rank(config, M, N, K, rates, layout), config) for config in configs)
    return min(ranked, key=lambda one: one[0])


@functools.cache
def _gluon(
    rows: int, columns: int, layout: str, properties: DeviceProperties | None, swap: bool
) -> Config:
    return launched_early(gluon_config(rows, columns, layout, properties, swap), properties)


def _choices(
    M: int,
    N: int,
    K: int,
    properties: DeviceProperties | None,
    layout: str,
    multiprocessors: int,
) -> Iterator[Config]:
    """What the list has for such a call, each split along K, too, where that may pay."""
    for option in _options_for(N, K, properties, layout):
        config = option.config
        if not option.more_rows_than < M <= option.rows_up_to:
            continue
        rows = cdiv(M, config["BLOCK_SIZE_M"])
        more_than, up_to = option.waves
        if not more_than < rows * cdiv(N, 64) / multiprocessors <= up_to:
            continue
        yield config
        if option.splits:
            tiles = rows * cdiv(N, config["BLOCK_SIZE_N"])
            for parts in _parts(tiles, K, family_of(config), multiprocessors):
                yield {**config, "SPLIT_K": parts}


def _parts(tiles: int, K: int, family: str, multiprocessors: int) -> list[int]:
    """Values of SPLIT_K, of 2 and more, for so many tiles."""
    most = min(K // _LEAST_PART, _MOST_PARTS)
    whole, half = (min(many // tiles, most) for many in (multiprocessors, multiprocessors // 2))
    if family != "swap":
        found = {whole}
    elif tiles * whole > _NEARLY_FULL * multiprocessors:
        found = {half, whole}
    else:
        # Bound by memory, what is more than half a wave but not nearly a whole one was slower than no split.
        found = {half}
    return sorted(found - {0, 1})


def _rank(
    config: Config, M: int, N: int, K: int, rates: Rates, layout: str
) -> tuple[int, float, float]:
    """The less the better: a kind, then what the model says."""
    if family_of(config) == "gemv":
        # The best for a row of a; long blocks where K is a multiple of them.
        block_k = config["BLOCK_SIZE_K"]
        return 0, 0 if K % block_k else -block_k, 0
    # On Hopper the plain kernel is there for what the others do not take.
    kind = 2 if family_of(config) == DEFAULT_KERNEL else 1
    return (kind, *cost(config, M, N, K, rates, layout))


def _started_well(config: Config, M: int, N: int, K: int, multiprocessors: int) -> Config:
    """``config``, which may start early, as early as is good for such a call.

    Where one wave of small `gluon` tiles has more than two rows of them, it matters more that neighbours stay
    neighbours (measured of tiles that are not swapped). Programs of `swap` and `tma` that start early bring 32 KiB of b
    into L2 meanwhile. As early as can be is best where they all find a multiprocessor beside those before them, or
    hardly one does: else a part of them would start late (`benchmarks/NOTES.md`, section 36).
    """
    family = family_of(config)
    if not config.get("PDL") or family == "gemv":
        return config
    split = config.get("SPLIT_K", 1)
    rows = cdiv(M, config["BLOCK_SIZE_M"])
    programs = rows * cdiv(N, config["BLOCK_SIZE_N"]) * split
    is_one_wave = programs <= multiprocessors
    if family == "gluon":
        is_small = config["BLOCK_SIZE_M"] == 64
        return {**config, "PDL": 3} if is_one_wave and is_small and rows > 2 else config
    if not (is_one_wave if family == "swap" else N * K <= _SMALL_WEIGHT):
        return config
    # At least a block: some are larger.
    blocks = max(16384 // (config["BLOCK_SIZE_N"] * config["BLOCK_SIZE_K"]), 1)
    fit_beside = family == "swap" and programs <= _FIT_BESIDE * multiprocessors
    is_full = rows == 1 and is_one_wave and programs >= _FULL * multiprocessors
    earliest = {"PDL": 1} if split == 1 and (fit_beside or is_full) else {}
    return {**config, **earliest, "PREFETCH": blocks}


def _takes(config: Config, N: int, K: int, layout: str) -> bool:
    """Does the family take such a weight: rows that TMA's descriptors can have, and for `gemv` long ones?"""
    family = family_of(config)
    if family == "tma":
        return K % 8 == 0 and (layout == "NT" or N % 8 == 0)
    if family == "gemv":
        return K >= _LEAST_GEMV_K
    return family != "gluon" or N % 8 == K % 8 == 0
