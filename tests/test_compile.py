"""What ships compiles for its GPU, to the instructions that it stands for. No GPU is needed.

The interpreter takes any configuration; only the compiler knows tile sizes, warps and shared memory.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import kernels
import pytest

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

TESTS = Path(__file__).resolve().parent

# Shared memory that a block may use: CUDA C programming guide, table of technical specifications
SHARED_MEMORY = {"cuda:75": 65536, "cuda:80": 166912, "cuda:89": 101376, "cuda:90": 232448}
SHIPPED_FOR = {"NVIDIA_L4": "cuda:89", "NVIDIA_H200": "cuda:90"}


def compile_all(target, requests):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, str(TESTS / "compile_targets.py"), target],
        input="\n".join(map(json.dumps, requests)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(reports) == len(requests)
    assert [report for report in reports if "error" in report] == []
    return reports


def defaults():
    Ms = [1 << exponent for exponent in range(14)]
    distinct = {
        json.dumps(gemm_kernel.config.default_config(M, 4096, 4096)): M for M in reversed(Ms)
    }
    return [{"config": json.loads(config), "M": M} for config, M in distinct.items()]


@pytest.mark.parametrize("target", ["cuda:75", "cuda:80", "cuda:89", "cuda:90"])
def test_the_default_compiles_and_fits(target):
    dtype = "float16" if target == "cuda:75" else "bfloat16"
    layouts = ("NT",) if target == "cuda:75" else ("NN", "NT")
    requests = [
        {**request, "layout": layout, "dtype": dtype}
        for request in defaults()
        for layout in layouts
    ]
    for report in compile_all(target, requests):
        assert report["shared"] <= SHARED_MEMORY[target], report
        # Triton computes without tensor cores on sm_75, and spills; from sm_80 on nothing may.
        if target != "cuda:75":
            assert report["stack"] == 0, report
            assert report["async_copies"] > 0, report
            assert report["mma"] + report["wgmma"] > 0, report


@pytest.mark.parametrize("target", ["hip:gfx942"])
def test_the_default_compiles_for_amd(target):
    for report in compile_all(target, defaults()):
        assert report["shared"] <= 65536
        assert report["spills"] == 0
        assert report["mfma"] > 0


def test_a_tile_of_64_rows_is_wgmma_on_hopper():
    large = max(defaults(), key=lambda request: request["config"]["BLOCK_SIZE_M"])
    (report,) = compile_all("cuda:90", [large])
    assert report["wgmma"] > 0
    assert report["mma"] == 0


def test_nothing_is_read_before_a_dependent_launch_waits():
    # A kernel that starts before the one before it has ended must not touch what that one writes.
    tile = {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8, "num_warps": 4, "PDL": 1}
    configs = [
        {"kernel": "swap", "BLOCK_SIZE_M": 16, **tile, "num_stages": 4, "SPLIT_K": 2},
        {"kernel": "gemv", "BLOCK_SIZE_M": 1, **tile, "num_stages": 1, "BLOCK_SIZE_N": 2},
        {"kernel": "gemv", "BLOCK_SIZE_M": 1, **tile, "num_stages": 3, "BLOCK_SIZE_N": 2},
        {"kernel": "tma", "BLOCK_SIZE_M": 64, **tile, "num_stages": 4},
        {"kernel": "tma", "BLOCK_SIZE_M": 96, **tile, "num_stages": 4, "SWAP": 1, "SPLIT_K": 2},
    ]
    configs += [{**config, "PREFETCH": 2} for config in configs]
    requests = [
        {"config": config, "M": config["BLOCK_SIZE_M"], "layout": layout}
        for config in configs
        for layout in ("NT", "NN")
        if layout == "NT" or (config["kernel"] == "swap" and "PREFETCH" in config)
    ]
    for report in compile_all("cuda:90", requests):
        assert report["accesses_before_wait"] == 0, report
        # To bring something into L2 is no access: what is written later is found there.
        assert (report["prefetches_before_wait"] > 0) == ("PREFETCH" in report["config"]), report


@pytest.mark.parametrize("device", sorted(SHIPPED_FOR))
def test_shipped_files_compile_for_their_gpu(device):
    # One of each distinct configuration: a file repeats them.
    folder = gemm_kernel.tuning._CONFIGS_DIR
    distinct = {}
    for path in folder.glob(f"*device_name={device}*.json"):
        layout = "NT" if "layout=NT" in path.name else "NN"
        for M, config in json.loads(path.read_text()).items():
            distinct.setdefault((json.dumps(config, sort_keys=True), layout), int(M))
    target = SHIPPED_FOR[device]
    requests = [
        {"config": json.loads(config), "layout": layout, "M": M}
        for (config, layout), M in distinct.items()
    ]
    for report in compile_all(target, requests[:: max(1, len(requests) // 12)]):
        assert "refused" not in report, report
        assert report["shared"] <= SHARED_MEMORY[target], report


def test_every_shipped_device_is_compiled_for():
    names = {
        re.search(r"device_name=([^,]+?)(,layout=NT)?\.json", path.name)[1]
        for path in gemm_kernel.tuning._CONFIGS_DIR.glob("*.json")
    }
    assert names <= set(SHIPPED_FOR)
