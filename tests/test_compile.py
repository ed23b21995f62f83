"""What ships compiles for its GPU, to the instructions that it stands for. No GPU is needed.

The interpreter takes any configuration; only the compiler knows tile sizes, warps and shared memory. These are
a few of each kind; `make matrix` compiles them all.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import kernels
import pytest

from .compile_targets import TARGETS, compile_all, missing_instructions

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
config_problem = gemm_kernel.kernels.config_problem
ROOT = Path(__file__).resolve().parent.parent


def compiled(target, requests):
    """Reports of ``requests``, each of which must compile, fit, and have the instructions of its family."""
    reports = compile_all(target, requests, processes=2)
    for report in reports:
        assert not {"error", "refused"} & set(report), report
        assert report["shared"] <= TARGETS[target].properties.shared_memory, report
        assert missing_instructions(target, report) is None, report
    return reports


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_89", "sm_90", "gfx942"])
def test_the_conservative_configuration_compiles_and_fits(target):
    layouts = ("NN", "NT") if target == "sm_90" else ("NT",)
    requests = [
        {"config": gemm_kernel.config.conservative_config(M), "M": M, "layout": layout}
        for M in (128, 16, 32, 64)
        for layout in layouts
    ]
    if target == "sm_75":
        requests = requests[1:]  # without tensor cores the largest alone compiles for ten seconds
    for report in compiled(target, requests):
        # Triton computes without tensor cores on sm_75, and spills; elsewhere nothing may.
        assert report["spilled"] == 0 or target == "sm_75", report
        if target in ("sm_80", "sm_89", "sm_90"):
            assert report["async_copies"] > 0, report


def test_a_tile_of_64_rows_is_wgmma_on_hopper():
    large = {"config": gemm_kernel.config.conservative_config(128), "M": 128}
    (report,) = compiled("sm_90", [large])
    assert report["wgmma"] > 0
    assert report["mma"] == 0


# A large tile of each of the device's own lists; the options of its backend are with it.
@pytest.mark.parametrize("target", ["sm_100", "sm_120", "gfx942", "gfx1201"])
def test_candidates_of_other_devices_compile(target):
    configs = gemm_kernel.tuning.candidate_configs(properties=TARGETS[target].properties)
    largest = {}
    for config in configs:
        family = config.get("kernel", "tiled")
        size = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"], config["BLOCK_SIZE_K"]
        if family not in largest or size > largest[family][0]:
            largest[family] = size, config
    assert {"tiled", "swap", "gemv"} <= set(largest)
    compiled(target, [{"config": c, "M": min(c["BLOCK_SIZE_M"], 512)} for _, c in largest.values()])


# The key in Triton's cache of each device function of the package, alone in a process and after all others.
KEYS = """
import sys
from pathlib import Path
import kernels, triton
from tests.processes import fork, wait_for
kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
functions = {
    f"{name.rpartition('.')[-1]}.{key}": value
    for name, module in list(sys.modules.items()) if ".kernels." in name
    for key, value in vars(module).items()
    if isinstance(value, triton.runtime.jit.JITFunction) and value.fn.__module__ == name
}
alone = Path(sys.argv[1])
for name, function in functions.items():
    assert wait_for(fork(lambda: (alone / name).write_text(function.cache_key))) == 0
for order in (list(functions), list(reversed(functions))):
    def check():
        for name in order:
            if functions[name].cache_key != (alone / name).read_text():
                print(name)
    assert wait_for(fork(check)) == 0
print(len(functions))
"""


def test_what_a_process_compiled_before_does_not_count(monkeypatch, tmp_path):
    # Or it would not find what another compiled: a server its warm cache, the tuner what it compiled ahead.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    ran = subprocess.run(
        [sys.executable, "-u", "-c", KEYS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    *differ, count = ran.stdout.split()
    assert differ == []
    assert int(count) > 20


def test_launch_options_of_a_backend_reach_its_compiler():
    tile = gemm_kernel.config.plain_config(128, 128, 64, 8, 2)
    options = [{}, {"matrix_instr_nonkdim": 16}, {"matrix_instr_nonkdim": 32}]
    requests = [{"config": {**tile, **option}} for option in options]
    requests += [{"config": {**tile, "maxnreg": 64}}]  # CUDA's: dropped
    default, of_16, of_32, other = compiled("gfx942", requests)
    assert of_16["mfma"] != of_32["mfma"]
    assert default["mfma"] == other["mfma"]
    assert default["registers"] == other["registers"]


def test_nothing_is_read_before_a_dependent_launch_waits():
    # A kernel that starts before the one before it has ended must not touch what that one writes.
    tile = {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8, "num_warps": 4, "PDL": 1}
    configs = [
        {"kernel": "swap", "BLOCK_SIZE_M": 16, **tile, "num_stages": 4, "SPLIT_K": 2},
        {"kernel": "gemv", "BLOCK_SIZE_M": 1, **tile, "num_stages": 1, "BLOCK_SIZE_N": 2},
        {"kernel": "gemv", "BLOCK_SIZE_M": 1, **tile, "num_stages": 3, "BLOCK_SIZE_N": 2},
        {"kernel": "tma", "BLOCK_SIZE_M": 64, **tile, "num_stages": 4},
        {"kernel": "tma", "BLOCK_SIZE_M": 96, **tile, "num_stages": 4, "SWAP": 1, "SPLIT_K": 2},
        {"kernel": "tma", "BLOCK_SIZE_M": 64, **tile, "num_stages": 4, "PDL": 2},
        {"kernel": "tma", "BLOCK_SIZE_M": 64, **tile, "num_stages": 4, "PDL": 3},
    ]
    configs += [{**config, "PREFETCH": 2} for config in configs]
    configs += [{"kernel": "tma", "BLOCK_SIZE_M": 64, **tile, "num_stages": 3, "PERSISTENT": 1}]
    gluon = {"kernel": "gluon", "BLOCK_SIZE_M": 128, **tile, "num_stages": 4}
    gluon |= {"BLOCK_SIZE_N": 192, "BLOCK_SIZE_K": 64}
    configs += [{**gluon, "PDL": when} for when in (1, 2, 3)]
    requests = [
        {"config": config, "M": config["BLOCK_SIZE_M"], "layout": layout}
        for config in configs
        for layout in ("NT", "NN")
        if layout == "NT"
        or config["kernel"] == "gluon"
        or (config["kernel"] == "swap" and "PREFETCH" in config)
    ]
    for report in compiled("sm_90", requests):
        assert report["accesses_before_wait"] == 0, report
        # Where nothing is said, they start when this one has ended.
        assert report["lets_dependents_start"] == (report["config"]["PDL"] != 3), report
        # To bring something into L2 is no access: what is written later is found there.
        assert (report["prefetches_before_wait"] > 0) == ("PREFETCH" in report["config"]), report


SHIPPED_FOR = {target.example.replace(" ", "_"): name for name, target in TARGETS.items()}
SHIPPED = sorted(
    {
        re.search(r"device_name=([^,]+?)(,layout=NT)?\.json", path.name)[1]
        for path in gemm_kernel.tuning._CONFIGS_DIR.glob("*.json")
        if "device_name=CPU" not in path.name
    }
)


@pytest.mark.parametrize("device", SHIPPED)
def test_shipped_files_compile_for_their_gpu(device):
    # One of each distinct configuration: a file repeats them.
    folder = gemm_kernel.tuning._CONFIGS_DIR
    distinct = {}
    for path in folder.glob(f"*device_name={device}*.json"):
        layout = "NT" if "layout=NT" in path.name else "NN"
        for M, config in json.loads(path.read_text()).items():
            distinct.setdefault((json.dumps(config, sort_keys=True), layout), int(M))
    requests = [
        {"config": json.loads(config), "layout": layout, "M": M}
        for (config, layout), M in distinct.items()
    ]
    compiled(SHIPPED_FOR[device], requests[:: max(1, len(requests) // 8)])
