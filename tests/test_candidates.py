"""The candidates of each kind of device: they fit it, are known to its backend, and every device has some."""

import kernels
import pytest

from .compile_targets import TARGETS

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
table_for = gemm_kernel.candidates.table_for
config_problem = gemm_kernel.kernels.config_problem
DeviceProperties = gemm_kernel.device.DeviceProperties

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
