"""`tune_gemm`: what it measures, chooses, skips, writes and refuses. No time decides a test."""

import collections
import contextlib
import itertools
import json
import math
import os
import stat
import types
from pathlib import Path

import kernels
import pytest
import torch

from .test_config import GOOD

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning

N, K = 32, 48
DTYPE = torch.float16


def entry(num_stages):
    return {**GOOD, "num_stages": num_stages}


def fixed_timer(*times_ms):
    """Gives these times in turn; the last one for ever."""
    times = itertools.chain(times_ms, itertools.repeat(times_ms[-1]))

    def timer(fn):
        fn()
        return next(times)

    return timer


CANDIDATES = (entry(2), entry(3))


def tune(save_dir, timer, Ms=(4,), candidates=CANDIDATES, **options):
    return gemm_kernel.tune_gemm(
        N, K, Ms, DTYPE, save_dir, candidates=list(candidates), timer=timer, **options
    )


def saved(path):
    return json.loads(path.read_text())


@pytest.mark.kernels_ci
def test_the_fastest_is_written_and_picked_up(device, tuned_dir):
    # default, entry(2), entry(3), then torch.mm
    path = tune(tuned_dir, fixed_timer(3.0, 2.0, 1.0, 9.0))
    assert path == tuned_dir / tuning.config_file_name(N, K, device)
    assert saved(path) == {"4": entry(3)}
    assert tuning.get_config(4, N, K, device) == entry(3)


@pytest.mark.kernels_ci
def test_the_device_s_own_timer_works(device, tuned_dir):
    candidates = [{**GOOD, "num_stages": stages} for stages in (2, 3)]
    path = gemm_kernel.tune_gemm(N=N, K=K, Ms=(1, 64), save_dir=tuned_dir, candidates=candidates)
    assert set(saved(path)) == {"1", "64"}
    # Entries of other Ms are candidates too, and any of these may start early.
    possible = [*candidates, *(tuning.default_config(M, N, K, device) for M in (1, 64))]
    tiles = [{key: config.get(key) for key in GOOD} for config in possible]
    assert all({key: config.get(key) for key in GOOD} in tiles for config in saved(path).values())


def test_the_default_is_always_a_candidate_and_wins_a_tie(device, tuned_dir):
    path = tune(tuned_dir, fixed_timer(1.0))
    assert saved(path) == {"4": tuning.default_config(4, N, K)}
    path = tune(tuned_dir, fixed_timer(1.0, 2.0))
    assert saved(path) == {"4": tuning.default_config(4, N, K)}


def test_a_second_run_keeps_the_other_ms_and_notes(device, tuned_dir):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    path.write_text(json.dumps({"1024": entry(5), "1": entry(4), "_comment": "kept"}))
    tune(tuned_dir, fixed_timer(9.0, 1.0, 2.0), Ms=(64,))
    assert list(saved(path)) == ["1", "64", "1024", "_comment"]
    assert saved(path)["64"] == entry(2)
    assert saved(path)["1024"] == entry(5)


def test_each_m_is_saved_before_the_next(device, tuned_dir):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    seen = []
    calls = fixed_timer(1.0)

    def stop(M, *_):
        if M == 8:
            seen.append(list(saved(path)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(tuned_dir, calls, Ms=(4, 8), on_progress=stop)
    assert seen == [["4"]]
    assert list(saved(path)) == ["4"]


def test_progress_and_results_are_reported(device, tuned_dir):
    progress, results = [], []
    tune(
        tuned_dir,
        fixed_timer(3.0, 2.0, 1.0, 9.0),
        on_progress=lambda *event: progress.append(event),
        on_result=results.append,
    )
    assert progress == [(4, 1, 3, 3.0), (4, 2, 3, 2.0), (4, 3, 3, 1.0)]
    (result,) = results
    assert (result.M, result.default_ms, result.tuned_ms, result.torch_ms) == (4, 3.0, 1.0, 9.0)
    assert (result.config, result.measured, result.skipped) == (entry(3), 3, {})
    assert result.noise is None


@pytest.mark.parametrize("time_ms", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_never_wins(device, tuned_dir, time_ms):
    results = []
    path = tune(tuned_dir, fixed_timer(3.0, time_ms, 2.0), on_result=results.append)
    assert saved(path) == {"4": entry(3)}
    assert sum(results[0].skipped.values()) == 1


# fmt: off
FAILURES = {
    "Triton's compiler": (RuntimeError("PassManager::run failed"), "failed with RuntimeError"),
    "out of memory": (torch.OutOfMemoryError("CUDA out of memory"), "failed with OutOfMemoryError"),
    "an internal error": (IndexError("map::at"), "failed with IndexError"),
}
# fmt: on


@pytest.mark.parametrize("name", FAILURES)
def test_a_candidate_that_fails_is_skipped_and_counted(device, tuned_dir, monkeypatch, name):
    # vllm-project/vllm PR 50711: one candidate breaks the compiler and hours are lost
    error, reason = FAILURES[name]
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def fail(a, b, out, config):
        if config == entry(2):
            raise error
        return launch(a, b, out, config)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", fail)
    results = []
    path = tune(tuned_dir, fixed_timer(3.0, 2.0), on_result=results.append)
    assert saved(path) == {"4": entry(3)}
    assert results[0].skipped == {reason: 1}


def test_a_candidate_out_of_range_is_skipped_and_counted(device, tuned_dir):
    results = []
    bad = [{**GOOD, "BLOCK_SIZE_M": 48}, {**GOOD, "num_warps": 64}, {"BLOCK_SIZE_M": 16}]
    path = tune(tuned_dir, fixed_timer(3.0), candidates=bad, on_result=results.append)
    assert saved(path) == {"4": tuning.default_config(4, N, K)}
    assert results[0].skipped == {"does not fit": 3}


@pytest.mark.parametrize(
    "fault", ["writes nothing", "writes half", "wrong by one part in 100", "NaN"]
)
def test_a_wrong_candidate_is_never_chosen(device, tuned_dir, monkeypatch, fault):
    # triton-lang/triton 9230: an earlier candidate's result covers for one that writes half
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def wrong(a, b, out, config):
        if config != entry(2):
            return launch(a, b, out, config)
        if fault == "writes half":
            half = out.shape[1] // 2
            return launch(a, b[:, :half], out[:, :half], config)
        if fault == "wrong by one part in 100":
            return launch(a, b, out, config).mul_(1.01)
        return out.fill_(torch.nan) if fault == "NaN" else out

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", wrong)
    results = []
    path = tune(
        tuned_dir, fixed_timer(3.0, 1.0), candidates=[entry(2)], on_result=results.append, Ms=(20,)
    )
    assert saved(path) == {"20": tuning.default_config(20, N, K)}
    assert results[0].skipped == {"wrong result": 1}


@pytest.mark.parametrize("M", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("at", [(0, 0), (-1, -1), (0, -1)])
def test_one_wrong_element_in_the_first_or_last_row_is_seen(device, M, at):
    a, b = (
        torch.randn(M, K, dtype=DTYPE, device=device),
        torch.randn(K, N, dtype=DTYPE, device=device),
    )
    out = (a.double() @ b.double()).to(DTYPE)
    assert gemm_kernel.measure.is_exact_in_part(out, a, b)
    out[at] += 1
    assert not gemm_kernel.measure.is_exact_in_part(out, a, b)


def test_the_gpu_is_busy_while_the_host_queues_what_is_timed(monkeypatch):
    queued = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            queued.append(self)

        def synchronize(self):
            assert queued[-1] is self

        def elapsed_time(self, ended):
            return queued.index(ended) - queued.index(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", queued.append)
    for cycles, rest_ms in ((1_000_000, ()), (6_000_000, (3.0,))):
        queued.clear()
        assert gemm_kernel.measure.elapsed_ms(lambda: queued.append("timed"), *rest_ms) == 2
        assert queued[0] == cycles
        assert queued[2] == "timed"


class Graph:
    """A CUDA graph of which only the calls count."""

    def capture_begin(self):
        pass

    capture_end = replay = capture_begin


@pytest.mark.parametrize(
    ("call_ms", "rests", "calls", "rest_ms"),
    [(0.15, True, 4, 0.6), (0.02, True, 26, 0.52), (3.0, True, 1, 3.0), (0.15, False, 14, 0.2)],
)
def test_a_graph_has_as_many_calls_as_its_replay_wants(monkeypatch, call_ms, rests, calls, rest_ms):
    measure = gemm_kernel.measure
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(measure, "_side_stream", lambda index: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    for name in ("current_device", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    asked, called = [], []
    elapsed = lambda fn, rest_ms=None: asked.append(rest_ms) or call_ms  # noqa: E731
    monkeypatch.setattr(measure, "elapsed_ms", elapsed)
    graph = measure.GraphedCalls(measure.Rotation(called.append, ["a", "b"]), rests)
    # One to estimate with is before them.
    assert len(called) == 1 + calls
    assert graph.time_ms() == call_ms / calls
    assert asked == [None, pytest.approx(rest_ms)]


@pytest.mark.gpu
def test_the_gpu_rests_as_long_as_a_replay_takes(device, monkeypatch):
    measure = gemm_kernel.measure
    weights = [torch.ones(4096, 4096, dtype=DTYPE, device=device)] * 2
    product = lambda b: [torch.mm(b, b) for _ in range(20)]  # noqa: E731
    graphs = [
        measure.GraphedCalls(measure.Rotation(product, weights), rests) for rests in (True, False)
    ]
    asked = []
    elapsed_ms = measure.elapsed_ms
    monkeypatch.setattr(
        measure, "elapsed_ms", lambda fn, rest_ms: asked.append(rest_ms) or elapsed_ms(fn, rest_ms)
    )
    replay_ms, sustained_ms = [graph.time_ms() * graph._calls for graph in graphs]
    assert replay_ms > 2 * measure._REST_MS, "says nothing"
    assert 0.7 < asked[0] / replay_ms < 1.4
    assert asked[1] == measure._SUSTAINED_REST_MS < sustained_ms / 5


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_all_have_a_time_of_each_round_and_come_after_each_other_as_often(count):
    turns, told = [], []

    class Call:
        def __init__(self, number):
            self.number = number

        def time_ms(self):
            turns.append(self.number)
            return 100.0 * self.number + (len(turns) - 1) // count

    rounds = 2 * count
    calls = [Call(number) for number in range(count)]
    times = gemm_kernel.measure.interleaved_ms(calls, rounds, told.append)
    assert times == [[100.0 * number + round for round in range(rounds)] for number in range(count)]
    assert told == turns
    after = collections.Counter()
    for first in range(0, len(turns), count):
        order = turns[first : first + count]
        assert sorted(order) == list(range(count))
        after.update(zip(order, order[1:]))
    assert set(after.values()) <= {2}
    assert len(after) == count * (count - 1)


def test_if_nothing_runs_there_is_an_error_and_no_file(device, tuned_dir, monkeypatch):
    def fail(a, b, out, config):
        raise RuntimeError("no")

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", fail)
    with pytest.raises(RuntimeError, match="None of 3 candidates runs for M=4, N=32, K=48"):
        tune(tuned_dir, fixed_timer(1.0))
    assert list(tuned_dir.iterdir()) == []


def test_if_nothing_runs_there_is_an_error_without_a_timer_too(device):
    bench = gemm_kernel.bench.Bench(tuning.Problem(N, K, "NN", "float16"), device)
    with pytest.raises(RuntimeError, match="None of 1 candidates runs .* 1 does not fit"):
        tuning.search.search(4, N, K, bench, [{**GOOD, "num_warps": 3}], GOOD)


def test_an_impossible_m_does_not_cost_the_others(device, tuned_dir, monkeypatch, caplog):
    # pytorch/helion PR 2130: running out of memory for one size aborts all tuning
    search = tuning.search.search

    def limited(M, *rest):
        if M > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")
        return search(M, *rest)

    monkeypatch.setattr(tuning.search, "search", limited)
    path = tune(tuned_dir, fixed_timer(1.0), Ms=(2**31, 4))
    assert list(saved(path)) == ["4"]
    assert "M=2147483648 was not tuned" in caplog.text


def test_the_layout_decides_the_file_and_the_operand(device, tuned_dir, monkeypatch):
    launch = gemm_kernel.kernels.launch_gemm_kernel
    strides = []

    def spy(a, b, out, config):
        strides.append(b.stride())
        return launch(a, b, out, config)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
    path = tune(tuned_dir, fixed_timer(1.0), layout="NT")
    assert path.name.endswith(",layout=NT.json")
    assert set(strides) == {(1, K)}


def test_the_default_folder_is_the_user_s_cache(device, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tune(None, fixed_timer(2.0, 1.0))
    try:
        assert path.parent == tmp_path / "gemm-triton-autotune" / "configs"
        assert tuning.get_config(4, N, K, device) == entry(2)
    finally:
        tuning._load_tuned_configs.cache_clear()


def test_a_file_that_hides_the_new_one_is_named(device, tuned_dir, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hiding = tune(tuned_dir, fixed_timer(1.0))
    caplog.clear()
    path = tune(None, fixed_timer(1.0))
    assert f"{hiding} is searched before {path}" in caplog.text
    caplog.clear()
    tune(tmp_path / "elsewhere", fixed_timer(1.0))
    assert str(hiding) in caplog.text


# fmt: off
BAD_ARGUMENTS = {
    "N of zero": {"N": 0}, "negative K": {"K": -1}, "a fraction": {"N": 2.5}, "text": {"K": "64"}, "a flag": {"N": True},
    "M of zero": {"Ms": (1, 0)}, "no M": {"Ms": ()}, "layout": {"layout": "TN"}, "dtype": {"dtype": torch.float32},
}
# fmt: on


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_anything(device, tmp_path, name):
    arguments = {"N": N, "K": K, "Ms": (1,), "dtype": DTYPE, "save_dir": tmp_path / "new"}
    with pytest.raises(ValueError, match="must be|expects"):
        gemm_kernel.tune_gemm(**{**arguments, **BAD_ARGUMENTS[name]}, timer=fixed_timer(1.0))
    assert not (tmp_path / "new").exists()


def test_a_path_as_text_is_taken(device, tmp_path):
    assert tune(str(tmp_path), fixed_timer(1.0)).parent == tmp_path


def test_a_folder_that_cannot_be_written_is_named(device, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write tuned files here .*pass another save_dir"):
        tune(tmp_path / "file", fixed_timer(1.0))
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(PermissionError, match="pass another save_dir"):
            tune(tmp_path / "closed", fixed_timer(1.0))


def test_a_file_that_is_no_tuned_file_is_kept(device, tuned_dir):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    path.write_text('{"1": {"BLOCK_')
    with pytest.raises(ValueError, match="is not a tuned file"):
        tune(tuned_dir, fixed_timer(1.0))
    assert path.read_text() == '{"1": {"BLOCK_'


def test_a_failing_write_leaves_the_old_file(device, tuned_dir, monkeypatch):
    path = tune(tuned_dir, fixed_timer(1.0))
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tune(tuned_dir, fixed_timer(1.0), Ms=(8,))
    assert path.read_bytes() == before
    assert list(tuned_dir.iterdir()) == [path]


def test_a_link_is_written_through(device, tuned_dir, tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    link = tuned_dir / tuning.config_file_name(N, K, device)
    link.symlink_to(real / "target.json")
    path = tune(tuned_dir, fixed_timer(1.0))
    assert path == link
    assert link.is_symlink()
    assert list(saved(real / "target.json")) == ["4"]


def test_what_a_dead_writer_left_is_removed(device, tuned_dir):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    (tuned_dir / f".{path.name}.1234.tmp").write_text("{")
    tune(tuned_dir, fixed_timer(1.0))
    assert [Path(name).name for name in tuned_dir.iterdir()] == [path.name]
