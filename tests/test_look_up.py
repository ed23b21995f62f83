"""Which configuration a call gets: names, search path, nearest M, fall-backs, warnings."""

import json
import logging
import os
from pathlib import Path

import kernels
import pytest
import torch

from .cases import make_config
from .exact import assert_product
from .test_config import GOOD

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning

N, K = 48, 80


def entry(num_stages):
    """A configuration that can be told from the others by its stages."""
    return {**GOOD, "num_stages": num_stages}


def write(directory, content, n=N, k=K, layout="NN", device=None):
    path = directory / tuning.config_file_name(n, k, device, layout)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    tuning._load_tuned_configs.cache_clear()
    return path


def warnings_of(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.kernels_ci
def test_the_nearest_m_in_log_space_is_used(device, tuned_dir):
    write(tuned_dir, {"16": entry(2), "64": entry(3), "1024": entry(4)})
    used = {M: tuning.get_config(M, N, K, device)["num_stages"] for M in (1, 16, 31, 32, 33, 64)}
    # 32 is the geometric mean of 16 and 64: at a tie the smaller M
    assert used == {1: 2, 16: 2, 31: 2, 32: 2, 33: 3, 64: 3}
    assert tuning.get_config(256, N, K, device) == entry(3)
    assert tuning.get_config(257, N, K, device) == entry(4)
    assert tuning.get_config(10**7, N, K, device) == entry(4)


HOPPER = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232_448)
ROWS_96 = make_config("tma", 96, 64, 128, 4, 5, SWAP=1)
ROWS_128 = make_config("tma", 64, 128, 64, 4, 8)
ROWS_192 = make_config("tma", 192, 64, 64, 4, 7, SWAP=1)


def entry_for(M, entries, n=7168, k=8192, accepts=None, properties=HOPPER, layout="NT"):
    tuned = gemm_kernel.tuned_file.TunedConfigs(Path(), entries)
    return gemm_kernel.selection.entry_for(M, n, k, tuned, properties, layout, accepts)


def ours(config):
    """What operands may have: none of the defaults, so that the entries alone are compared."""
    return config in (ROWS_96, ROWS_128, ROWS_192)


def test_a_tile_that_the_last_rows_overflow_gives_way():
    # Measured: at 100 rows the entry for 96 takes 1.6 times as long as torch.mm, the one for 128 as long.
    entries = {64: ROWS_96, 96: ROWS_96, 128: ROWS_128, 192: ROWS_192}
    used = {
        M: entry_for(M, entries, accepts=ours) for M in (64, 80, 96, 97, 100, 127, 128, 150, 192)
    }
    assert used == {
        64: 64,
        80: 64,
        96: 96,
        97: 128,
        100: 128,
        127: 128,
        128: 128,
        150: 192,
        192: 192,
    }


def test_an_m_that_was_tuned_gets_its_own_entry_whatever_the_model_says():
    assert entry_for(100, {96: ROWS_128, 100: ROWS_96, 128: ROWS_128}) == 100


def test_of_neighbours_that_suit_the_nearer_is_used():
    for M in (65, 81, 90):
        assert entry_for(M, {64: ROWS_128, 128: ROWS_128}, accepts=ours) == (
            64 if M * M <= 64 * 128 else 128
        )
    # What is not next to M is for another kind of product.
    assert entry_for(100, {96: ROWS_96, 300: ROWS_96, 400: ROWS_128}, accepts=ours) == 96


def test_only_what_the_operands_allow_is_compared():
    entries = {96: ROWS_96, 128: ROWS_128, 192: ROWS_192}
    assert entry_for(100, entries, accepts=lambda config: config == ROWS_96) == 96
    assert entry_for(100, entries, accepts=lambda config: config == ROWS_192) == 192
    assert entry_for(100, entries, accepts=lambda config: False) is None


def test_the_model_does_not_speak_against_what_was_measured(monkeypatch):
    times_us = {(96, 96): 200.0, (96, 100): 210.0, (128, 128): 90.0, (128, 100): 103.0}
    entries = {M: {**ROWS_96, "BLOCK_SIZE_M": M} for M in (96, 128)}
    default = {**ROWS_96, "BLOCK_SIZE_M": 64}
    monkeypatch.setattr(gemm_kernel.selection, "default_configs", lambda *_: (default,))

    def chosen(default_us, default_100_us):
        def time_us(config, M, *_):
            own_us = default_100_us if M == 100 else default_us
            return times_us.get((config["BLOCK_SIZE_M"], M), own_us)

        monkeypatch.setattr(gemm_kernel.selection, "time_us", time_us)
        return entry_for(100, entries)

    # By the model the entry for 96 rows takes twice as long as the default there, and won all the same: so it takes no
    # more than the default for 96, and 5 % more for 100.
    assert chosen(100.0, 104.5) == 128
    assert chosen(98.0, 104.5) == 96
    assert chosen(98.0, 100.0) is None
    # Where the default is the slower one by the model, too, there is nothing to set right.
    assert chosen(300.0, 104.5) == 128


def test_an_m_far_away_says_nothing_of_the_model(monkeypatch):
    default = {**ROWS_96, "BLOCK_SIZE_M": 64}
    monkeypatch.setattr(gemm_kernel.selection, "default_configs", lambda *_: (default,))
    time_us = lambda config, *_: {96: 200.0, 64: 100.0}[config["BLOCK_SIZE_M"]]  # noqa: E731
    monkeypatch.setattr(gemm_kernel.selection, "time_us", time_us)
    assert [entry_for(M, {100: ROWS_96}) for M in (49, 50, 200, 201)] == [None, 100, 100, None]


def test_rows_beyond_the_file_get_what_suits_them():
    many = make_config("gluon", 128, 256, 64, 4, 4)
    only = lambda config: config == many  # noqa: E731
    assert entry_for(10**7, {4096: many, 8192: many}, accepts=only) == 8192
    assert entry_for(10**7, {256: many}, accepts=only) is None
    # More rows than 8192 are more of the same, in a file as in a call.
    assert entry_for(60_000, {4096: many, 65_536: many}, accepts=only) == 65_536
    assert entry_for(39_999, {4096: many, 40_000: many}, accepts=only) == 40_000


@pytest.mark.parametrize("properties", [HOPPER, None, gemm_kernel.device.DeviceProperties("cpu")])
def test_on_other_devices_only_doubled_work_counts(properties, monkeypatch):
    # A little slower by the model; and, below, as slow as a second tile for the last rows makes it.
    fast, slow = make_config("tiled", 64, 64, 64, 4, 3), make_config("tiled", 64, 80, 64, 4, 3)
    rates = gemm_kernel.cost_model.rates_for(properties)
    fast_us, slow_us = (
        gemm_kernel.cost_model.time_us(config, 100, 7168, 8192, rates) for config in (fast, slow)
    )
    assert 1.05 < slow_us / fast_us < 1.25
    monkeypatch.setattr(gemm_kernel.selection, "default_configs", lambda *_: (slow,))
    assert entry_for(100, {96: slow, 128: fast}, properties=properties) == (
        128 if properties is HOPPER else 96
    )
    assert entry_for(100, {96: ROWS_96, 128: ROWS_128}, properties=properties) == 128


# 128 tiles of 256 x 5120, one wave; 300 rows of it are 160.
ONE_WAVE = make_config("gluon", 64, 160, 64, 4, 6)


@pytest.fixture
def on_hopper(tuned_dir, monkeypatch):
    """The device, looked up for as an H200."""
    monkeypatch.setattr(tuning, "device_properties", lambda device: HOPPER)
    return torch.device("cpu")


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
def test_a_tile_that_suits_far_less_than_the_default_s_gives_way_to_it(
    families, on_hopper, tuned_dir
):
    n, k = 5120, 25600
    path = write(tuned_dir, {"256": ONE_WAVE}, n, k, "NT", on_hopper)
    default = tuning.default_config(300, n, k, on_hopper, "NT")
    assert default["kernel"] == "gluon"
    assert tuning.get_config(256, n, k, on_hopper, "NT") == ONE_WAVE
    assert tuning.get_config(300, n, k, on_hopper, "NT") == default
    text = gemm_kernel.explain(300, n, k, on_hopper, "NT")
    assert f"it is faster for so many rows than what {path} has for M=256" in text
    # Not if the operands do not allow the default.
    refuse_it = lambda config: config != default  # noqa: E731
    assert tuning.get_config(300, n, k, on_hopper, "NT", refuse_it) == ONE_WAVE


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
def test_an_entry_gives_way_to_a_default_only_on_hopper_and_if_it_is_faster(families):
    assert entry_for(300, {256: ONE_WAVE}, 5120, 25600) is None
    assert entry_for(300, {256: ONE_WAVE}, 5120, 25600, properties=None) == 256
    (default, *_) = gemm_kernel.defaults.default_configs(256, 5120, 25600, HOPPER, "NT")
    assert entry_for(255, {256: default}, 5120, 25600) == 256
    # Nor to one that the operands do not allow, or to the plain kernel, of which the model thinks too well.
    assert entry_for(300, {256: ONE_WAVE}, 5120, 25600, accepts=ONE_WAVE.__eq__) == 256
    slow = make_config("swap", 16, 64, 64, 4, 2)
    (default, *_) = gemm_kernel.defaults.default_configs(300, 4095, 4093, HOPPER, "NT")
    assert gemm_kernel.config.family_of(default) == "tiled"
    assert entry_for(300, {256: slow}, 4095, 4093) == 256


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
def test_warmup_knows_which_rows_get_the_default_beside_a_file(families, on_hopper, tuned_dir):
    n, k = 5120, 25600
    write(tuned_dir, {"256": ONE_WAVE}, n, k, "NT", on_hopper)
    rows = gemm_kernel.warm_up._rows_of_each(n, k, on_hopper, "NT")
    warmed = [*(tuning.get_config(M, n, k, on_hopper, "NT") for M in rows)]
    assert all(tuning.get_config(M, n, k, on_hopper, "NT") in warmed for M in range(1, 8193, 7))
    assert 5 < len(rows) < 60


def test_what_suits_is_computed_once_for_an_m(monkeypatch):
    tuned = gemm_kernel.tuned_file.TunedConfigs(Path(), {96: ROWS_96, 128: ROWS_128})
    look_up = gemm_kernel.selection.entry_for
    assert look_up(100, 7168, 8192, tuned, HOPPER, "NT", ours) == 128
    monkeypatch.setattr(gemm_kernel.selection, "time_us", None)
    assert look_up(100, 7168, 8192, tuned, HOPPER, "NT", ours) == 128
    # And not for ever more of them.
    monkeypatch.undo()
    monkeypatch.setattr(gemm_kernel.selection, "_MAX_KEPT", 10)
    for M in range(100, 200):
        look_up(M, 7168, 8192, tuned, HOPPER, "NT")
    assert [question[0] for question in tuned.chosen] == list(range(190, 200))


def test_what_suits_one_m_is_not_used_for_another():
    many = make_config("gluon", 128, 256, 64, 4, 4)
    tuned = gemm_kernel.tuned_file.TunedConfigs(Path(), {10_000: many, 60_000: many})
    used = {
        M: gemm_kernel.selection.entry_for(M, 7168, 8192, tuned, HOPPER, "NT", many.__eq__)
        for M in (9000, 50_000, 20_000)
    }
    assert used == {9000: 10_000, 50_000: 60_000, 20_000: 10_000}


def test_the_order_in_the_file_decides_nothing(device, tuned_dir):
    write(tuned_dir, {"1024": entry(4), "16": entry(2), "64": entry(3)})
    assert [tuning.get_config(M, N, K, device)["num_stages"] for M in (1, 32, 999)] == [2, 2, 4]


@pytest.mark.kernels_ci
def test_without_a_file_the_default_is_used(device, tuned_dir):
    assert tuning.get_config(64, 123, 321) == tuning.default_config(64, 123, 321)
    assert tuning._load_tuned_configs(123, 321) is None


@pytest.mark.kernels_ci
def test_without_a_file_one_warning_says_what_to_do(device, tuned_dir, caplog):
    for M in (1, 7, 7, 300):
        for _ in range(50):
            tuning.get_config(M, N, K, device, "NT")
    (warning,) = warnings_of(caplog)
    assert warning.name == "gemm_triton_autotune"
    text = warning.getMessage()
    assert tuning.config_file_name(N, K, device, "NT") in text
    assert str(tuned_dir) in text
    assert f"python tune.py --n {N} --k {K} --layout nt" in text
    properties = gemm_kernel.device.device_properties(device)
    assert f"is used, {gemm_kernel.defaults.speed_in_words(properties)}. To make" in text


def test_nt_uses_the_nn_file_if_it_has_none(device, tuned_dir):
    write(tuned_dir, {"16": entry(2)})
    assert tuning.get_config(16, N, K, device, "NT") == entry(2)
    write(tuned_dir, {"16": entry(5)}, layout="NT")
    assert tuning.get_config(16, N, K, device, "NT") == entry(5)
    assert tuning.get_config(16, N, K, device, "NN") == entry(2)


def test_nn_does_not_use_the_nt_file(device, tuned_dir):
    write(tuned_dir, {"16": entry(5)}, layout="NT")
    assert tuning.get_config(16, N, K, device) == tuning.default_config(16, N, K)


def test_the_operands_decide_the_layout(device, tuned_dir, monkeypatch):
    write(tuned_dir, {"16": entry(2)})
    write(tuned_dir, {"16": entry(5)}, layout="NT")
    used = []
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def spy(a, b, out, config):
        used.append(config["num_stages"])
        return launch(a, b, out, config)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
    a = torch.randn(16, K, dtype=torch.float16, device=device)
    weight = torch.randn(N, K, dtype=torch.float16, device=device)
    gemm_kernel.gemm(a, weight.t())
    gemm_kernel.gemm(a, weight.t().contiguous())
    assert used == [5, 2]


@pytest.mark.kernels_ci
def test_the_search_path_is_in_order(device, tmp_path, monkeypatch):
    first, second, cache, package = (tmp_path / name for name in ("1", "2", "cache", "package"))
    user = cache / "gemm-triton-autotune" / "configs"
    for directory in (first, second, user, package):
        directory.mkdir(parents=True)
    monkeypatch.setenv("GEMM_TUNED_CONFIG_DIR", f"{first}{os.pathsep}{second}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(tuning, "_CONFIGS_DIR", package)
    assert tuning.search_path() == [first, second, user, package]
    try:
        for stages, directory in ((2, package), (3, user), (4, second), (5, first)):
            write(directory, {"16": entry(stages)})
            assert tuning.get_config(16, N, K, device) == entry(stages)
    finally:
        tuning._load_tuned_configs.cache_clear()


@pytest.mark.kernels_ci
def test_a_replaced_configs_dir_takes_effect(device, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_CONFIGS_DIR", tmp_path)
    try:
        write(tmp_path, {"16": entry(2)})
        assert tuning.get_config(1, N, K) == entry(2)
    finally:
        tuning._load_tuned_configs.cache_clear()


def test_a_file_is_read_once(device, tuned_dir, monkeypatch):
    write(tuned_dir, {"16": entry(2)})
    reads = []
    read = tuning.read_tuned_file
    monkeypatch.setattr(
        tuning, "read_tuned_file", lambda path, *rest: reads.append(path) or read(path, *rest)
    )
    for M in range(1, 200):
        tuning.get_config(M, N, K, device)
    assert len(reads) == 1


NAMES = {
    "NVIDIA L4": "NVIDIA_L4",
    "AMD Instinct MI250X / MI250": "AMD_Instinct_MI250X___MI250",
    "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb": "NVIDIA_A100-SXM4-40GB_MIG_1c.3g.20gb",
    "Intel(R) Arc(TM) Pro B60 Graphics": "Intel(R)_Arc(TM)_Pro_B60_Graphics",
    'a\\b:c*d?e"f<g>h|i=j,k': "a_b_c_d_e_f_g_h_i_j_k",
    "../../etc/x": ".._.._etc_x",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_device_name_is_safe_in_a_file_name(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    file_name = tuning.config_file_name(N, K, torch.device("cuda:0"))
    assert file_name == f"N={N},K={K},device_name={NAMES[name]}.json"
    assert len(Path(file_name).parts) == 1
    assert (
        tuning.config_file_name(N, K, torch.device("cuda:0"), "NT")
        == f"N={N},K={K},device_name={NAMES[name]},layout=NT.json"
    )


def test_each_device_has_its_own_files(tuned_dir, monkeypatch):
    # two models in one process: neither the current device nor the first call decides
    names = {0: "GPU One", 1: "GPU Two"}
    devices = [torch.device("cuda", index) for index in names]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    properties = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232448)
    monkeypatch.setattr(tuning, "device_properties", lambda device: properties)
    for stages, device in enumerate(devices, start=2):
        write(tuned_dir, {"16": entry(stages)}, device=device)
    assert [tuning.get_config(16, N, K, device) for device in devices * 2] == [
        entry(2),
        entry(3),
        entry(2),
        entry(3),  # fmt: skip
    ]


def test_a_name_is_asked_from_the_backend_of_the_device(monkeypatch):
    # intel/torch-xpu-ops 3657: a build without CUDA raises when torch.cuda is asked
    def refuse(*_):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_name", refuse)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device=None: "Intel X")
    assert tuning.device_name(torch.device("xpu:0")) == "Intel_X"


# fmt: off
DAMAGED = {
    "truncated": '{"1": {"BLOCK',
    "empty": "",
    "a list": "[1, 2]",
    "an empty object": "{}",
    "nested deeply": "[" * 100_000,
    "a huge number": '{"1": ' + "9" * 10_000 + "}",
    "the same M twice": json.dumps({"1": GOOD})[:-1] + ', "1": {}}',
    "only unusable entries": json.dumps({"16": {"BLOCK_SIZE_M": 16}, "0": GOOD, "-1": GOOD, "1.5": GOOD}),
}
# fmt: on


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_gives_the_default_and_one_warning(device, tuned_dir, caplog, name):
    path = write(tuned_dir, DAMAGED[name])
    a = torch.randn(16, K, dtype=torch.float16, device=device)
    b = torch.randn(K, N, dtype=torch.float16, device=device)
    for _ in range(3):
        assert tuning.get_config(16, N, K, device) == tuning.default_config(16, N, K)
        assert_product(gemm_kernel.gemm(a, b), a, b)
    (warning,) = warnings_of(caplog)
    assert str(path) in warning.getMessage()


def test_an_unusable_entry_gives_way_to_the_next_nearest(device, tuned_dir, caplog):
    path = write(tuned_dir, {"1": entry(2), "16": {**GOOD, "num_warps": 3}, "4096": entry(4)})
    assert tuning.get_config(16, N, K, device) == entry(2)
    (warning,) = warnings_of(caplog)
    assert str(path) in warning.getMessage()
    assert "M=16: num_warps must be a power of two, got 3" in warning.getMessage()


def test_notes_of_other_tools_change_nothing(device, tuned_dir, caplog):
    # vllm-project/vllm PR 24769
    write(
        tuned_dir, {"triton_version": "3.4.0", "_comment": "x", "dtype": "float16", "16": entry(2)}
    )
    assert tuning.get_config(16, N, K, device) == entry(2)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
def test_a_file_from_a_windows_editor_is_read(device, tuned_dir, bom):
    path = write(tuned_dir, {"16": entry(2)})
    path.write_bytes(bom + path.read_bytes().replace(b", ", b",\r\n"))
    tuning._load_tuned_configs.cache_clear()
    assert tuning.get_config(16, N, K, device) == entry(2)


@pytest.mark.parametrize(
    "kind", ["directory", "pipe", "dangling link", "loop of links", "not UTF-8"]
)
def test_what_is_no_readable_file_never_raises(device, tuned_dir, kind):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to(tuned_dir / "nowhere")
    elif kind == "loop of links":
        path.symlink_to(path)
    else:
        path.write_bytes(b'{"16": "\xff\xfe"}')
    tuning._load_tuned_configs.cache_clear()
    assert tuning.get_config(16, N, K, device) == tuning.default_config(16, N, K)


def test_an_entry_that_fails_to_launch_is_dropped_once(device, tuned_dir, caplog, monkeypatch):
    # sgl-project/sglang PR 28038: out of shared memory aborts the first forward pass
    path = write(tuned_dir, {"1": entry(2), "16": entry(5)})
    launch = gemm_kernel.kernels.launch_gemm_kernel
    failures = []

    def fail(a, b, out, config):
        if config["num_stages"] == 5:
            failures.append(config)
            raise RuntimeError("PassManager::run failed")
        return launch(a, b, out, config)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", fail)
    a = torch.randn(16, K, dtype=torch.float16, device=device)
    b = torch.randn(K, N, dtype=torch.float16, device=device)
    for _ in range(3):
        assert_product(gemm_kernel.gemm(a, b), a, b)
    assert len(failures) == 1
    (warning,) = warnings_of(caplog)
    assert str(path) in warning.getMessage()
    assert "M=16" in warning.getMessage()
    assert "PassManager" in warning.getMessage()


def test_a_lack_of_memory_drops_no_entry(device, tuned_dir, caplog, monkeypatch):
    write(tuned_dir, {"16": entry(5)})
    launch = gemm_kernel.kernels.launch_gemm_kernel
    launched = []

    def fail_once(a, b, out, config):
        launched.append(config["num_stages"])
        if len(launched) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory: no scratch")
        return launch(a, b, out, config)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", fail_once)
    a = torch.randn(16, K, dtype=torch.float16, device=device)
    b = torch.randn(K, N, dtype=torch.float16, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        gemm_kernel.gemm(a, b)
    assert_product(gemm_kernel.gemm(a, b), a, b)
    assert launched == [5, 5]
    assert not warnings_of(caplog)


def test_a_failure_of_the_default_is_raised(device, tuned_dir, monkeypatch):
    def fail(a, b, out, config):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", fail)
    write(tuned_dir, {"16": entry(5)})
    a = torch.randn(16, K, dtype=torch.float16, device=device)
    with pytest.raises(RuntimeError, match="the device is gone"):
        gemm_kernel.gemm(a, torch.randn(K, N, dtype=torch.float16, device=device))


@pytest.mark.gpu
def test_an_entry_beyond_the_device_never_raises(device, tuned_dir, caplog):
    config = {**GOOD, "BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128}
    write(tuned_dir, {"256": {**config, "num_warps": 8, "num_stages": 3}})
    a = torch.randn(300, K, dtype=torch.float16, device=device)
    b = torch.randn(K, N, dtype=torch.float16, device=device)
    for _ in range(3):
        assert_product(gemm_kernel.gemm(a, b), a, b)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.kernels_ci
def test_explain_says_which_and_why(device, tuned_dir):
    text = gemm_kernel.explain(40, N, K, device, layout="NT")
    assert "the default, because there is no" in text
    assert tuning.config_file_name(N, K, device, "NT") in text
    path = write(tuned_dir, {"16": entry(2), "64": entry(3)})
    text = gemm_kernel.explain(40, N, K, device, layout="NT")
    assert f"tuned, from {path}, entry M=64: the nearest in log space of M=16, 64" in text
    assert "'num_stages': 3" in text
    assert "this very M" in gemm_kernel.explain(16, N, K, device)
    write(tuned_dir, {"16": {}})
    assert "no entry of" in gemm_kernel.explain(16, N, K, device)
    for bad in ({"M": 0}, {"N": -1}, {"layout": "TN"}):
        with pytest.raises(ValueError, match="must be"):
            gemm_kernel.explain(**{"M": 1, "N": N, "K": K, **bad})


def test_warmup_launches_each_configuration_once(device, tuned_dir):
    write(tuned_dir, {"1": entry(2), "16": entry(3), "32": entry(2)})
    dtype = torch.float16
    launched = gemm_kernel.warmup(N, K, device, dtype=dtype)
    assert launched[:2] == [entry(2), entry(3)]
    # and the default, which calls with more than 16 times 32 rows get
    assert tuning.default_config(8192, N, K, device) in launched[2:]
    # without a file: each of the defaults, which are few
    defaults = gemm_kernel.warmup(16, 16, device, layout="NT", dtype=dtype)
    Ms = (1, 2, 17, 33, 50, 70, 100, 300, 513, 1025, 3000, 8192)
    assert all(tuning.default_config(M, 16, 16, device, "NT") in defaults for M in Ms)
    assert len(defaults) < 40
    with pytest.raises(
        ValueError, match="warmup expects dtype float16 or bfloat16, got dtype float32"
    ):
        gemm_kernel.warmup(16, 16, device, dtype=torch.float32)


@pytest.fixture
def launched_rows(monkeypatch):
    """The rows of each launch of a warm-up; one whose configuration is `entry(5)` fails."""
    rows = []
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def spy(a, b, out, config):
        rows.append(a.shape[0])
        if config == entry(5):
            raise RuntimeError("PassManager::run failed")
        return launch(a, b, out, config)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
    return rows


def test_warmup_launches_nothing_twice(device, tuned_dir, launched_rows):
    write(tuned_dir, {"1": entry(2), "16": entry(3), "32": entry(2), "40": entry(3)})
    launched = gemm_kernel.warmup(N, K, device, dtype=torch.float16)
    assert len(launched_rows) == len(launched)


def test_warmup_names_what_an_entry_gave_way_to_once(device, tuned_dir, launched_rows):
    write(tuned_dir, {"1": entry(2), "16": entry(5)})
    launched = gemm_kernel.warmup(N, K, device, dtype=torch.float16)
    assert launched.count(entry(2)) == 1
    assert entry(5) not in launched


def test_warmup_runs_many_rows_as_fewer_of_the_same_entry(device, tuned_dir, launched_rows):
    write(tuned_dir, {"1": entry(2), "8000": entry(3), "20000": entry(4)})
    assert gemm_kernel.warmup(N, K, device, dtype=torch.float16)[-1] == entry(4)
    assert max(launched_rows) == 8192


ONE_ROW = make_config("gemv", 1, 2, 512, 4, 1)


def test_warmup_compiles_what_rows_get_that_their_entry_is_not_for(device, tuned_dir):
    write(tuned_dir, {"1": ONE_ROW, "16": ONE_ROW}, k=512, layout="NT")
    launched = gemm_kernel.warmup(N, 512, device, layout="NT", dtype=torch.float16)
    assert launched[:2] == [ONE_ROW, tuning.default_config(16, N, 512, device, "NT")]


@pytest.mark.parametrize(
    "entries",
    [
        {"1": ONE_ROW, "24": entry(2), "48": entry(3)},
        {"1": ONE_ROW},
        {"4": ONE_ROW, "24": entry(2)},
    ],
    ids=["beside others", "alone", "of too many rows"],
)
def test_what_is_said_and_compiled_before_calls_is_what_they_launch(
    device, tuned_dir, monkeypatch, entries
):
    # gemv takes one row alone: of the rows beside it another entry or the default serves.
    n, k = 96, 512
    write(tuned_dir, entries, n, k, "NT")
    launched = []
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def spy(a, b, out, config):
        launched.append(config)
        return launch(a, b, out, config)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
    warmed = gemm_kernel.warmup(n, k, device, "NT", torch.float16)
    b = torch.randn(n, k, dtype=torch.float16, device=device).t()
    for M in (*range(1, 20), 24, 33, 48, 65):
        launched.clear()
        gemm_kernel.gemm(torch.randn(M, k, dtype=torch.float16, device=device), b)
        assert launched == [tuning.get_config(M, n, k, device, "NT")], M
        assert f": {launched[0]}, " in gemm_kernel.explain(M, n, k, device, "NT")
        assert launched[0] in warmed


def test_sizes_that_no_memory_holds_are_explained(device, tuned_dir):
    for size in (2**31, 2**39):
        assert "the default" in gemm_kernel.explain(size, size, size, device)
        write(tuned_dir, {"1000000000": entry(2)}, size, size)
        tuning._load_tuned_configs.cache_clear()
        assert gemm_kernel.explain(size, size, size, device)


@pytest.mark.parametrize("families", ["Hopper with Gluon"], indirect=True)
def test_an_entry_is_compared_with_the_default_that_can_be_launched(families, on_hopper, tuned_dir):
    n, k = 5120, 25600
    write(tuned_dir, {"256": ONE_WAVE}, n, k, "NT", on_hopper)
    default = tuning.get_config(300, n, k, on_hopper, "NT")
    assert default == tuning.default_config(300, n, k, on_hopper, "NT") != ONE_WAVE
    tuning._reject(default, RuntimeError("why"), n, k, on_hopper, "NT", is_default=True)
    # The next one, of `tma`, is slower than the entry by the model.
    following = tuning.default_config(300, n, k, on_hopper, "NT")
    assert following["kernel"] == "tma"
    assert tuning.get_config(300, n, k, on_hopper, "NT") == ONE_WAVE
    assert "entry M=256" in gemm_kernel.explain(300, n, k, on_hopper, "NT")


def test_the_shipped_file_is_found_in_the_package(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA L4")
    properties = gemm_kernel.device.DeviceProperties("cuda", (8, 9), 58, 101376)
    monkeypatch.setattr(tuning, "device_properties", lambda device: properties)
    tuning._load_tuned_configs.cache_clear()
    try:
        config = tuning.get_config(1024, 4096, 4096, torch.device("cuda:0"))
    finally:
        tuning._load_tuned_configs.cache_clear()
    assert (config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"], config["num_stages"]) == (128, 128, 3)
