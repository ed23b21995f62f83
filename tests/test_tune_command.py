"""`python tune.py`: one clear line and status 2 for what cannot be, files where they are expected."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCAL = f"kernels-test/gemm-triton-autotune={ROOT}"
SHAPE = ["--n", "32", "--k", "32"]


def tune(*arguments, cwd=ROOT, **environment):
    environment = {**os.environ, "LOCAL_KERNELS": LOCAL, **environment}
    return subprocess.run(
        [sys.executable, str(ROOT / "tune.py"), *arguments],
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_writes_both_layouts_and_prints_a_table(tmp_path):
    # from another directory: neither the kernel nor the target depends on it
    result = tune(*SHAPE, "--m", "1", "16", "--save-dir", str(tmp_path / "new"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    files = sorted((tmp_path / "new").glob("*.json"))
    assert len(files) == 2
    assert files[0].name.startswith("N=32,K=32,device_name=")
    for file in files:
        assert set(json.loads(file.read_text())) == {"1", "16"}
        assert f"wrote {file}" in result.stdout
    assert "default µs" in result.stdout
    assert "torch µs" in result.stdout
    assert "candidates measured" in result.stdout


def test_repeated_m_is_taken_once_and_merged(tmp_path):
    options = ["--layout", "nt", "--dtype", "float16", "--save-dir", str(tmp_path)]
    assert tune(*SHAPE, *options, "--m", "2", "--m", "2").returncode == 0
    assert tune(*SHAPE, *options, "--m", "1").returncode == 0
    (file,) = tmp_path.glob("*.json")
    assert list(json.loads(file.read_text())) == ["1", "2"]


def test_it_writes_into_the_source_tree_by_default(tmp_path):
    result = tune("--help")
    target = ROOT / "torch-ext" / "gemm_triton_autotune" / "configs"
    assert str(target) in "".join(line.strip() for line in result.stdout.splitlines())


# fmt: off
BAD = {
    "no k": (["--n", "4"], "--k"),
    "n of zero": (["--n", "0", "--k", "4"], "positive integer, got '0'"),
    "negative k": (["--n", "4", "--k", "-1"], "positive integer"),
    "n in words": (["--n", "four", "--k", "4"], "positive integer, got 'four'"),
    "a fraction": (["--n", "4.5", "--k", "4"], "positive integer"),
    "m of zero": ([*SHAPE, "--m", "0"], "positive integer"),
    "m without a value": ([*SHAPE, "--m"], "--m"),
    "dtype": ([*SHAPE, "--dtype", "int8"], "'float16'"),
    "layout": ([*SHAPE, "--layout", "tn"], "'nt'"),
    "a folder that cannot be": ([*SHAPE, "--save-dir", "/proc/nowhere"], "another save_dir"),
    "a file as folder": ([*SHAPE, "--save-dir", str(ROOT / "README.md")], "another save_dir"),
}
# fmt: on


def assert_one_line(result, message):
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("tune.py: error: ")
    assert message in line


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(name, capsys):
    # in this process, which has the kernel loaded already
    specification = importlib.util.spec_from_file_location("tune", ROOT / "tune.py")
    command = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(command)
    arguments, message = BAD[name]
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    stderr = capsys.readouterr().err
    assert_one_line(subprocess.CompletedProcess([], stop.value.code, stderr=stderr), message)


def test_no_local_kernel_and_no_network_is_one_line():
    result = tune(*SHAPE, LOCAL_KERNELS=None, HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "run `make build` and set LOCAL_KERNELS" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("value", ["kernels-test/gemm-triton-autotune=/nowhere", "", "no-equals"])
def test_a_wrong_local_kernels_is_one_line(value):
    result = tune(*SHAPE, LOCAL_KERNELS=value)
    assert_one_line(result, "cannot load kernels-test/gemm-triton-autotune")


def test_no_gpu_and_no_interpreter_is_one_line(tmp_path):
    result = tune(
        *SHAPE, "--save-dir", str(tmp_path / "new"), TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES=""
    )
    assert_one_line(result, "needs a GPU")
    assert not (tmp_path / "new").exists()


def test_a_damaged_file_stays_as_it_is(tmp_path):
    options = ["--m", "1", "--layout", "nn", "--save-dir", str(tmp_path)]
    assert tune(*SHAPE, *options).returncode == 0
    (file,) = tmp_path.glob("*.json")
    file.write_text('{"1": ')
    assert_one_line(tune(*SHAPE, *options), "is not a tuned file")
    assert file.read_text() == '{"1": '


def test_help_needs_no_gpu_and_no_kernel():
    result = tune("--help", LOCAL_KERNELS=None)
    assert result.returncode == 0
    assert "--save-dir" in result.stdout
