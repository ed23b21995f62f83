"""The examples and the benchmark of whole models run, and do what they say."""

import functools
import importlib.util
import json
import runpy
import sys
from pathlib import Path

import kernels
import pytest

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

ROOT = Path(__file__).resolve().parent.parent
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers (requirements-dev.txt)",
)


@pytest.fixture
def run(monkeypatch, capsys, nn_linear):
    """Run a script as `python script arguments` would, in this process; what it printed."""

    def run_script(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        monkeypatch.syspath_prepend(ROOT / Path(script).parent)
        module = runpy.run_path(str(ROOT / script))
        assert module.get("main", int)() == 0
        return capsys.readouterr().out

    return run_script


def test_model_code_trains(run):
    assert "gradient of the first weight" in run("examples/model_code.py")


def test_a_model_is_tuned_once(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gemm_kernel.tuning._load_tuned_configs.cache_clear()
    # On a GPU a real search takes minutes.
    candidates = [gemm_kernel.tuning.default_config(64, 64, 64)]
    tune = functools.partial(gemm_kernel.tune_gemm, candidates=candidates)
    monkeypatch.setattr(gemm_kernel, "tune_gemm", tune)
    first = run("examples/tune_model.py")
    again = run("examples/tune_model.py")
    written = [line.removeprefix("wrote ") for line in first.splitlines() if "wrote" in line]
    assert len(written) == 2
    assert all(Path(path).is_relative_to(tmp_path) and ",layout=NT" in path for path in written)
    assert "wrote" not in again
    assert again.count("tuned, from") == 2


def test_the_local_build_is_named(run):
    out = run("examples/local_kernels.py")
    assert f"version 1, from {Path(gemm_kernel.__file__).parent}" in out


@needs_transformers
def test_a_transformers_model_is_kernelized(run):
    out = run("examples/kernelize_model.py")
    # seven in each of two layers, and the head
    assert "15 layers replaced" in out
    difference, scale = out.split("logits: ")[1].split(" of ")
    assert float(difference) <= 0.05 * float(scale)


@needs_transformers
def test_the_benchmark_of_models_runs(run, tmp_path):
    table = run("benchmarks/models.py", "--tiny", "--json", tmp_path / "models.json")
    result = json.loads((tmp_path / "models.json").read_text())
    assert len(result["models"]) == 3
    assert len(result["rows"]) >= 6
    assert len(result["training"]["ours"]) == len(result["training"]["original"]) == 1
    assert all(row["regime"] in table for row in result["rows"])


def test_every_example_is_run():
    source = Path(__file__).read_text()
    assert all(f"examples/{path.name}" in source for path in (ROOT / "examples").glob("*.py"))
