"""The candidates of each kind of device: they fit it, are known to its backend, and every device has some."""

import kernels
import pytest

from .compile_targets import TARGETS

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
table_for = gemm_kernel.candidates.table_for
config_problem, gluon = gemm_kernel.kernels.config_problem, gemm_kernel.kernels.gluon
DeviceProperties = gemm_kernel.device.DeviceProperties

HOPPER = TARGETS["sm_90"].properties
DEVICES = {name: target.properties for name, target in TARGETS.items() if name != "sm_90"}
DEVICES["xpu"] = DeviceProperties("xpu", None, 64, 131072)


def configs_of(table):
    for options in table.options:
        for tile in table.tiled:
            yield {**gemm_kernel.config.plain_config(*tile), **options}
        for tile in table.swap:
            yield {"kernel": "swap", **gemm_kernel.config.plain_config(16, *tile), **options}


@pytest.mark.parametrize("name", DEVICES)
def test_every_entry_of_a_table_fits_its_device(name):
    properties = DEVICES[name]
    table = table_for(properties)
    assert table is not None
    found = list(configs_of(table))
    assert set(table.defaults) <= set(table.tiled)
    for config in found:
        assert config_problem(config, properties) is None, config
        # No option is lost on the way to its compiler.
        passed = gemm_kernel.config.launch_options(config, properties.backend)
        assert set(passed) == {key for key in config if key.islower()} - {"kernel"}
    assert len({str(sorted(config.items())) for config in found}) == len(found), "an entry twice"


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("M", [1, 16, 64, 200, 4096])
def test_every_device_has_candidates_for_every_m(name, M):
    found = gemm_kernel.tuning.candidate_configs(M, 4096, 4096, DEVICES[name], "NT")
    assert found[0] == gemm_kernel.defaults.default_configs(M, 4096, 4096, DEVICES[name], "NT")[0]
    assert 4 <= len(found) <= 120
    assert not [config for config in found if config_problem(config, DEVICES[name])]


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("shape", [(384, 7168, 8192), (768, 10240, 5120), (4096, 4096, 4096)])
def test_a_gluon_candidate_is_the_narrowest_with_its_rows_and_waves(families, shape, layout):
    M, N, K = shape
    multiprocessors = gemm_kernel.cost_model.rates_for(HOPPER).multiprocessors

    def waves(block_m, block_n):
        return -(-(-(-M // block_m) * -(-N // block_n)) // multiprocessors)

    # The first is the default, which may be from a list.
    default, *found = gemm_kernel.tuning.candidate_configs(M, N, K, HOPPER, layout)
    found = [config for config in found if config.get("kernel") == "gluon"]
    sizes = [
        (config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]) for config in found if "SWAP" not in config
    ]
    assert 4 <= len(found) <= 10
    for block_m, block_n in sizes:
        narrower = [
            other
            for rows, other in gluon.tiles()
            if rows == block_m and other < block_n and (layout == "NT" or other % 16 == 0)
        ]
        assert all(waves(block_m, other) > waves(block_m, block_n) for other in narrower)
        assert layout == "NT" or block_n % 16 == 0
    # Swapped ones are as narrow as their waves, or their number of rows, allow.
    for config in found:
        if "SWAP" in config:
            block_m, block_n = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]
            narrower = [
                other for rows, other in gluon.tiles() if rows == block_n and other < block_m
            ]
            is_narrowest = all(
                waves(other, block_n) > waves(block_m, block_n) for other in narrower
            )
            assert is_narrowest or all(-(-M // other) > -(-M // block_m) for other in narrower)
    # Not one width for all: where rows differ, or waves.
    plain = [config for config in (default, *found) if "SWAP" not in config]
    assert len({config["BLOCK_SIZE_M"] for config in plain}) > 1
    assert len({gluon.tile_size(config) for config in found}) > 3


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
def test_a_gluon_candidate_has_the_deepest_ring_and_groups_of_as_many_rows(families):
    found = gemm_kernel.tuning.candidate_configs(768, 10240, 5120, HOPPER, "NT")
    for config in found:
        if config.get("kernel") == "gluon":
            assert config["num_stages"] == gluon.most_stages(*gluon.tile_size(config), b_is_nt=True)
            rows = config["GROUP_SIZE_M"] * config["BLOCK_SIZE_M"]
            assert 1536 - config["BLOCK_SIZE_M"] < rows <= 1536


def families_of(M, N, K, layout="NT"):
    found = gemm_kernel.tuning.candidate_configs(M, N, K, HOPPER, layout)
    return {config.get("kernel", "tiled") for config in found}


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
@pytest.mark.parametrize("M", [1, 16, 64, 65, 200, 4096])
def test_tiled_is_a_candidate_on_hopper_only_where_tma_does_not_serve(families, M):
    assert "tiled" not in families_of(M, 4096, 4096)
    for N, K in ((4095, 4096), (4096, 4095)):
        assert "tiled" in families_of(M, N, K)
    # `swap` wins nowhere with more rows.
    assert ("swap" in families_of(M, 1280, 8192)) == (M <= 64)
    assert ("swap" in families_of(M, 1281, 8192)) == (M <= 128)


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
def test_few_rows_are_tried_with_and_without_a_split(families):
    for M in (16, 64, 192):
        found = gemm_kernel.tuning.candidate_configs(M, 4096, 14336, HOPPER, "NT")
        swapped = [c for c in found if c.get("kernel") == "tma" and "SWAP" in c]
        splits = ["SPLIT_K" in config for config in swapped]
        assert splits.count(True) >= 4
        assert splits.count(False) >= 4


def test_a_table_is_chosen_by_what_torch_tells():
    def table(backend, capability=None, architecture=None):
        return table_for(DeviceProperties(backend, capability, architecture=architecture))

    assert table("cuda", (8, 0)) is not table("cuda", (8, 6))
    assert table("cuda", (8, 6)) is table("cuda", (8, 9)) is table("cuda", (12, 0))
    assert table("rocm", architecture="gfx942") is table("rocm", architecture="gfx90a")
    assert table("rocm", architecture="gfx1100") is table("rocm", architecture="gfx1201")
    # Hopper has its own lists, and what is not known gets those.
    for unknown in (("cuda", (9, 0)), ("cuda", (13, 0)), ("cuda",), ("rocm",), ("cpu",)):
        assert table(*unknown) is None
    assert table_for(None) is None
    assert gemm_kernel.tuning.candidate_configs(16, 4096, 4096, DeviceProperties("rocm"))


@pytest.mark.parametrize(("name", "most"), [("gfx942", 16), ("gfx1100", 32), ("sm_80", 32)])
def test_warps_are_counted_in_threads(name, most):
    config = gemm_kernel.config.plain_config(128, 128, 32, most, 2)
    assert config_problem(config, DEVICES[name]) is None
    if most < 32:
        problem = config_problem({**config, "num_warps": 2 * most}, DEVICES[name])
        assert f"at most {most}" in problem


def test_a_changed_candidate_changes_no_call():
    default = gemm_kernel.defaults.default_configs(64, 4096, 4096)[0]
    before = dict(default)
    for config in gemm_kernel.candidates.candidate_configs(64, 4096, 4096):
        config["BLOCK_SIZE_K"] = 48
    assert gemm_kernel.defaults.default_configs(64, 4096, 4096)[0] == default == before
