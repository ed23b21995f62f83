"""What the benchmarks compare is right before it is timed, and one provider's fault costs no other its time."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import autotuned  # noqa: E402
import compare  # noqa: E402
import latency  # noqa: E402
import machine  # noqa: E402
import providers  # noqa: E402
from results_file import read_results  # noqa: E402

N, K = 48, 64
tuning, measure = compare.tuning, compare.measure


@pytest.fixture
def operands(device):
    def make(M, layout="NT"):
        a = torch.randn(M, K, dtype=torch.float16, device=device)
        weights = measure.make_weights(N, K, torch.float16, layout, device)[:2]
        return providers.Operands(a, weights, a.new_empty(M, N), layout)

    return make


class Clock:
    """Stands in for a timed call; each one takes the next times, in milliseconds."""

    def __init__(self, *times):
        self._times = iter(times)

    def __call__(self, fn, device, rests=True):
        own = iter(next(self._times))
        timed = type("Timed", (), {"time_ms": lambda self: next(own)})
        return timed()


def product(operands):
    return providers.Prepared(lambda b: torch.mm(operands.a, b, out=operands.out))


def test_what_is_compared_is_compiled_ahead(device):
    problem = compare.gemm_kernel.bench.Problem(N, K, "NT", "float16")
    own, default = (
        choose(16, N, K, device, "NT") for choose in (tuning.get_config, tuning.default_config)
    )
    found = providers.configs_ahead({"gemm", "default", "torch"}, problem, 16, device)
    assert found == [default, own]
    variants = {"gemm:GROUP_SIZE_M=3", "default:GROUP_SIZE_M=5,num_stages=1"}
    found = providers.configs_ahead(variants, problem, 16, device)
    assert found == [{**default, "GROUP_SIZE_M": 5, "num_stages": 1}, {**own, "GROUP_SIZE_M": 3}]
    found = providers.configs_ahead({"autotune", "upstream", "compile"}, problem, 16, device)
    assert found == [*autotuned.autotune_configs(16, device), *providers.upstream_grid()]
    assert providers.configs_ahead({"torch", "upstream-default"}, problem, 16, device) == []


def test_a_ratio_is_the_median_over_rounds(operands, monkeypatch):
    monkeypatch.setattr(machine, "ROUNDS", 3)
    # of the medians it would be 1.5
    monkeypatch.setattr(machine, "timed", Clock([1, 2, 4], [3, 2, 8]))
    row = compare.compare_point(operands(16), {"gemm": product, "torch": product})
    assert row["ratio"] == row["multiples"]["torch"] == 2
    assert row["us"] == {"gemm": 2000, "torch": 3000}
    assert "missing" not in row


def test_what_fails_or_is_wrong_has_no_time_and_a_reason(operands, monkeypatch):
    def wrong(operands):
        return providers.Prepared(lambda b: torch.zeros_like(operands.out))

    def writes_nothing(operands):
        return providers.Prepared(lambda b: operands.out)

    def breaks(operands):
        raise RuntimeError("no such kernel\nand pages more")

    monkeypatch.setattr(machine, "timed", Clock([2.0] * machine.ROUNDS, [1.0] * machine.ROUNDS))
    compared = {"wrong": wrong, "gemm": product, "nothing": writes_nothing, "breaks": breaks}
    row = compare.compare_point(operands(16), {**compared, "torch": product})
    assert row["ratio"] == 0.5
    assert [name for name, us in row["us"].items() if us is None] == ["wrong", "nothing", "breaks"]
    wrong_twice = dict.fromkeys(("wrong", "nothing"), compare.WRONG)
    assert row["missing"] == {**wrong_twice, "breaks": "no such kernel"}


def test_without_gemm_there_is_no_ratio(operands, monkeypatch):
    def breaks(operands):
        raise ValueError

    monkeypatch.setattr(machine, "timed", Clock([1.0] * machine.ROUNDS))
    row = compare.compare_point(operands(4), {"gemm": breaks, "torch": product})
    assert row["ratio"] is None
    assert row["multiples"] == {}
    assert row["missing"] == {"gemm": "ValueError"}


@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("name", sorted(set(providers.PROVIDERS) - {"compile"}))
def test_every_provider_computes_the_product(operands, name, layout, monkeypatch):
    # Two of many: on a GPU each is a compile.
    few = autotuned.autotune_configs(20, operands(20).a.device)[:2]
    monkeypatch.setattr(autotuned, "autotune_configs", lambda M, device: few)
    monkeypatch.setattr(providers, "upstream_grid", lambda: GRID[:2])
    point = operands(20, layout)
    exact = measure.ExactProduct(point.a, point.weights[0])
    prepared = providers.PROVIDERS[name](point)
    assert providers.is_right(prepared, point, exact)
    # It computes with the weight that it is given, not with the one it was prepared with.
    other = measure.make_weight(N, K, torch.float16, layout, point.a.device)
    result = prepared.call(other).clone()
    assert measure.ExactProduct(point.a, other).is_right(result)


def test_each_point_is_compiled_anew_for_its_own_shape(operands, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: asked.append(options) or fn)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: asked.append("reset"))
    for M in (4, 16):
        point = operands(M)
        exact = measure.ExactProduct(point.a, point.weights[0])
        assert providers.is_right(providers.PROVIDERS["compile"](point), point, exact)
    assert asked == ["reset", {"mode": "max-autotune-no-cudagraphs", "dynamic": False}] * 2


GRID = providers.upstream_grid()


def test_the_upstream_grid_is_that_of_the_example():
    assert len(GRID) == 90
    problem = compare.gemm_kernel.kernels.config_problem
    assert [config for config in GRID if problem(config)] == []
    wide = {(c["BLOCK_SIZE_M"], c["BLOCK_SIZE_N"]) for c in GRID if c["num_warps"] == 8}
    assert wide == {(64, 128), (128, 64), (128, 128)}
    assert [providers.upstream_default(M)["BLOCK_SIZE_M"] for M in (1, 16, 17)] == [16, 16, 64]


def test_upstream_takes_the_fastest_of_its_grid(operands, monkeypatch):
    monkeypatch.setattr(providers, "upstream_grid", lambda: GRID[:3])
    monkeypatch.setattr(providers, "timed", Clock([5.0] * 3, [9.0, 2.0, 9.0], [4.0] * 3))
    assert providers.PROVIDERS["upstream"](operands(16)).config == GRID[1]


def test_autotune_measures_what_candidate_configs_has_of_tiled(operands):
    point = operands(16)
    kernel = providers.Autotuned(16, point.a.device)
    for b in point.weights:
        kernel(point.a, b, point.out)
    configs = providers.autotune_configs(16, point.a.device)
    assert kernel.measured == len(configs) > 1
    assert kernel.best in configs


def test_configs_of_a_folder_serve_their_very_point_only(operands, device, tmp_path):
    config = tuning.default_config(16, N, K)
    path = tmp_path / tuning.config_file_name(N, K, device, "NT")
    path.write_text(json.dumps({"16": config}))
    ((name, provider),) = providers.named_providers([f"configs:{tmp_path}"]).items()
    assert name == f"configs:{tmp_path.name}"
    assert provider(operands(16)).config == config
    for other, reason in ((operands(20), "M=20"), (operands(16, "NN"), "there is no")):
        with pytest.raises(providers.Unavailable, match=reason):
            provider(other)


def test_a_variant_is_a_configuration_with_other_values(operands):
    names = [
        "gemm:GROUP_SIZE_M=3",
        "default:num_stages=1,GROUP_SIZE_M=5",
        "gemm:GROUP_SIZE_M=0",
    ]
    of_gemm, of_default, invalid = providers.named_providers(names).values()
    point = operands(16)
    default = tuning.default_config(16, N, K)
    assert of_gemm(point).config == {**default, "GROUP_SIZE_M": 3}
    assert of_default(point).config == {**default, "GROUP_SIZE_M": 5, "num_stages": 1}
    exact = measure.ExactProduct(point.a, point.weights[0])
    assert providers.is_right(of_gemm(point), point, exact)
    with pytest.raises(providers.Unavailable, match="GROUP_SIZE_M"):
        invalid(point)
    assert providers._changed({"PDL": 2, "num_warps": 4}, {"PDL": None}) == {"num_warps": 4}


@pytest.mark.parametrize(
    "names",
    [["cublas"], ["configs:/nowhere"], ["gemm", "gemm"], ["gemm:"], ["gemm:PDL"], ["gemm:PDL=x"], ["torch:PDL=1"]],
)  # fmt: skip
def test_a_provider_that_there_is_not_is_refused(names):
    with pytest.raises(ValueError, match="expects"):
        providers.named_providers(names)


def test_a_command_names_no_path_of_this_machine(monkeypatch):
    folder = f"configs:{Path.cwd()}/tuned"
    arguments = ["--json", "/tmp/a/b.json", "--providers", "gemm", folder, "configs:/x/y/here"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-test/gemm-triton-autotune={Path.cwd()}")
    monkeypatch.setenv("GEMM_TUNED_CONFIG_DIR", "")
    assert machine._command("benchmarks/compare.py") == (
        "LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python benchmarks/compare.py "
        "--json b.json --providers gemm configs:tuned configs:here"
    )


def test_the_comparison_runs(monkeypatch, capsys, tmp_path, device):
    path = tmp_path / "new" / "results.json"
    arguments = ["--shapes", f"{N}x{K}", "--m", "1", "20", "--dtype", "float16", "--no-cpu"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, "--json", str(path)])
    assert compare.main() == 0
    results = read_results(path)
    assert [(row["layout"], row["M"]) for row in results["rows"]] == [
        ("NT", 1), ("NT", 20), ("NN", 1), ("NN", 20),
    ]  # fmt: skip
    for row in results["rows"]:
        assert set(row["us"]) == {"gemm", "default", "torch"}
        assert all(math.isfinite(us) for us in (*row["us"].values(), row["floor_us"], row["ratio"]))
        used = tuning.get_config(row["M"], N, K, device, row["layout"])
        assert row["configs"]["gemm"] == used
    assert {"device", "date", "torch", "triton", "driver", "command"} <= set(results["environment"])
    assert "4 points, 0 results wrong, 0 left out" in capsys.readouterr().out
    # A row a line, so that a change reads well.
    assert sum(line.startswith('{"N":48') for line in path.read_text().splitlines()) == 4


def test_first_calls_are_measured_in_processes_of_their_own(monkeypatch, capsys, tmp_path):
    path = tmp_path / "latency.json"
    cases = ["gemm, without one", "gemm, with a tuned file"]
    arguments = ["--shape", "16", str(N), str(K), "--rounds", "1", "--cases", *cases]
    monkeypatch.setattr(sys, "argv", ["latency.py", *arguments, "--json", str(path)])
    # One of them has no file to use, which is told and stops nothing.
    assert latency.main() == 1
    without, with_file = read_results(path)["rows"]
    assert without["right"]
    assert without["first_ms"] > without["second_ms"] > 0
    assert without["cold_ms"] > 0
    assert with_file == {
        "case": cases[1],
        "missing": f"RuntimeError: there is no tuned file for N={N}, K={K}, NT",
    }
    assert "there is no tuned file" in capsys.readouterr().out


def test_a_first_call_is_the_median_of_the_warm_ones():
    warm = [
        {"import_ms": 1, "device_ms": 1, "first_ms": ms, "second_ms": 1}
        | {"configs_measured": 7, "right": True}
        for ms in (30, 10, 20)
    ]
    row = latency.row_of("a", {"first_ms": 900, "right": False}, warm)
    assert (row["cold_ms"], row["first_ms"], row["least_ms"], row["most_ms"]) == (900, 20, 10, 30)
    assert row["configs_measured"] == 7
    assert not row["right"]


def test_the_runner_finds_each_regime_on_several_weights(device):
    import random

    from kernels.cli.benchmark import discover_benchmark_classes

    classes = discover_benchmark_classes(ROOT / "benchmarks" / "benchmark.py", ROOT)
    found = {
        (cls.__name__, name.removeprefix("benchmark_"))
        for cls in classes
        for name in dir(cls)
        if name.startswith("benchmark_")
    }
    Ms = {(cls, name.split("_")[0]) for cls, name in found}
    assert Ms == {
        *(("Decode", f"m{M}") for M in (1, 16, 64)),
        ("Prefill", "m512"),
        ("Prefill", "m4096"),
    }
    assert len({name.partition("_")[2] for _, name in found}) >= 2
    by_name = {cls.__name__: cls for cls in classes}
    for cls, name in random.Random(0).sample(sorted(found), 2):
        workload = by_name[cls]()
        workload.kernel, workload.device = compare.gemm_kernel, str(device)
        getattr(workload, f"setup_{name}")()
        assert workload.out.isnan().all()
        getattr(workload, f"benchmark_{name}")()
        reference = getattr(workload, f"verify_{name}")()
        assert torch.allclose(workload.out, reference, atol=1e-2)
