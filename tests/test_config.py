"""What a configuration is: the schema, the default, the candidates. No kernel is launched."""

import itertools
import json

import kernels
import pytest

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
config_problem = gemm_kernel.kernels.config_problem
DeviceProperties = gemm_kernel.device.DeviceProperties

GOOD = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 32,
    "GROUP_SIZE_M": 8,
    "num_warps": 4,
    "num_stages": 3,
}
GRID = list(itertools.product([1 << e for e in range(21)], (16, 4096, 128256), (16, 4096, 28672)))


def test_a_plain_configuration_is_valid():
    assert config_problem(GOOD) is None
    assert config_problem({**GOOD, "kernel": "tiled", "SPLIT_K": 1}) is None


@pytest.mark.parametrize("key", GOOD)
@pytest.mark.parametrize("value", [0, -1, 3.0, "16", True, None, [16], {}, 10**30, float("nan")])
def test_a_value_out_of_range_is_named(key, value):
    if key == "GROUP_SIZE_M" and value is True:
        pass
    assert key in config_problem({**GOOD, key: value})


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(key):
    config = {name: value for name, value in GOOD.items() if name != key}
    assert config_problem(config) == f"lacks {key}"


# fmt: off
BAD = {
    "odd tile": ({"BLOCK_SIZE_M": 48}, "power of two"),
    "three warps": ({"num_warps": 3}, "power of two"),
    "unknown key": ({"NUM_WARPS": 4}, "NUM_WARPS is not a key"),
    "code in a value": ({"GROUP_SIZE_M": "__import__('os')"}, "integer"),
    "unknown family": ({"kernel": "magic"}, "kernel must be one of"),
    "family of another type": ({"kernel": ["tiled"]}, "kernel must be one of"),
    "unhashable family": ({"kernel": {}}, "kernel must be one of"),
    "vendor key out of range": ({"waves_per_eu": 99}, "waves_per_eu must be from 0 to 10"),
    "vendor string": ({"grf_mode": "huge"}, "grf_mode must be one of"),
    "a tile that no register file holds": ({"BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256}, "registers"),
}
# fmt: on


@pytest.mark.parametrize("name", BAD)
def test_a_bad_configuration_is_explained(name):
    changes, reason = BAD[name]
    assert reason in config_problem({**GOOD, **changes})


@pytest.mark.parametrize("config", [None, 3, "16", [GOOD], float("nan")], ids=repr)
def test_what_is_no_object_is_explained(config):
    assert "object" in config_problem(config)


def test_vendor_options_reach_their_backend_only():
    config = {
        **GOOD,
        "maxnreg": 128,
        "waves_per_eu": 2,
        "matrix_instr_nonkdim": 16,
        "kpack": 2,
        "grf_mode": "256",
    }
    assert config_problem(config) is None
    options = {
        backend: set(gemm_kernel.config.launch_options(config, backend))
        - {"num_warps", "num_stages"}
        for backend in ("cuda", "rocm", "xpu", "cpu")
    }
    assert options == {
        "cuda": {"maxnreg"},
        "rocm": {"waves_per_eu", "matrix_instr_nonkdim", "kpack"},
        "xpu": {"grf_mode"},
        "cpu": set(),
    }


def test_too_much_shared_memory_for_the_device_is_explained():
    config = {**GOOD, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_stages": 5}
    assert config_problem(config, DeviceProperties("cuda", (9, 0), 132, 232448)) is None
    problem = config_problem(config, DeviceProperties("cuda", (8, 9), 58, 101376))
    assert problem == "needs 131072 bytes of shared memory, the device has 101376"


def test_the_conservative_configuration_launches_on_the_smallest_device():
    # 64 KiB of shared memory is the least that a supported device has (vllm-project/vllm PR 17744)
    for M, _, _ in GRID:
        config = gemm_kernel.config.conservative_config(M)
        assert config_problem(config, DeviceProperties("cuda", (7, 5), 40, 65536)) is None
        stages = config["num_stages"]
        tile = (config["BLOCK_SIZE_M"] + config["BLOCK_SIZE_N"]) * config["BLOCK_SIZE_K"] * 2
        assert stages >= 2
        assert stages * tile <= 65536


def test_the_conservative_configuration_grows_with_m():
    conservative_config = gemm_kernel.config.conservative_config
    assert conservative_config(16) != conservative_config(1024)
    assert conservative_config(1) == conservative_config(16)


def test_candidates_are_valid_distinct_and_start_with_the_default():
    properties = DeviceProperties("cuda", (8, 9), 58, 101376)
    for M, N, K in GRID:
        candidates = gemm_kernel.tuning.candidate_configs(M, N, K, properties)
        assert candidates[0] == gemm_kernel.defaults.default_configs(M, N, K, properties)[0]
        assert [config_problem(config, properties) for config in candidates] == [None] * len(
            candidates
        )
        assert len({json.dumps(config, sort_keys=True) for config in candidates}) == len(candidates)
        if min(M, N, K) >= 16:
            assert len(candidates) >= 3, (M, N, K)


def test_candidates_do_not_waste_tiles():
    largest = max(
        config["BLOCK_SIZE_M"] for config in gemm_kernel.tuning.candidate_configs(1, 4096, 4096)
    )
    assert largest == 16
