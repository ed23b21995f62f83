"""What `tune.py` does besides tuning one weight: many of them, again, by several ranks, and what it shows."""

import importlib.util
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import kernels
import pytest
import torch

from tools import jobs, lint, ranks, report, shapes

from .test_config import GOOD

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ["--n", "32", "--k", "32", "--layout", "nt", "--dtype", "float16"]
LOCAL = f"kernels-test/gemm-triton-autotune={ROOT}"


@pytest.fixture
def command(monkeypatch):
    """`tune.py` in this process, with three candidates; it takes a time from the clock, and none decides a test."""
    specification = importlib.util.spec_from_file_location("tune", ROOT / "tune.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    few = [{**GOOD, "num_stages": stages} for stages in (2, 3)]
    monkeypatch.setattr(gemm_kernel.tuner, "default_candidates", lambda *_: lambda M: few)
    return module


def measured_ms(output):
    """The Ms of the lines that stand for a bar where there is no terminal."""
    lines = [line for line in output.splitlines() if line.startswith("[")]
    return [int(line.partition(" M=")[2].partition(":")[0]) for line in lines]


def test_a_second_run_measures_only_what_is_new_unless_forced(command, tmp_path, capsys):
    options = [*SHAPE, "--save-dir", str(tmp_path)]
    assert command.main([*options, "--m", "1", "16"]) == 0
    first = capsys.readouterr()
    assert measured_ms(first.err) == [1, 16]
    assert "[2/2]" in first.err
    assert command.main([*options, "--m", "1", "16", "40"]) == 0
    second = capsys.readouterr()
    assert measured_ms(second.err) == [40]
    assert [line.split()[1] for line in second.out.splitlines() if line.startswith("| ")][1:] == [
        "1", "16", "40",
    ]  # fmt: skip
    assert command.main([*options, "--m", "1"]) == 0
    assert "was measured before; --force" in capsys.readouterr().out
    assert command.main([*options, "--m", "1", "--force"]) == 0
    assert measured_ms(capsys.readouterr().err) == [1]


def test_an_interrupt_keeps_what_is_finished_and_the_same_command_goes_on(
    command, tmp_path, capsys, monkeypatch
):
    options = [*SHAPE, "--save-dir", str(tmp_path), "--m", "1", "16", "40"]
    search = gemm_kernel.tuning.search.search

    def interrupted(M, *rest):
        if M == 16:
            raise KeyboardInterrupt
        return search(M, *rest)

    monkeypatch.setattr(gemm_kernel.tuning.search, "search", interrupted)
    assert command.main(options) == 130
    assert "the 1 finished M are saved, and the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(gemm_kernel.tuning.search, "search", search)
    assert command.main(options) == 0
    assert measured_ms(capsys.readouterr().err) == [16, 40]


def test_an_m_that_fails_is_named_and_decides_the_status(command, tmp_path, capsys, monkeypatch):
    search = gemm_kernel.tuning.search.search

    def limited(M, *rest):
        if M == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return search(M, *rest)

    monkeypatch.setattr(gemm_kernel.tuning.search, "search", limited)
    assert command.main([*SHAPE, "--save-dir", str(tmp_path), "--m", "1", "16"]) == 1
    output = capsys.readouterr()
    assert "M=16 was not tuned: CUDA out of memory" in output.err
    assert "wrote" in output.out
    # Nothing of this weight was finished, so nothing was written.
    assert command.main([*SHAPE, "--save-dir", str(tmp_path / "new"), "--m", "16"]) == 1
    assert "wrote" not in capsys.readouterr().out


def test_a_folder_that_no_call_searches_is_named(command, tmp_path, capsys, monkeypatch):
    options = [*SHAPE, "--save-dir", str(tmp_path), "--m"]
    assert command.main([*options, "1"]) == 0
    assert f"no call searches {tmp_path}" in capsys.readouterr().out
    monkeypatch.setenv("GEMM_TUNED_CONFIG_DIR", str(tmp_path))
    assert command.main([*options, "16"]) == 0
    assert "no call searches" not in capsys.readouterr().out


def _candidates_measured(text):
    return int(re.search(r"(\d+) candidates measured", text)[1])


def test_recheck_ranks_what_was_best_and_nothing_else(command, tmp_path, capsys, monkeypatch):
    options = ["--save-dir", str(tmp_path)]
    assert command.main([*SHAPE, *options, "--m", "1", "16"]) == 0
    first = _candidates_measured(capsys.readouterr().out)
    (path,) = (tmp_path / "measurements").iterdir()
    before = gemm_kernel.measurements.read_measurements(path)
    monkeypatch.setattr(
        gemm_kernel.tuner, "default_candidates", lambda *_: pytest.fail("asked for candidates")
    )
    assert command.main(["--recheck", *options]) == 0
    output = capsys.readouterr()
    assert measured_ms(output.err) == [1, 16]
    stored = sum(len(found.top) for found in before.values())
    assert stored <= _candidates_measured(output.out) <= first
    after = gemm_kernel.measurements.read_measurements(path)
    assert [found.space for found in after.values()] == [found.space for found in before.values()]
    assert command.main(["--recheck", *options, "--m", "16"]) == 0
    assert measured_ms(capsys.readouterr().err) == [16]
    assert command.main(["--recheck", *options, "--m", "40"]) == 0
    assert "has no measurements of these M" in capsys.readouterr().out


def test_shapes_of_a_file_are_tuned_and_listed(command, tmp_path, capsys):
    file = tmp_path / "shapes.txt"
    # As some editors on Windows save it, with a mark before the first line.
    file.write_text("\ufeff32 48 qkv\n# a comment: µ\n\n48x32\n32 48\n", "utf-8")
    options = ["--shapes", str(file), "--layout", "nn", "--save-dir", str(tmp_path / "out")]
    assert command.main([*options, "--list"]) == 0
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()[2:]] == ["no"] * 3
    json_file = tmp_path / "results.json"
    assert command.main([*options, "--m", "4", "--json", str(json_file)]) == 0
    assert len(list((tmp_path / "out").glob("*.json"))) == 2
    results = json.loads(json_file.read_text())["results"]
    assert [(row["N"], row["K"], row["M"]) for row in results] == [(32, 48, 4), (48, 32, 4)]
    assert all(row["tuned_us"] > 0 and row["config"] for row in results)
    capsys.readouterr()
    assert command.main([*options, "--list"]) == 0
    assert capsys.readouterr().out.count("1 M from 4 to 4") == 3


# fmt: off
BAD = {
    "no weight": ([], "expects a weight: --n and --k, --shapes or --model"),
    "nothing to recheck": (["--recheck", "--save-dir", "/nowhere"], "no measurements of this device"),
    "no such file": (["--shapes", "/nowhere"], "No such file"),
    "two modes": ([*SHAPE, "--recheck", "--exhaustive"], "not allowed with"),
    "no model": ([*SHAPE, "--tp", "2"], "--tp is for --model"),
    "forced recheck": (["--recheck", "--force"], "drop --force"),
    "list into a file": ([*SHAPE, "--list", "--json", "x.json"], "--json is for what is measured"),
    "check into a plot": (["--check", "--plot", "x.png"], "--plot is for what is measured"),
    "no such folder": ([*SHAPE, "--json", "/nowhere/x.json"], "a folder that exists"),
    "a folder for a file": ([*SHAPE, "--json", "/tmp"], "expects a file, got the folder /tmp"),
    "a folder for a plot": ([*SHAPE, "--plot", "/tmp"], "expects a file, got the folder /tmp"),
    "no such path": (["--model", "/nowhere"], "there is no /nowhere"),
}
# fmt: on


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_line_and_status_2(command, capsys, name):
    arguments, message = BAD[name]
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("text", ["32", "32 0", "a b", "32 -4", "32 48.5", "# only a comment"])
def test_a_line_that_is_no_shape_is_named(tmp_path, text):
    file = tmp_path / "shapes.txt"
    file.write_text(f"{text}\n")
    with pytest.raises(ValueError, match="expects N and K"):
        shapes.read_shapes(file)


class Attention(torch.nn.Module):
    def __init__(self, hidden, heads, kv_heads, head_dim):
        super().__init__()
        self.q_proj = torch.nn.Linear(hidden, heads * head_dim)
        self.k_proj = torch.nn.Linear(hidden, kv_heads * head_dim)
        self.v_proj = torch.nn.Linear(hidden, kv_heads * head_dim)
        self.o_proj = torch.nn.Linear(heads * head_dim, hidden)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention(512, 8, 2, 64)
        self.gate_proj = torch.nn.Linear(512, 1536)
        self.up_proj = torch.nn.Linear(512, 1536)
        self.down_proj = torch.nn.Linear(1536, 512)
        self.router = torch.nn.Linear(512, 8)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.lm_head = torch.nn.Linear(512, 1000)


class Config:
    num_key_value_heads = 2


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        (1, [(1000, 512), (512, 1536), (8, 512), (768, 512), (512, 512), (3072, 512)]),
        # 2 heads of keys on 4 GPUs: each has one; the vocabulary is padded to 1024
        (4, [(256, 512), (512, 384), (8, 512), (256, 512), (512, 128), (768, 512)]),
    ],
)
def test_a_model_s_layers_are_fused_and_split_as_they_are_served(tp, expected):
    with torch.device("meta"):
        model = Model()
    layers = list(shapes.layers_of(model, Config, tp))
    assert {(layer.N, layer.K) for layer in layers} == set(expected)
    assert len(layers) == 1 + 3 * 5
    assert all(layer.layout == "NT" for layer in layers)
    names = {layer.name.partition(",")[0] for layer in layers}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "router", "lm_head"}


def test_layers_of_one_shape_are_one_weight():
    with torch.device("meta"):
        model = Model()
    layers = shapes.merged(shapes.layers_of(model, Config))
    assert shapes.Layer("qkv_proj", 768, 512, "NT", 3) in layers
    assert sum(layer.count for layer in layers) == 16


def test_a_size_that_cannot_be_split_is_named():
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ValueError, match="cannot be split over 3 GPUs"):
        list(shapes.layers_of(model, Config, 3))


def test_models_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "vocab_size": 32000}
    llama = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        **small,
    )
    qwen = transformers.Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, **small,
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(n_layer=2)
    found = {}
    for config in (llama, qwen, gpt2):
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        layers = shapes.model_layers(str(folder), (1, 8))
        found[config.model_type] = {(layer.N, layer.K, layer.layout) for layer in layers}
        # A file is what is asked for, whatever it is called and whatever lies beside it.
        other = (folder / "config.json").rename(tmp_path / f"{config.model_type}.json")
        (tmp_path / "config.json").write_text("{}")
        assert shapes.model_layers(str(other), (1, 8)) == layers
    # the shapes of vLLM's and SGLang's products
    assert found["llama"] == {
        (32000, 4096, "NT"), (6144, 4096, "NT"), (4096, 4096, "NT"), (28672, 4096, "NT"), (4096, 14336, "NT"),
        (4000, 4096, "NT"), (768, 4096, "NT"), (4096, 512, "NT"), (3584, 4096, "NT"), (4096, 1792, "NT"),
    }  # fmt: skip
    assert {
        (10240, 5120, "NT"),
        (51200, 5120, "NT"),
        (1280, 5120, "NT"),
        (5120, 3200, "NT"),
    } <= found["qwen3"]
    # a Conv1D has its weight as (K, N)
    assert {(2304, 768, "NN"), (768, 3072, "NN"), (50257, 768, "NT")} <= found["gpt2"]


FULL = {str(M): GOOD for M in (1, 16, 64, 256, 1024, 4096)}
H200, L4 = "N=64,K=64,device_name=NVIDIA_H200.json", "N=64,K=64,device_name=NVIDIA_L4.json"
WIDE = {
    **GOOD,
    "BLOCK_SIZE_M": 128,
    "BLOCK_SIZE_N": 256,
    "BLOCK_SIZE_K": 64,
    "num_stages": 4,
    "num_warps": 8,
}
# fmt: off
FINDINGS = {
    "nothing": ({H200: FULL}, None),
    "a name": ({"N=64,K=064,device_name=NVIDIA_H200.json": FULL}, "no look-up asks for this name"),
    "a name with a suffix": ({"N=64,K=64,device_name=NVIDIA_H200,layout=TN.json": FULL}, "no look-up asks"),
    "the interpreter": ({"N=64,K=64,device_name=CPU.json": FULL}, "from the interpreter"),
    "cut text": ({H200: '{"1": {"BLOCK_'}, H200),
    "no entry": ({H200: {"_comment": "x"}}, "no entry for any M"),
    "a key": ({H200: {**FULL, "0016": GOOD}}, "M=0016: M must be a positive number"),
    "an entry": ({H200: {**FULL, "8192": {**GOOD, "num_warps": 3}}}, "M=8192: num_warps must be a power of two"),
    "a key of another family": ({H200: {**FULL, "8192": {**GOOD, "num_ctas": 1}}}, "num_ctas is not a key"),
    "order": ({H200: dict(reversed(FULL.items()))}, "not in order"),
    "cut at the top": ({H200: {M: FULL[M] for M in ("1", "16")}}, "largest M is 16"),
    "cut at the bottom": ({H200: {M: FULL[M] for M in ("64", "1024")}}, "smallest M is 64"),
    "sparse": ({H200: {M: FULL[M] for M in ("1", "1024")}}, "nothing between M=1 and M=1024"),
    "shared memory": ({L4: {**FULL, "1024": WIDE}}, "M=1024: needs 147456 bytes of shared memory"),
    "the same where it fits": ({H200: {**FULL, "1024": WIDE}}, None),
    "a copy": ({H200: FULL, L4: FULL}, "is a copy of N=64,K=64,device_name=NVIDIA_H200.json"),
}
# fmt: on


@pytest.mark.parametrize("name", FINDINGS)
def test_the_linter_finds(tmp_path, name):
    files, message = FINDINGS[name]
    for file, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / file).write_text(text)
    findings = lint.check_files(gemm_kernel, sorted(tmp_path.iterdir()))
    assert len(findings) == (message is not None), findings
    assert message is None or message in findings[0]


# fmt: off
CAPABILITIES = {
    "NVIDIA_GeForce_RTX_5090": (12, 0), "NVIDIA_GeForce_RTX_5070_Ti": (12, 0),
    "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition": (12, 0), "NVIDIA_B200": (10, 0), "NVIDIA_B300_SXM6_AC": (10, 3),
    "NVIDIA_H200": (9, 0), "NVIDIA_H100_80GB_HBM3": (9, 0), "NVIDIA_GH200_480GB": (9, 0),
    "NVIDIA_L4": (8, 9), "NVIDIA_L40S": (8, 9), "NVIDIA_GeForce_RTX_4090": (8, 9), "NVIDIA_GeForce_RTX_4060_Ti": (8, 9),
    "NVIDIA_RTX_6000_Ada_Generation": (8, 9), "NVIDIA_RTX_5000_Ada_Generation": (8, 9),
    "NVIDIA_RTX_5000_Ada_Generation_Laptop_GPU": (8, 9), "NVIDIA_RTX_4000_SFF_Ada_Generation": (8, 9),
    "NVIDIA_RTX_2000_Ada_Generation": (8, 9), "NVIDIA_A100-SXM4-80GB": (8, 0), "NVIDIA_A30": (8, 0),
    "NVIDIA_A10G": (8, 6), "NVIDIA_GeForce_RTX_3090": (8, 6), "NVIDIA_RTX_A6000": (8, 6),
    "Tesla_T4": (7, 5), "NVIDIA_GeForce_RTX_2080_Ti": (7, 5), "Quadro_RTX_8000": (7, 5), "Quadro_RTX_5000": (7, 5),
    "Quadro_RTX_4000": (7, 5), "Quadro_RTX_3000": (7, 5), "NVIDIA_TITAN_RTX": (7, 5), "Tesla_V100-SXM2-16GB": (7, 0),
}
# fmt: on


def test_the_linter_knows_gpus_by_their_names():
    for name, capability in CAPABILITIES.items():
        assert lint._properties(gemm_kernel, name, ()).capability == capability, name
    for name in ("Some_GPU", "NVIDIA_GB10", "AMD_Instinct_MI300X"):
        assert lint._properties(gemm_kernel, name, ()) is None, name


def test_the_linter_reads_measurements(tmp_path):
    record = gemm_kernel.measurements.Measurement(
        {"device": {"backend": "cuda", "capability": [8, 0], "shared_memory": 100_000}},
        "float16", "", 10.0, 10.03, 11.0, 0.001, ((10.0, GOOD),),
    )  # fmt: skip
    folder = tmp_path / "configs"
    folder.mkdir()
    path = folder / "N=64,K=64,device_name=Some_GPU.json"
    path.write_text(json.dumps({**FULL, "1024": WIDE}))
    gemm_kernel.measurements.save_measurements(
        tmp_path / "measurements" / path.name,
        {
            16: record,
            64: record._replace(default_us=20.0),
            # Any gain is one where torch.mm is faster than the default.
            1: record._replace(torch_us=9.0),
            256: record._replace(top=((1.0, WIDE),)),
        },
    )
    first, second = lint.check_files(gemm_kernel, [path])
    assert (
        "M=16: is measured as no faster than the default (10.0 µs, the default 10.03 µs)" in first
    )
    assert "M=1024: needs 147456 bytes of shared memory, the device has 100000" in second


def test_what_ships_has_nothing_to_object_to(command, capsys):
    assert command.main(["--check"]) == 0
    files = capsys.readouterr().out
    assert "nothing to object to" in files
    assert command.main(["--check", str(command.CONFIGS_DIR)]) == 0
    assert capsys.readouterr().out == files
    assert command.main(["--check", str(ROOT / "nowhere.json")]) == 1
    assert capsys.readouterr().out.count("nowhere.json") == 1


def rows():
    timed = itertools.product((32, 64, 96, 128, 160), (1, 16, 256))
    return [
        report.Row(N, 48, "NT", M, 3.0 * M, 1.5 * M, None if M == 1 else 2.0 * M, GOOD)
        for N, M in timed
    ]


def test_one_table_says_the_weight_only_where_there_are_several():
    table = report.results_table(rows()).splitlines()
    assert table[0].split("|")[1:-1] == [
        f" {name} ".ljust(len(cell)) for name, cell in zip(
            ["N", "K", "layout", "M", "default µs", "tuned µs", "torch µs", "gain", "family", "configuration"],
            table[0].split("|")[1:-1],
        )
    ]  # fmt: skip
    assert [cell.strip() for cell in table[3].split("|")[4:10]] == [
        "16", "48.0", "24.0", "32.0", "2.00", "tiled",
    ]  # fmt: skip
    assert report.results_table(rows()[:3]).splitlines()[0].split("|")[1].strip() == "M"


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "plot.png", "Some GPU", rows())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_unknown_type_is_refused_before_anything_is_measured(command, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        command.main([*SHAPE, "--plot", "x.foo"])
    assert "expects a file of type" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "option"), [("matplotlib", "--plot"), ("transformers", "--model")]
)
def test_what_is_not_installed_is_named_before_anything_is_measured(
    command, tmp_path, capsys, monkeypatch, module, option
):
    monkeypatch.setitem(sys.modules, module, None)
    weight = SHAPE if option == "--plot" else []
    with pytest.raises(SystemExit):
        command.main([*weight, option, str(tmp_path / "x"), "--save-dir", str(tmp_path / "new")])
    assert f"{option} needs {module}; run `pip install {module}`" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def start_rank(rank, size, port, options, hooks):
    """A process that is this rank of a run, as torchrun starts it, with ``hooks`` put in."""
    script = f"""
import os, kernels, tune
from tools import ranks
kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
few = [{{**{GOOD!r}, "num_stages": stages}} for stages in (2, 3)]
kernel.tuner.default_candidates = lambda *_: lambda M: few
{hooks}
raise SystemExit(tune.main({options!r}))
"""
    environment = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % max(1, torch.cuda.device_count()),
        "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_KERNELS": LOCAL,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Does the longest weight and the first M of the next, writes no file, and dies.
DYING = """
kernel.tuning.TuningTarget.save = kernel.tuning.tuning_target = None
send, sent = ranks.Ranks.send, []
def send_and_die(self, result):
    send(self, result)
    sent.append("M" in result)
    if sum(sent) == 3:
        self._store.set("dead", "1")
        os._exit(9)
ranks.Ranks.send = send_and_die
"""
# Takes no weight before that has happened.
WAITING = """
ranks.DEAD_AFTER_S = 1.5
claim = ranks.Ranks.claim
def claim_late(self, count):
    self._store.get("dead")
    yield from claim(self, count)
ranks.Ranks.claim = claim_late
"""


def test_ranks_share_the_weights_and_one_that_dies_costs_what_it_was_at(command, tmp_path, capsys):
    # vllm-project/vllm issue 36840: each rank writes the file, and the last one wins
    file = tmp_path / "shapes.txt"
    file.write_text("".join(f"{N} 32\n" for N in (32, 48, 64, 80)))
    options = ["--shapes", str(file), "--layout", "nt", "--m", "4", "16", "--dtype", "float16"]
    options += ["--save-dir", str(tmp_path / "out")]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes = [
        start_rank(*each) for each in ((0, 2, port, options, WAITING), (1, 2, port, options, DYING))
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [1, 9], outputs
    assert "rank 1 died" in outputs[0][1]
    assert outputs[1][0] == ""
    found = {}
    for path in (tmp_path / "out").glob("*.json"):
        measurements = tmp_path / "out" / "measurements" / path.name
        found[path.name.partition(",")[0]] = list(json.loads(path.read_text()))
        assert len(gemm_kernel.measurements.read_measurements(measurements)) == len(
            json.loads(path.read_text())
        )
    assert found == {"N=80": ["4", "16"], "N=64": ["4"], "N=48": ["4", "16"], "N=32": ["4", "16"]}
    # and the same command goes on
    assert command.main(options) == 0
    assert measured_ms(capsys.readouterr().err) == [16]


def test_if_results_cannot_be_written_no_rank_begins_another_weight(monkeypatch):
    store = torch.distributed.HashStore()
    both = []
    for rank in range(2):
        monkeypatch.setattr(
            torch.distributed, "rendezvous", lambda url, rank=rank: iter([(store, rank, 2)])
        )
        both.append(ranks.Ranks())
    zero, one = both
    assert [next(zero.claim(9)), next(one.claim(9)), next(one.claim(9))] == [0, 1, 2]

    class Recorder:
        error = None

        def take(self, result):
            raise OSError(28, "No space left on device")

    recorder = Recorder()
    one.send({"job": 1})
    jobs._receive(zero, recorder, [])
    assert recorder.error.errno == 28
    assert list(zero.claim(9)) == list(one.claim(9)) == []
    for rank in both:
        rank.end()


@pytest.mark.two_gpus
def test_torchrun_tunes_on_two_gpus(tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text("512 512\n1024 512\n")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--",
    ]
    options = ["--shapes", str(file), "--m", "1", "64", "--save-dir", str(tmp_path)]
    result = subprocess.run(
        [*command, str(ROOT / "tune.py"), *options],
        env={**os.environ, "LOCAL_KERNELS": LOCAL},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    files = list(tmp_path.glob("*.json"))
    assert [set(json.loads(path.read_text())) for path in files] == [{"1", "64"}] * 4


def test_without_torchrun_nothing_is_shared(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not ranks.is_distributed()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not ranks.is_distributed()
