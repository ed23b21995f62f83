"""Which configurations the tuner measures for a problem: a list for each kernel family.

A list holds tiles that won somewhere on an H200, or that published work favours; what cannot run on the
device, or only computes padding for the problem, is left out of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import kernels
from .config import DEFAULT_KERNEL, Config, family_of, make_config
from .cost_model import cost, rates_for
from .defaults import default_configs, launched_early
from .device import DeviceProperties
from .device_tables import Table, table_for
from .gluon_tiles import gluon_config, narrowest_tiles
from .kernels.dependent_launch import without_early_launch
from .kernels.launch import cdiv

# What follows is for Hopper; `device_tables` has what stands in the place of _TILED and _SWAP elsewhere.
# (BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages). Few rows are bound by memory and want
# many loads in flight: deep K and many stages; many rows want a large tile.
_TILED = [
    *[(16, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 5), (128, 3), (128, 5), (256, 3))],
    *[(16, n, 256, w, 4) for n in (16, 32) for w in (2, 4)],
    *[(32, n, k, 4, s) for n in (32, 64, 128) for k, s in ((64, 5), (128, 3), (128, 5))],
    *[(64, n, k, 4, s) for n in (32, 64, 128, 256) for k, s in ((64, 3), (64, 5), (128, 3))],
    *[(128, n, 64, w, s) for n in (64, 128) for w, s in ((4, 3), (4, 5), (8, 4))],
    *[(128, n, 128, 8, 3) for n in (64, 128)],
    *[(m, n, k, 8, s) for m, n in ((128, 256), (256, 128)) for k, s in ((32, 4), (64, 3), (64, 4))],
    # what fits where shared memory is small
    *[(128, n, 32, w, s) for n in (64, 128) for w, s in ((4, 3), (4, 4), (8, 3))],
    *[(m, 64, 32, 4, s) for m in (32, 64) for s in (3, 5)],
    (16, 128, 32, 4, 3),
]

# Values of SPLIT_K; each one is a compile of its own.
_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
# (BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages)
_SWAP = [
    *[(64, k, 4, s) for k, s in ((64, 8), (128, 4), (128, 6), (256, 4))],
    *[(128, k, 4, s) for k, s in ((64, 4), (64, 6), (128, 3), (128, 4))],
]
_GEMV = [
    (1, 1024, 4, 1),
    (1, 2048, 8, 1),
    *[(2, 1024, 4, s) for s in (1, 2)],
    *[(4, 512, 4, s) for s in (1, 3)],
]
# (BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages): one program a tile
_TMA = [
    *[(64, 64, 128, 4, s) for s in (4, 6)],
    *[(64, 128, k, 4, s) for k, s in ((64, 8), (128, 4))],
    *[(64, n, 64, 4, s) for n, s in ((192, 6), (256, 5), (288, 4), (320, 4))],
    *[(128, 128, 64, w, s) for w, s in ((4, 3), (8, 6))],
    *[(128, n, 64, 8, s) for n, s in ((192, 5), (256, 3), (256, 4), (320, 3))],
    (256, 128, 64, 8, 4),
]
# The same and EPILOGUE_SUBTILE: a program takes several tiles
_TMA_PERSISTENT = [
    *[(128, 256, 64, 8, s, subtile) for s, subtile in ((3, 1), (4, 2))],
    (256, 128, 64, 8, 4, 2),
    (128, 128, 64, 8, 5, 1),
]
# Split along K where there are few tiles
_TMA_SPLIT = [(64, 64, 128, 4, 4), (64, 128, 64, 4, 5), (128, 64, 64, 4, 5), (128, 128, 64, 8, 4)]
# Swapped: (BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps); all rows of a in one tile, or in two
_TMA_SWAP = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8)]
_TMA_SWAP_ROWS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 288, 320, 384)
# Those that the model finds within this factor of its best, and of them (least, most): all that won on an H200, or came
# within 0.5 %, but for 1 in 100 (`benchmarks/NOTES.md`, section 38). The model says little where memory is the bound, and
# nothing of stages and warps, so a few stay in any case.
_MODEL_FACTOR = 1.15
_TMA_KEEPS = (6, 8)
_TMA_SWAP_KEEPS = (8, 8)  # of those that split K, and of the others
_GLUON_KEEPS = (6, 10)


def candidate_configs(
    M: int | None = None,
    N: int | None = None,
    K: int | None = None,
    properties: DeviceProperties | None = None,
    layout: str | None = None,
) -> list[Config]:
    """The configurations worth measuring for (M, N, K) on such a device, the default first.

    What is None does not narrow them.
    """
    found = []
    if None not in (M, N, K):
        # A copy: the default is what calls get.
        found.append(dict(default_configs(M, N, K, properties, layout or "NN")[0]))
    for plain in _all(M, N, K, properties, layout):
        # As the default is: what an early launch brings each of them must not decide between them.
        config = launched_early(plain, properties)
        # A tile twice as large as the problem on one side only computes padding.
        sides = (("M", M, 16), ("N", N, 64), ("K", K, 64))
        if config.get("SWAP"):
            sides = sides[1:]  # its rows are chosen by M
        wasteful = any(
            size is not None and config[f"BLOCK_SIZE_{side}"] >= 2 * max(size, least)
            for side, size, least in sides
        )
        if not (wasteful or config in found or kernels.config_problem(config, properties)):
            found.append(config)
    return found


def _all(
    M: int | None,
    N: int | None,
    K: int | None,
    properties: DeviceProperties | None,
    layout: str | None,
) -> Iterator[Config]:
    multiprocessors = rates_for(properties).multiprocessors
    on_hopper = properties is not None and properties.capability == (9, 0)
    takes_tma = N is not None and K is not None and N % 8 == K % 8 == 0
    tma_problem = kernels.config_problem(make_config("tma", *_TMA[0]), properties)
    has_tma = on_hopper and takes_tma and tma_problem is None
    table = table_for(properties) or Table(_TILED, _SWAP)
    # Where TMA serves, `tiled` won nowhere on an H200.
    for tile in () if has_tma else table.tiled:
        # 256 and more rows never fill up with a tile made for a few.
        if M is None or M < 256 or tile[0] >= 64:
            for options in table.options:
                yield {**make_config("tiled", *tile), **options}
    if M is None or M <= 64 or (M <= 128 and not has_tma):
        for block_m in _swap_rows(M, N, multiprocessors):
            for tile in table.swap:
                splits = _splits(M, N, K, block_m, tile, multiprocessors, properties)
                # Rows in two tiles stand in the place of a split.
                for split_k in splits if M is None or block_m >= M else (1,):
                    for options in table.options:
                        yield {**make_config("swap", block_m, *tile, SPLIT_K=split_k), **options}
    if M is None or M <= 768:
        swapped = list(_tma_swap(M, N, K, multiprocessors, properties))
        for is_split in (False, True):
            same = [config for config in swapped if ("SPLIT_K" in config) == is_split]
            yield from _best_by_model(same, _TMA_SWAP_KEEPS, M, N, K, properties, layout)
    if M in (1, None):
        for tile in _GEMV if layout != "NN" else ():
            yield make_config("gemv", 1, *tile)
    if M is None or M > 32:
        tma = [make_config("tma", *tile) for tile in _TMA]
        tma += [
            make_config("tma", *tile, PERSISTENT=1, EPILOGUE_SUBTILE=subtile)
            for *tile, subtile in _TMA_PERSISTENT
            if None in (M, N, K) or cdiv(M, tile[0]) * cdiv(N, tile[1]) > multiprocessors
        ]
        yield from _best_by_model(tma, _TMA_KEEPS, M, N, K, properties, layout)
        if M is None or M <= 64:
            for tile in _TMA_SPLIT:
                block_m, *rest = tile
                for split_k in _splits(M, N, K, block_m, tuple(rest), multiprocessors, properties):
                    if split_k > 1:
                        yield make_config("tma", *tile, SPLIT_K=split_k)
        tiles = narrowest_tiles(M, N, multiprocessors, layout)
        gluon = [gluon_config(*tile, layout or "NN", properties, swap) for tile, swap in tiles]
        yield from _best_by_model(gluon, _GLUON_KEEPS, M, N, K, properties, layout)


def _swap_rows(M: int | None, N: int | None, multiprocessors: int) -> list[int]:
    """Values of BLOCK_SIZE_M: all rows in one tile, or in two where there are multiprocessors for both."""
    if M is None or N is None:
        return [64]
    fitting = next((size for size in (16, 32) if size >= M), 64)
    rows = [fitting] if M <= 64 else []
    half = fitting // 2 if M <= 64 else fitting
    if half >= 16 and 2 * cdiv(N, 64) <= multiprocessors:
        rows.append(half)
    return rows


def _tma_swap(
    M: int | None,
    N: int | None,
    K: int | None,
    multiprocessors: int,
    properties: DeviceProperties | None,
) -> Iterator[Config]:
    wanted = (16, 96) if M is None else (M, cdiv(M, 2)) if M > 96 else (M,)
    fitting = {next((rows for rows in _TMA_SWAP_ROWS if rows >= size), 0) for size in wanted} - {0}
    limit = (properties and properties.shared_memory) or 232448
    for block_m in sorted(fitting):
        for block_n, block_k, num_warps in _TMA_SWAP:
            stage = (block_m + block_n) * block_k * 2
            # As many stages as fit one program on a multiprocessor, and as fit two.
            for num_stages in {min(8, (limit // programs - 1536) // stage) for programs in (1, 2)}:
                if num_stages < 3:
                    continue
                tile = (block_n, block_k, num_warps, num_stages)
                for split_k in _splits(M, N, K, block_m, tile, multiprocessors, properties):
                    yield make_config("tma", block_m, *tile, SWAP=1, SPLIT_K=split_k)


def refinements(config: Config, properties: DeviceProperties | None = None) -> list[Config]:
    """What is worth a try with a configuration that is among the best: the same, launched otherwise."""
    return [
        refined
        for refined in _launched_otherwise(without_early_launch(config))
        if refined != config and kernels.config_problem(refined, properties) is None
    ]


def _launched_otherwise(config: Config) -> list[Config]:
    kernel = family_of(config)
    if kernel == DEFAULT_KERNEL:
        return []
    late = {**config, "PDL": 2}
    if config.get("PERSISTENT"):
        return [late, {**config, "PDL": 1}, config]
    if kernel == "gluon":
        return [late, {**config, "PDL": 3}, config]
    if kernel == "gemv":
        return [late, {**config, "PDL": 1}, {**config, "PDL": 1, "PREFETCH": 1}]
    # A few ten KiB of b for each program: more comes too late, or drives out what is still in use.
    block = config["BLOCK_SIZE_N"] * config["BLOCK_SIZE_K"] * 2
    less, more = (1 << max(size // block, 1).bit_length() - 1 for size in (32768, 65536))
    found = [late, *({**late, "PREFETCH": count} for count in sorted({less, more}))]
    # The longest start pays only where a call takes a few microseconds.
    found.append({**config, "PDL": 1, "PREFETCH": less})
    return found if kernel == "swap" else [*found, config]


def _best_by_model(
    configs: list[Config],
    keeps: tuple[int, int],
    M: int | None,
    N: int | None,
    K: int | None,
    properties: DeviceProperties | None,
    layout: str | None,
) -> list[Config]:
    if None in (M, N, K) or not configs:
        return configs
    rates = rates_for(properties)
    costs = [cost(config, M, N, K, rates, layout) for config in configs]
    ranked = sorted(range(len(configs)), key=lambda i: costs[i])
    limit_us = costs[ranked[0]][0] * _MODEL_FACTOR
    least, most = keeps
    close = sum(duration_us <= limit_us for duration_us, _ in costs)
    return [configs[i] for i in ranked[: max(least, min(close, most))]]


def _splits(
    M: int | None,
    N: int | None,
    K: int | None,
    block_m: int,
    tile: tuple[int, int, int, int],
    multiprocessors: int,
    properties: DeviceProperties | None,
) -> list[int]:
    """Values of SPLIT_K that put one, two, three or as many programs as fit on each multiprocessor, or on every other
    one."""
    if None in (M, N, K):
        return [1, 3]
    block_n, block_k, _, num_stages = tile
    shared = num_stages * (block_m + block_n) * block_k * 2
    limit = (properties and properties.shared_memory) or shared
    resident = max(1, min(4, limit // (shared + 1024)))
    tiles = cdiv(M, block_m) * cdiv(N, block_n)
    blocks = cdiv(K, block_k)
    # A part of at least three blocks, or its pipeline never fills; and partial sums, written and read in
    # float32, of at most the bytes of b.
    most = min(16, blocks // 3, K // (4 * block_m))
    wanted = {programs * multiprocessors // tiles for programs in (1, 2, 3, resident, 2 * resident)}
    wanted.add(multiprocessors // 2 // tiles)
    most_used = [max(value for value in _SPLITS if value <= max(split, 1)) for split in wanted]
    return sorted({1, *(split for split in most_used if split <= most)})
