"""The default of each kind of device: it fits, it is followed by what runs everywhere, and it knows waves."""

import json
import logging

import kernels
import pytest
import torch

from .cases import forget_defaults
from .compile_targets import TARGETS, compile_all, missing_instructions
from .exact import assert_product
from .test_look_up import write

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning
default_configs = gemm_kernel.defaults.default_configs
conservative_config = gemm_kernel.config.conservative_config
config_problem = gemm_kernel.kernels.config_problem
DeviceProperties = gemm_kernel.device.DeviceProperties

H200 = TARGETS["sm_90"].properties
DEVICES = {name: target.properties for name, target in TARGETS.items()}
DEVICES["H100 PCIe"] = H200._replace(multiprocessors=114)
DEVICES["Hopper of which torch tells little"] = DeviceProperties("cuda", (9, 0))
DEVICES["RTX 4090"] = TARGETS["sm_89"].properties._replace(multiprocessors=128)
DEVICES["XPU"] = DeviceProperties("xpu", None, 128, 131072, warp_size=32)
UNKNOWN = {
    "sm_130": DeviceProperties("cuda", (13, 0), 200, 65536, warp_size=32),
    "gfx1300": DeviceProperties("rocm", None, 64, 65536, architecture="gfx1300", warp_size=32),
    "a GPU of which torch tells nothing": DeviceProperties("cuda"),
    "interpreter": DeviceProperties("cpu"),
}
SIZES = [
    (M, N, K, layout)
    for M in (1, 2, 16, 17, 33, 64, 65, 96, 129, 200, 384, 1000, 8192, 100_000, 2**31 + 1)
    for N, K in (
        *((4096, 4096), (1280, 8192), (151936, 2560), (1, 1), (33, 65), (8, 100_000)),
        *((2**31, 10**6), (1, 2**33)),
    )
    for layout in ("NN", "NT")
]


@pytest.mark.parametrize("name", [*DEVICES, *UNKNOWN])
def test_every_default_can_be_launched_and_the_last_one_everywhere(name, families):
    properties = {**DEVICES, **UNKNOWN}[name]
    for M, N, K, layout in SIZES:
        found = default_configs(M, N, K, properties, layout)
        assert [config_problem(config, properties) for config in found] == [None] * len(found)
        assert found[-1] == conservative_config(M)
        assert len({json.dumps(config) for config in found}) == len(found)
        if name in UNKNOWN:
            assert len(found) == 1


def test_operands_that_a_family_refuses_get_another_one(families):
    # What TMA takes, and three that it does not: odd rows, an odd address, steps between elements.
    for M in (1, 20, 64, 200, 2000):
        for layout in ("NN", "NT"):
            for start, step, N, K in ((0, 1, 512, 256), (0, 1, 511, 255), (1, 1, 512, 256), (0, 2, 512, 256)):  # fmt: skip
                a = torch.empty(M, 2 * K + 8, dtype=torch.float16)[
                    :, start : start + step * K : step
                ]
                b = torch.empty(N, K, dtype=a.dtype).t() if layout == "NT" else torch.empty(K, N, dtype=a.dtype)  # fmt: skip
                out = torch.empty(M, N, dtype=a.dtype)
                found = default_configs(M, N, K, H200, layout)
                taken = [
                    gemm_kernel.kernels.operand_problem(config, a, b, out) is None
                    for config in found
                ]
                assert taken[-1]
                # By what a call knows before it looks at its operands, the first is the one that is used.
                if start == 0 and step == 1:
                    assert taken[0], (M, N, K, layout, found[0])
                # Few rows never fall back to the tile that is made for any device.
                if M in (20, 64):
                    assert taken.index(True) < len(found) - 1


def family(config):
    return config.get("kernel", "tiled")


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
def test_hopper_gets_each_family_where_it_is_made_for(families):
    def first(M, N, K, layout="NT"):
        return default_configs(M, N, K, H200, layout)[0]

    assert family(first(1, 4096, 4096)) == "gemv"
    assert family(first(1, 4096, 4096, "NN")) == "swap"
    few_tiles = first(16, 1280, 8192)
    assert (family(few_tiles), few_tiles["SPLIT_K"]) == ("swap", 6)
    assert "SPLIT_K" not in first(16, 8192, 8192)
    assert family(first(64, 4096, 4096)) == "tma"
    # 8 x 16 tiles of 128 x 256 and 5 x 22 of 192 x 192 are one wave, 8 x 22 of 128 x 192 would be two.
    assert first(1024, 4096, 4096)["BLOCK_SIZE_N"] == 256
    assert family(first(4096, 4096, 4096)) == "gluon"
    # Descriptors need rows of a multiple of 16 bytes.
    assert {family(config) for config in default_configs(4096, 4095, 4093, H200, "NT")} == {"tiled"}


# fmt: off
CHOICES = {
    "as many rows as its tile": ((32, 28672, 4096, "NT"), {"SWAP": 1, "BLOCK_SIZE_M": 32}),
    "a row more": ((33, 28672, 4096, "NT"), {"kernel": "gluon"}),
    "one wave": ((32, 64 * 132, 4096, "NT"), {"BLOCK_SIZE_N": 64, "num_stages": 6}),
    "a tile more than one wave": ((32, 64 * 133, 4096, "NT"), {"SWAP": 1, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128}),
    "a tile more than two": ((32, 64 * 265, 4096, "NT"), {"SWAP": 1, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64}),
    "the same where TMA cannot load": ((32, 64 * 265, 4095, "NT"), {"kernel": "swap", "BLOCK_SIZE_N": 64, "num_stages": 4}),
    "parts of K that are long enough": ((1, 768, 2048, "NN"), {"SPLIT_K": 4, "PDL": 2}),
    "a K that is too short for them": ((1, 256, 1000, "NN"), {"SPLIT_K": None, "PDL": 1}),
    "columns that TMA does not take": ((48, 4095, 4096, "NN"), {"kernel": "swap"}),
    "columns that Gluon does not take": ((512, 4095, 4096, "NT"), {"kernel": "tma", "BLOCK_SIZE_M": 128}),
    "one column of tiles": ((1025, 64, 1024, "NT"), {"kernel": "gluon"}),
    "a row": ((1, 4096, 4096, "NT"), {"kernel": "gemv", "BLOCK_SIZE_N": 4, "PDL": 2, "PREFETCH": None}),
    "a row of few columns": ((1, 2048, 4096, "NT"), {"kernel": "gemv", "BLOCK_SIZE_N": 2}),
    "a row of few columns that long blocks pad": ((1, 2048, 2560, "NT"), {"kernel": "gemv", "BLOCK_SIZE_N": 4}),
    "a row of fewer columns": ((1, 1024, 2560, "NT"), {"kernel": "gemv", "BLOCK_SIZE_N": 1}),
    "a row where the wave of another is full": ((1, 8192, 4096, "NT"), {"kernel": "swap"}),
    "a row where it is not": ((1, 5504, 4096, "NT"), {"kernel": "gemv"}),
    "a row that is too short for it": ((1, 4096, 512, "NT"), {"kernel": "swap"}),
    "48 rows": ((48, 5120, 8192, "NT"), {"kernel": "swap", "BLOCK_SIZE_M": 64}),
    "160 rows": ((160, 1280, 8192, "NT"), {"kernel": "tma", "BLOCK_SIZE_M": 160, "SWAP": 1}),
    "a row of several waves": ((1, 16896, 4608, "NT"), {"kernel": "gemv", "BLOCK_SIZE_N": 4}),
    "programs that fit beside those before them": ((8, 3072, 3072, "NN"), {"PDL": 1, "PREFETCH": 2}),
    "programs that fit in part": ((8, 5120, 4096, "NN"), {"PDL": 2, "PREFETCH": 2}),
    "programs that hardly fit": ((8, 8192, 8192, "NN"), {"PDL": 1, "PREFETCH": 2}),
    "programs in two waves": ((8, 8512, 4096, "NT"), {"PDL": 2, "PREFETCH": None}),
    "columns in more": ((8, 18944, 3584, "NT"), {"kernel": "tma", "BLOCK_SIZE_N": 128, "SWAP": 1}),
    "parts that fill a wave": ((8, 4096, 4096, "NT"), {"kernel": "swap", "SPLIT_K": 2}),
    "the same with as many rows as the tile has": ((16, 4096, 4096, "NT"), {"kernel": "swap", "SPLIT_K": 2}),
    "parts that do not": ((8, 3072, 8192, "NT"), {"kernel": "tma", "SWAP": 1, "SPLIT_K": None}),
    "parts that fill half a wave": ((8, 1024, 2560, "NT"), {"kernel": "swap", "SPLIT_K": 4}),
    "two rows of tiles": ((128, 5120, 8192, "NT"), {"kernel": "gluon", "BLOCK_SIZE_M": 64, "PDL": 2}),
    "more rows, in one wave": ((192, 5120, 8192, "NT"), {"kernel": "gluon", "BLOCK_SIZE_M": 64, "PDL": 3}),
    "more than one wave": ((4096, 4096, 4096, "NT"), {"kernel": "gluon", "PDL": 2}),
}
# fmt: on


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
@pytest.mark.parametrize("name", CHOICES)
def test_hopper_s_choice_where_another_one_begins(families, name):
    shape, expected = CHOICES[name]
    M, N, K, layout = shape
    config = default_configs(M, N, K, H200, layout)[0]
    if gemm_kernel.kernels.dependent_launch.gdc_wait is None:
        expected = {**expected, "PDL": None, "PREFETCH": None}
    assert {key: config.get(key) for key in expected} == expected


def test_few_rows_get_small_tiles_on_other_devices():
    def tile(M, N, K):
        config = default_configs(M, N, K, DEVICES["sm_89"], "NT")[0]
        return config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]

    assert tile(1, 4096, 4096) == (16, 32)
    assert tile(257, 1280, 8192) == (64, 128)


def test_what_is_fetched_ahead_is_a_block_at_least_and_only_before_an_early_start():
    tile = {**conservative_config(64), "kernel": "tma", "BLOCK_SIZE_N": 320, "BLOCK_SIZE_K": 64}
    started = gemm_kernel.defaults._started_well
    assert started({**tile, "PDL": 2}, 64, 4096, 4096, 132) == {**tile, "PDL": 2, "PREFETCH": 1}
    assert started(tile, 64, 4096, 4096, 132) == tile


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_no_width_of_a_weight_is_left_to_the_plain_kernel(families, layout):
    # Between one and two waves of tiles of 64 columns NN had nothing for few rows but that: up to 24 % slower.
    for N in range(512, 40_000, 320):
        for M in (1, 16, 24, 64, 96, 200, 1000, 8192):
            assert family(default_configs(M, N, 4096, H200, layout)[0]) != "tiled", (M, N)


def test_no_speed_is_promised_that_was_not_measured(monkeypatch):
    in_words = gemm_kernel.defaults.speed_in_words
    monkeypatch.setattr(gemm_kernel.kernels.gluon, "IMPORT_PROBLEM", None)
    assert "geometric mean" in in_words(H200)
    for properties in (*UNKNOWN.values(), TARGETS["sm_100"].properties, DEVICES["XPU"]):
        assert in_words(properties) == "which may be slower"
    monkeypatch.setattr(gemm_kernel.kernels.gluon, "IMPORT_PROBLEM", "needs Triton 3.6")
    assert in_words(H200) == "which may be slower"


@pytest.mark.parametrize("lacks", ["Gluon", "Gluon and TMA", "columns that Gluon takes"])
def test_many_rows_on_hopper_get_large_tiles_without_gluon_too(lacks, monkeypatch, families):
    # Triton before 3.6 has no Gluon, and before 3.4 no TMA.
    if lacks.startswith("Gluon"):
        monkeypatch.setattr(gemm_kernel.kernels.gluon, "IMPORT_PROBLEM", "is not there")
    if lacks.endswith("TMA"):
        monkeypatch.setattr(gemm_kernel.kernels.tma, "TensorDescriptor", None)
    forget_defaults()
    odd = int(lacks.startswith("columns"))
    for M in (300, 512, 1024, 4096):
        for N, layout in ((14336 + odd, "NT"), (4096 + odd, "NT"), (4096, "NN"))[: 2 if odd else 3]:
            first = default_configs(M, N, 4096, H200, layout)[0]
            assert family(first) == ("tiled" if lacks.endswith("TMA") else "tma")
            assert first["BLOCK_SIZE_M"] * first["BLOCK_SIZE_N"] >= 128 * 64, (M, N, layout, first)


def test_what_was_measured_tile_by_tile_alone_is_among_the_candidates():
    candidates = gemm_kernel.tuning.candidate_configs(properties=H200)
    for option in gemm_kernel.defaults._tma_options():
        assert gemm_kernel.defaults.launched_early(option.config, H200) in candidates


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
def test_the_default_follows_the_number_of_multiprocessors(families):
    small = H200._replace(multiprocessors=66)
    assert default_configs(16, 1280, 8192, small, "NT")[0]["SPLIT_K"] == 3
    assert any(
        default_configs(M, 6144, 4096, small, "NT")[0]
        != default_configs(M, 6144, 4096, H200, "NT")[0]
        for M in (256, 384, 512, 768, 1024)
    )


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_a_tile_outside_the_list_is_for_what_is_worth_its_compile(families, layout, monkeypatch):
    rates = gemm_kernel.cost_model.rates_for(H200)
    shapes = [
        (M, N, K)
        for N, K in ((4096, 4096), (1280, 8192), (28672, 4096))
        for M in (72, 104, 200, 304, 496, 704, 1304, 3000, 6000)
    ]

    def time_us(config, shape):
        return gemm_kernel.cost_model.time_us(config, *shape, rates, layout)

    def chosen():
        gemm_kernel.defaults._default_configs.cache_clear()
        return {shape: default_configs(*shape, H200, layout)[0] for shape in shapes}

    found = chosen()
    monkeypatch.setattr(gemm_kernel.defaults, "_WORTH_A_COMPILE", 1e9)
    listed = chosen()
    monkeypatch.setattr(gemm_kernel.defaults, "_WORTH_A_COMPILE", 1.0)
    best = chosen()
    gemm_kernel.defaults._default_configs.cache_clear()
    for shape in shapes:
        best_us = time_us(best[shape], shape)
        is_worth_it = best_us * 1.03 < time_us(listed[shape], shape)
        assert found[shape] == (best if is_worth_it else listed)[shape]
        # `best` is of all tiles, not only of those that are tried.
        for tile, swap in gemm_kernel.gluon_tiles.narrowest_tiles(None, None, 132, layout):
            config = gemm_kernel.gluon_tiles.gluon_config(*tile, layout, H200, swap)
            assert time_us(config, shape) >= best_us * (1 - 1e-9)
    others = [shape for shape in shapes if found[shape] != listed[shape]]
    assert 3 <= len(others) <= 20


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("name", DEVICES)
def test_as_many_rows_in_eights_are_one_choice(families, name, layout):
    properties = DEVICES[name]
    for N, K in ((6144, 4096), (1280, 8192), (5120, 25600), (4095, 4093)):
        for M in (257, 263, 321, 500, 1001, 1793, 2300, 4099, 6001, 8191, 10001):
            exact = gemm_kernel.defaults._default_configs(M, N, K, properties, layout)
            assert default_configs(M, N, K, properties, layout) == exact, (M, N, K)
    for option in gemm_kernel.defaults._options(properties, layout):
        if option.splits:
            assert option.rows_up_to <= gemm_kernel.defaults._MOST_SPLIT_ROWS
        if option.config["BLOCK_SIZE_M"] > gemm_kernel.defaults._ROWS_MULTIPLE:
            assert option.config["BLOCK_SIZE_M"] % gemm_kernel.defaults._ROWS_MULTIPLE == 0


def test_a_choice_is_kept_and_the_number_of_them_has_an_end():
    gemm_kernel.defaults._default_configs.cache_clear()
    for _ in range(2):
        for M in range(1, 101):
            default_configs(M, 4096, 4096, H200, "NT")
    kept = gemm_kernel.defaults._default_configs.cache_info()
    assert (kept.misses, kept.hits) == (100, 100)
    assert kept.maxsize is not None


def test_what_a_call_gets_is_its_own(device):
    tuning.get_config(16, 123, 456, device)["num_stages"] = 99
    assert tuning.get_config(16, 123, 456, device)["num_stages"] != 99
    assert tuning.get_config(16, 123, 456, device) == tuning.default_config(16, 123, 456, device)


# The defaults of the kinds whose compiler is quickest; `make matrix` compiles those of all.
@pytest.mark.parametrize("target", ["sm_89", "gfx942"])
def test_the_defaults_of_other_devices_compile_without_a_spill(target):
    properties = TARGETS[target].properties
    requests = {}
    for M in (1, 32, 64, 96, 256, 512, 4096):
        config = default_configs(M, 4096, 4096, properties, "NT")[0]
        requests.setdefault(json.dumps(config), {"config": config, "layout": "NT", "M": M})
    assert len(requests) >= 3
    for report in compile_all(target, list(requests.values()), processes=2):
        assert not {"error", "refused"} & set(report), report
        assert report["spilled"] == 0, report
        assert missing_instructions(target, report) is None, report


@pytest.fixture
def two_defaults(monkeypatch, device):
    """A default that is better than the conservative one, on a device whose memory is new."""
    better = {**conservative_config(40), "num_stages": 2}
    chosen = (better, conservative_config(40))
    monkeypatch.setattr(tuning, "default_configs", lambda *arguments: chosen)
    tuning._load_tuned_configs.cache_clear()
    yield chosen
    tuning._load_tuned_configs.cache_clear()


def test_a_default_that_cannot_be_launched_gives_way_and_is_not_tried_again(
    two_defaults, device, monkeypatch, caplog
):
    launched = []
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def failing(a, b, out, config, *bias):
        launched.append(config)
        if config == two_defaults[0]:
            raise RuntimeError("ptxas fatal: something\nand pages more")
        return launch(a, b, out, config, *bias)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", failing)
    a = torch.randn(40, 64, dtype=torch.float16, device=device)
    b = torch.randn(64, 48, dtype=torch.float16, device=device)
    with caplog.at_level(logging.WARNING, logger="gemm_triton_autotune"):
        for _ in range(3):
            gemm_kernel.gemm(a, b)
            b = b.clone()
    # On a GPU a kept launch takes over after the first call.
    assert launched[:2] == [*two_defaults]
    assert all(config == two_defaults[1] for config in launched[2:])
    told = [record.message for record in caplog.records if "cannot be launched" in record.message]
    assert len(told) == 1
    assert "The default GEMM configuration" in told[0]
    assert "ptxas fatal: something)" in told[0]
    assert tuning.default_config(40, 48, 64, device) == two_defaults[1]


def test_what_a_capture_forbids_gives_up_no_configuration(
    two_defaults, device, tuned_dir, monkeypatch
):
    # Another thread's capture, in torch's default mode, forbids this one to allocate or to load a kernel.
    entry = {**two_defaults[1], "num_stages": 1}
    write(tuned_dir, {"40": entry}, n=48, k=64)
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def forbidden(*_):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    a = torch.randn(40, 64, dtype=torch.float16, device=device)
    b = torch.randn(64, 48, dtype=torch.float16, device=device)
    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", forbidden)
    with pytest.raises(RuntimeError, match="capturing"):
        gemm_kernel.gemm(a, b)
    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", launch)
    assert_product(gemm_kernel.gemm(a, b), a, b)
    assert tuning.get_config(40, 48, 64, device) == entry
    assert not tuning._failed_defaults


def test_an_entry_that_is_the_default_is_tried_once(two_defaults, device, tuned_dir, monkeypatch):
    # Most entries are: else the next call would compile it in vain again.
    better, last = two_defaults
    write(tuned_dir, {"40": better}, n=48, k=64)
    tried = []
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def spy(a, b, out, config):
        tried.append(config)
        if config == better:
            raise RuntimeError("PassManager::run failed")
        return launch(a, b, out, config)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
    a = torch.randn(40, 64, dtype=torch.float16, device=device)
    b = torch.randn(64, 48, dtype=torch.float16, device=device)
    for _ in range(3):
        assert_product(gemm_kernel.gemm(a, b), a, b)
    # On a GPU a kept launch takes over after the first call.
    assert tried[:2] == [better, last]
    assert better not in tried[2:]


def test_a_failed_default_gives_up_no_entry_of_another_weight(
    two_defaults, device, tuned_dir, monkeypatch, caplog
):
    # A compiler may fail once, when memory is short; an entry stays until it fails itself.
    better, last = two_defaults
    write(tuned_dir, {"40": better}, n=96, k=64)
    write(tuned_dir, {"40": better, "64": last}, n=32, k=64)
    with caplog.at_level(logging.WARNING, logger="gemm_triton_autotune"):
        tuning._reject(better, RuntimeError("killed"), 32, 64, device, "NN", is_default=True)
    assert tuning.get_config(40, 48, 64, device) == last
    assert tuning.get_config(40, 96, 64, device) == better
    assert "tuned, from" in gemm_kernel.explain(40, 96, 64, device)
    (told,) = [
        record.message for record in caplog.records if "cannot be launched" in record.message
    ]
    assert "The default GEMM configuration" in told
    # Of both, where it was an entry and is a default.
    caplog.clear()
    tuning._load_tuned_configs.cache_clear()
    tuning._load_tuned_configs(32, 64, device)
    with caplog.at_level(logging.WARNING, logger="gemm_triton_autotune"):
        tuning._reject(better, RuntimeError("killed"), 32, 64, device, "NN", is_default=True)
    assert "the entry for M=40, also a default, cannot be launched" in caplog.text
    assert tuning.get_config(40, 32, 64, device) == last


def test_as_many_defaults_are_kept_as_plans_of_calls():
    kept = gemm_kernel.defaults._default_configs.cache_info().maxsize
    assert kept >= gemm_kernel.calls._MAX_PLANS


def test_an_entry_that_is_the_last_default_gives_way_as_any_other(
    two_defaults, device, tuned_dir, monkeypatch
):
    better, last = two_defaults
    write(tuned_dir, {"40": last, "64": {**last, "num_stages": 1}}, n=48, k=64)
    launched = []
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def failing(a, b, out, config, *bias):
        launched.append(config)
        if config != better:
            raise RuntimeError("no kernel image")
        return launch(a, b, out, config, *bias)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", failing)
    a = torch.randn(40, 64, dtype=torch.float16, device=device)
    b = torch.randn(64, 48, dtype=torch.float16, device=device)
    assert_product(gemm_kernel.gemm(a, b), a, b)
    assert launched == [last, {**last, "num_stages": 1}, better]
    assert tuning.get_config(40, 48, 64, device) == better


def test_if_every_default_fails_the_call_does_and_none_is_given_up(
    two_defaults, device, monkeypatch
):
    def failing(*arguments):
        raise RuntimeError("no kernel image")

    a = torch.randn(40, 64, dtype=torch.float16, device=device)
    b = torch.randn(64, 48, dtype=torch.float16, device=device)
    with monkeypatch.context() as context:
        context.setattr(gemm_kernel.kernels, "launch_gemm_kernel", failing)
        with pytest.raises(RuntimeError, match="no kernel image"):
            gemm_kernel.gemm(a, b)
    assert tuning.default_config(40, 48, 64, device) == two_defaults[0]
