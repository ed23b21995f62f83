"""Whatever a tuned file is or holds, a launch is right: drawn files, damaged ones, and those of others."""

import contextlib
import json
import logging
import math
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import kernels
import pytest
import torch

from .drawn import examples, hypothesis
from .exact import assert_product
from .processes import without_rights
from .test_config import GOOD
from .test_look_up import entry, warnings_of, write

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning, tuned_file = gemm_kernel.tuning, gemm_kernel.tuned_file
config_problem = gemm_kernel.kernels.config_problem
DeviceProperties = gemm_kernel.device.DeviceProperties

given, st = hypothesis.given, hypothesis.strategies

N, K = 5, 9
REAL_CONFIGS = sorted((Path(__file__).parent / "data" / "real-configs").glob("*.json"))
# A device of each backend, small enough that some entries of other GPUs do not fit.
DEVICES = [
    DeviceProperties("cuda", (8, 9), 58, 101376),
    DeviceProperties("cuda", (9, 0), 132, 232448),
    DeviceProperties("rocm", None, 304, 65536),
    DeviceProperties("xpu", None, 64, 131072),
    DeviceProperties("cpu"),
]


def check_file(path, device, caplog, Ms=(1, 70)):
    """Everything that must hold of look-up and calls while ``path`` is the file that is found."""
    caplog.clear()
    tuning._load_tuned_configs.cache_clear()
    for properties in DEVICES:
        tuned, problems = tuned_file.read_tuned_file(path, properties)
        assert list(tuned) == sorted(tuned)
        assert all(type(M) is int and M > 0 for M in tuned)
        assert {config_problem(config, properties) for config in tuned.values()} <= {None}
        assert all(len(text) < 200 and text.isprintable() for text in problems.values())
        assert all(len(key) < 200 and key.isprintable() for key in problems)
        assert tuned or problems
    for M in (1, 2, 3, 64, 10**6, 10**12):
        config = tuning.get_config(M, N, K, device)
        assert config_problem(config, gemm_kernel.device.device_properties(device)) is None
    for M in Ms:
        a = torch.randn(M, K, dtype=torch.float16, device=device)
        b = torch.randn(K, N, dtype=torch.float16, device=device)
        out = torch.full((M, N), torch.nan, dtype=torch.float16, device=device)
        assert_product(gemm_kernel.gemm(a, b, out=out), a, b, path.read_bytes()[:200])
    assert gemm_kernel.explain(1, N, K, device)
    lines = [record.getMessage() for record in warnings_of(caplog)]
    assert len(lines) <= 1
    assert all(len(line) < 2000 and str(path) in line for line in lines)


# Values that JSON can hold where a number of a configuration should stand.
VALUES = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1 << 31, 1 << 63, 1 << 64]),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
KNOWN_KEYS = sorted(
    {key for family in gemm_kernel.kernels.FAMILIES.values() for key in family.PARAMETERS}
    | set(gemm_kernel.config.LAUNCH_PARAMETERS)
    | {key for options in gemm_kernel.config.BACKEND_OPTIONS.values() for key in options}
    | {"grf_mode", "kernel", "num_ctas", "NUM_WARPS", "cache_modifier"}
)
FAMILY_NAMES = st.sampled_from([*gemm_kernel.kernels.FAMILIES, "magic"])
CHANGES = st.dictionaries(st.sampled_from(KNOWN_KEYS) | st.text(max_size=12), VALUES, max_size=3)


@st.composite
def entries(draw):
    """A configuration: a good one or a candidate, some keys changed or taken away."""
    config = dict(draw(st.sampled_from([GOOD, *tuning.candidate_configs()])))
    config.update(draw(CHANGES))
    if draw(st.integers(0, 5)) == 0:
        config["kernel"] = draw(FAMILY_NAMES)
    for key in draw(st.lists(st.sampled_from(KNOWN_KEYS), max_size=1)):
        config.pop(key, None)
    return config


M_KEYS = st.one_of(
    st.integers(1, 300).map(str),
    st.integers().map(str),
    st.sampled_from(
        ["0", "-1", "01", "+1", " 1", "1 ", "1.0", "1e3", "0x10", "١٢", "²", "1_000", ""]
    ),
    st.sampled_from(
        ["9" * 18, "9" * 19, "9" * 400, "any", "M_LEQ_8", "triton_version", "__proto__"]
    ),
    st.text(max_size=6),
)
TREES = st.recursive(
    VALUES | entries(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(M_KEYS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(M_KEYS, entries() | TREES, max_size=5)


@st.composite
def damaged_bytes(draw):
    """A file that was a good one until it was cut, overwritten, doubled or encoded in another way."""
    Ms = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=4, unique=True))
    text = json.dumps({str(M): GOOD for M in Ms}, indent=draw(st.sampled_from([None, 1, 4])))
    data = bytearray(text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 40))
        kind = draw(st.sampled_from(["cut", "overwrite", "insert", "repeat"]))
        if kind == "cut":
            del data[start : len(data) if draw(st.booleans()) else start + length]
        elif kind == "overwrite":
            data[start : start + length] = draw(st.binary(max_size=length))
        elif kind == "insert":
            data[start:start] = draw(st.binary(max_size=length))
        else:
            data[start:start] = data[start : start + length]
    return bytes(data)


@given(
    st.binary(max_size=200)
    | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace"))
)
@examples(40)
def test_any_bytes_are_survived(device, tuned_dir, caplog, data):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    path.write_bytes(data)
    check_file(path, device, caplog, Ms=(1,))


@given(damaged_bytes())
@examples(80)
def test_a_damaged_file_is_survived(device, tuned_dir, caplog, data):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    path.write_bytes(data)
    check_file(path, device, caplog, Ms=(1,))


@given(OBJECTS | TREES)
@examples(150)
def test_any_object_is_survived(device, tuned_dir, caplog, content):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    path.write_text(json.dumps(content))
    check_file(path, device, caplog)


@given(OBJECTS | TREES | damaged_bytes())
@examples(60)
def test_saving_into_any_file_merges_or_refuses(tmp_path, content):
    path = tmp_path / "N=1,K=1,device_name=X.json"
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(data)
    try:
        before = tuned_file.read_mergeable(path)
    except ValueError:
        with pytest.raises(ValueError, match="is not a tuned file .*nothing was changed"):
            tuned_file.save_tuned_configs(path, {64: GOOD})
        assert path.read_bytes() == data
    else:
        tuned_file.save_tuned_configs(path, {64: GOOD})
        after = tuned_file.read_mergeable(path)
        # as text, since NaN is not equal to itself
        assert json.dumps(after, sort_keys=True) == json.dumps(
            {**before, "64": GOOD}, sort_keys=True
        )
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


# fmt: off
HUGE = {
    "a megabyte of one key": json.dumps({"x" * 900_000: GOOD}),
    "a megabyte of keys": "{" + ",".join(f'"{M}":0' for M in range(1, 80_000)) + "}",
    "keys that all occur twice": "{" + ",".join(f'"{M % 40_000}":0' for M in range(80_000)) + "}",
    "a megabyte of nesting": '{"1":' * 150_000,
    "a key of many lines": json.dumps({"1": {**GOOD, "\n\r\x1b[31m" * 9: 1}}),
    "half of a character": '{"1": {"\\ud800": 1}, "\\udfff": {}}',
    "a number of a megabyte": '{"1": {"num_warps": ' + "9" * 900_000 + "}}",
    "a number of 4000 digits": json.dumps({"1": {**GOOD, "num_warps": 10**4000}}),
    "two megabytes": " " * (2 << 20),
}
# fmt: on


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_file_costs_a_call_no_more_than_a_moment(device, tuned_dir, caplog, name):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    path.write_text(HUGE[name])
    start = time.perf_counter()
    tuned_file.read_tuned_file(path, DEVICES[0])
    assert time.perf_counter() - start < 10
    check_file(path, device, caplog)


def test_a_sparse_file_is_not_read(device, tuned_dir, caplog):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    tuning._load_tuned_configs.cache_clear()
    assert tuning.get_config(1, N, K, device) == tuning.default_config(1, N, K)
    assert f"{1 << 40} bytes" in caplog.text


def test_no_more_is_read_than_a_file_may_have(tmp_path, monkeypatch):
    # As one that grows meanwhile, or says that it has no size.
    path = tmp_path / "file.json"
    path.write_text(" " * tuned_file._MAX_BYTES + json.dumps({"1": GOOD}))
    mode = path.stat().st_mode
    monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_mode=mode, st_size=0))
    tuned, problems = tuned_file.read_tuned_file(path, DEVICES[0])
    assert (dict(tuned), list(problems)) == ({}, [""])


def test_a_key_that_occurs_twice_leaves_nothing_to_go_by(tmp_path):
    path = tmp_path / "file.json"
    for text in (json.dumps({"1": GOOD})[1:-1], '"16": {"num_warps": 4, "num_warps": 8}'):
        path.write_text("{" + ", ".join([text] * 2) + "}")
        tuned, problems = tuned_file.read_tuned_file(path, DEVICES[0])
        assert dict(tuned) == {}
        assert problems[""].endswith("occurs more than once")


def test_no_file_is_where_a_folder_of_the_search_path_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert tuned_file.read_tuned_file(tmp_path / "file" / "name.json", DEVICES[0]) is None


def test_an_m_in_digits_of_another_script_is_no_m(tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"1٢": GOOD}))
    tuned, problems = tuned_file.read_tuned_file(path, DEVICES[0])
    assert dict(tuned) == {}
    assert list(problems.values()) == ["M must be a positive number in plain digits"]


# fmt: off
IN_ITS_PLACE = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "a link to a device that never ends": lambda path: path.symlink_to("/dev/zero"),
    "a link to a device that is full": lambda path: path.symlink_to("/dev/full"),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a loop of links": lambda path: path.symlink_to(path),
    "a link to its folder": lambda path: path.symlink_to(path.parent),
    "a file that has no size": lambda path: path.symlink_to("/proc/self/status"),
}
# fmt: on


@pytest.mark.parametrize("name", IN_ITS_PLACE)
def test_what_stands_in_place_of_a_file_is_survived(device, tuned_dir, monkeypatch, caplog, name):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    monkeypatch.chdir(tuned_dir)  # a socket's name is short
    IN_ITS_PLACE[name](Path(path.name) if name == "a socket" else path)
    tuning._load_tuned_configs.cache_clear()
    for _ in range(3):
        assert tuning.get_config(1, N, K, device) == tuning.default_config(1, N, K)
    (warning,) = warnings_of(caplog)
    assert path.name in warning.getMessage()
    descriptors = len(os.listdir("/dev/fd"))
    for _ in range(20):
        tuned_file.read_tuned_file(path, DEVICES[0])
    assert len(os.listdir("/dev/fd")) == descriptors


def test_a_link_to_a_good_file_is_followed(device, tuned_dir, tmp_path):
    (tmp_path / "elsewhere.json").write_text(json.dumps({"1": entry(2)}))
    (tuned_dir / tuning.config_file_name(N, K, device)).symlink_to(tmp_path / "elsewhere.json")
    tuning._load_tuned_configs.cache_clear()
    assert tuning.get_config(1, N, K, device) == entry(2)


def test_nothing_of_a_file_is_run(device, tuned_dir, caplog, monkeypatch):
    monkeypatch.chdir(tuned_dir)
    code = "__import__('pathlib').Path('run').touch()"
    for content in (
        {"1": {**GOOD, "num_warps": code}},
        {"1": {**GOOD, "kernel": code}},
        {"1": {**GOOD, code: 1}},
        {code: {code: code}},
        {"1": {"__class__": "os.system", "__reduce__": [code]}},
    ):
        check_file(write(tuned_dir, content, N, K, device=device), device, caplog)
    assert not Path("run").exists()


def test_a_file_or_folder_that_is_closed_is_survived(tmp_path, monkeypatch, caplog):
    # ROCm/aiter PR 4447: an unreadable file. A folder that is closed may hold the file or not, and must
    # not hide what is shipped.
    device = torch.device("cpu")
    name = tuning.config_file_name(N, K, device)
    file, folder, shipped = (tmp_path / kind for kind in ("file", "folder", "shipped"))
    for directory in (file, folder, shipped):
        directory.mkdir()
        (directory / name).write_text(json.dumps({"1": entry(2)}))
    (file / name).chmod(0)
    monkeypatch.setattr(tuning, "_CONFIGS_DIR", shipped)
    for directory in (shipped, *shipped.parents[:-1]):
        if directory.stat().st_uid == os.geteuid() and directory.stat().st_mode & 0o777 == 0o700:
            directory.chmod(0o711)
    folder.chmod(0)

    def check():
        for directory, expected in (
            (file, tuning.default_config(1, N, K, device)),
            (folder, entry(2)),
        ):
            monkeypatch.setenv("GEMM_TUNED_CONFIG_DIR", str(directory))
            caplog.clear()
            tuning._load_tuned_configs.cache_clear()
            for _ in range(3):
                assert tuning.get_config(1, N, K, device) == expected, directory
            assert len(warnings_of(caplog)) == (directory == file)
            assert (directory == file) == ("Permission denied" in caplog.text)

    try:
        without_rights(check)
    finally:
        folder.chmod(0o700)
        tuning._load_tuned_configs.cache_clear()


@pytest.mark.parametrize("path", REAL_CONFIGS, ids=lambda path: path.name.split(".json")[0])
def test_a_real_file_of_others_keeps_launches_right(device, tuned_dir, caplog, path):
    ours = tuned_dir / tuning.config_file_name(N, K, device)
    ours.write_bytes(path.read_bytes())
    check_file(ours, device, caplog, Ms=(1, 2, 130))
    content = json.loads(path.read_text())
    for properties in DEVICES:
        tuned, problems = tuned_file.read_tuned_file(ours, properties)
        Ms = {int(key) for key in content if key.isdigit()}
        assert set(tuned) | {int(key) for key in problems if key.isdigit()} == Ms
    # Other tools' options are given to their own backend only.
    for config in tuned.values():
        for backend in ("cuda", "rocm", "xpu"):
            options = gemm_kernel.config.launch_options(config, backend)
            assert ("waves_per_eu" in options) == (backend == "rocm" and "waves_per_eu" in config)
            assert ("grf_mode" in options) == (backend == "xpu" and "grf_mode" in config)


def test_there_are_real_files():
    assert len(REAL_CONFIGS) == 16


def test_an_order_that_is_not_ascending_is_read_alike(device, tuned_dir):
    # as in a real file, whose first key is 3328: at a tie the file's order decided
    Ms = [16, 64, 1, 4096, 256]
    path = write(tuned_dir, {str(M): entry(2 + i) for i, M in enumerate(Ms)}, N, K, device=device)
    stages = [tuning.get_config(M, N, K, device)["num_stages"] for M in (4, 32, 128, 1024)]
    content = json.loads(path.read_text())
    write(tuned_dir, {key: content[key] for key in sorted(content)}, N, K, device=device)
    assert [tuning.get_config(M, N, K, device)["num_stages"] for M in (4, 32, 128, 1024)] == stages
    assert stages == [4, 2, 3, 6]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12, unique=True), st.integers(1, 10**6))
@examples(200)
def test_the_nearest_m_is_the_nearest(Ms, M):
    tuned = tuned_file.TunedConfigs(Path("x"), {m: {"M": m} for m in Ms})
    best = min(sorted(Ms), key=lambda m: (max(m, M) / min(m, M), m))
    found = tuned.neighbours(M)
    assert found[:1] == (() if _out_of_reach(M, Ms) else (best,))
    if found and best != M:
        # And on the other side of M the nearest there.
        other_side = [m for m in Ms if (m < M) != (best < M)]
        assert found[1:] == tuple(sorted(other_side, key=lambda m: abs(m - M))[:1])
    others = [m for m in Ms if m != best]
    found = tuned.neighbours(M, lambda config: config["M"] != best)
    assert bool(found) == (bool(others) and not _out_of_reach(M, others))
    if found:
        nearest = min(abs(math.log(m / M)) for m in others)
        assert math.isclose(abs(math.log(found[0] / M)), nearest, abs_tol=1e-12)


def test_at_a_tie_the_smaller_m_is_the_nearest():
    tuned = tuned_file.TunedConfigs(Path("x"), {M: {"M": M} for M in (16, 32, 64)})
    assert tuned.neighbours(32) == (32,)
    assert tuned.neighbours(32, lambda config: config["M"] != 32) == (16, 64)
    assert tuned_file.TunedConfigs(Path("x"), {16: GOOD, 64: GOOD}).neighbours(32) == (16, 64)


def _out_of_reach(M, Ms):
    return min(Ms) > 16 * M or min(M, 8192) > 16 * max(Ms)


def test_a_logger_without_handlers_is_enough(device, tuned_dir, capsys):
    logger = logging.getLogger("gemm_triton_autotune")
    write(tuned_dir, "{", N, K, device=device)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, logger, "propagate", logger.propagate)
        logger.propagate = False
        tuning.get_config(1, N, K, device)
    assert "Logging error" not in capsys.readouterr().err
