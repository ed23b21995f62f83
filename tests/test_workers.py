"""The processes of a tuning run as their users see them; the processes are faked."""

import os
import threading
from concurrent.futures import CancelledError

import kernels
import pytest
import torch

from .test_config import GOOD

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
workers, worker, bench = gemm_kernel.workers, gemm_kernel.worker, gemm_kernel.bench

PROBLEM = gemm_kernel.tuning.Problem(32, 48, "NT", "float16")
OPEN = ("open", *PROBLEM)


class FakeWorker:
    """Notes what it is called with; a method that is given errors raises them, one a call."""

    def __init__(self, **errors):
        self.errors = {method: list(own) for method, own in errors.items()}
        self.starts, self.running, self.calls = 0, False, []

    def is_running(self):
        return self.running

    def start(self):
        self.starts += 1
        self.running = True

    def close(self):
        self.running = False

    def call(self, method, *arguments, limit_s):
        assert self.running
        self.calls.append((method, *arguments))
        if self.errors.get(method):
            raise self.errors[method].pop(0)
        return 1.0


def remote_bench(**errors):
    process = FakeWorker(**errors)
    return workers.RemoteBench(process, PROBLEM, has_rounds=True), process


def test_a_bench_is_set_up_once_for_an_m():
    remote, process = remote_bench()
    for M in (4, 16):
        remote.set_rows(M)
        for _ in range(2):
            assert remote.quick_ms(GOOD) == 1.0
    timed = ("quick_ms", GOOD)
    assert process.calls == [OPEN, ("set_rows", 4), timed, timed, ("set_rows", 16), timed, timed]


def test_a_bench_whose_process_was_lost_is_set_up_again():
    lost = worker.Lost(worker.TOO_LONG)
    remote, process = remote_bench(quick_ms=[lost])
    remote.set_rows(4)
    with pytest.raises(worker.Lost):
        remote.quick_ms(GOOD)
    process.close()
    process.calls.clear()
    remote.quick_ms(GOOD)
    assert process.calls == [OPEN, ("set_rows", 4), ("quick_ms", GOOD)]


def test_a_wrong_result_is_believed_when_it_comes_again_with_new_operands():
    wrong = bench.Skip(bench.WRONG)
    remote, process = remote_bench(verify=[wrong])
    remote.set_rows(4)
    remote.verify(GOOD)
    assert process.calls == [OPEN, ("set_rows", 4), ("verify", GOOD)] * 2
    remote, process = remote_bench(verify=[wrong, wrong])
    remote.set_rows(4)
    with pytest.raises(bench.Skip, match="wrong result"):
        remote.verify(GOOD)
    remote, process = remote_bench(verify=[bench.Skip("does not fit")])
    remote.set_rows(4)
    with pytest.raises(bench.Skip, match="does not fit"):
        remote.verify(GOOD)


@pytest.mark.parametrize("step", ["open", "set_rows"])
def test_operands_that_cannot_be_made_are_no_fault_of_a_candidate(step):
    remote, _ = remote_bench(**{step: [worker.Lost("ended its process", "signal 9")]})
    with pytest.raises(RuntimeError, match="operands cannot be made: .* ended its process"):
        remote.set_rows(4)


@pytest.fixture
def compiling(monkeypatch):
    """Workers with one process that compiles, which waits until it is let go."""
    process, go = FakeWorker(), threading.Event()
    process.start()
    compiled, started = [], threading.Event()

    def call(method, problem, M, config, limit_s):
        started.set()
        assert go.wait(10)
        compiled.append((M, config["num_stages"]))

    process.call = call
    made = []
    monkeypatch.setattr(workers, "Worker", lambda *_, **options: made.append(options) or process)
    monkeypatch.setattr(workers, "_compiler_count", lambda: 1)
    monkeypatch.setattr(workers, "current_target", lambda: ("cuda", 90, 32))
    with workers.Workers(torch.device("cpu")) as running:
        running.go, running.started, running.compiled, running.made = go, started, compiled, made
        yield running
        go.set()


def compile_all(running, M, stages, priority):
    configs = [{**GOOD, "num_stages": count} for count in stages]
    return running.compile(PROBLEM, M, configs, priority)


def test_what_is_measured_next_is_compiled_first(compiling):
    futures = compile_all(compiling, 1, [1], 9)
    assert compiling.started.wait(10)
    for M, priority in ((16, 2), (4, 1), (8, 1), (2, 0)):
        futures += compile_all(compiling, M, [2, 3], priority)
    compiling.go.set()
    assert [future.result(10) for future in futures] == [None] * len(futures)
    assert compiling.compiled == [(1, 1), *((M, count) for M in (2, 4, 8, 16) for count in (2, 3))]
    # One that measures, and one that compiles for all of them.
    assert len(compiling.made) == 2


def test_what_is_cancelled_or_was_not_begun_at_the_end_is_not_compiled(compiling):
    first, second, third, fourth = compile_all(compiling, 1, [1, 2, 3, 4], 1)
    assert compiling.started.wait(10)
    assert second.cancel()
    compiling.go.set()
    assert third.result(10) is None
    assert fourth.result(10) is None
    assert compiling.compiled == [(1, 1), (1, 3), (1, 4)]
    compiling.go.clear()
    compiling.started.clear()
    _, waiting = compile_all(compiling, 2, [1, 2], 1)
    assert compiling.started.wait(10)
    threads = [t for t in threading.enumerate() if t.name.endswith("(_compile_tasks)")]
    compiling.close()
    with pytest.raises(CancelledError):
        waiting.result(10)
    compiling.go.set()
    for thread in threads:
        thread.join(10)
    assert threads
    assert not any(thread.is_alive() for thread in threads)
    assert compiling.compiled[3:] == [(2, 1)]


# fmt: off
ENDS = {
    "too long": (worker.Lost(worker.TOO_LONG), worker.TOO_LONG),
    # Memory may be short: the process that measures compiles it then.
    "killed": (worker.Lost("ended its process"), None),
    "refused": (bench.Skip("does not fit"), "does not fit"),
    "another error": (RuntimeError("no such target"), None),
}
# fmt: on


@pytest.mark.parametrize("name", ENDS)
def test_only_what_is_proved_of_a_candidate_stands_against_it(name):
    error, reason = ENDS[name]
    process = FakeWorker(compile=[error])
    process.start()
    found = workers._compile_problem(process, PROBLEM, 4, GOOD)
    assert (found and found.reason) == reason


@pytest.mark.parametrize(
    ("cores", "ranks", "count"), [(1, None, 1), (8, None, 7), (64, None, 16), (64, 8, 7), (8, 8, 1)]
)
def test_compilers_leave_a_core_and_share_the_rest_with_other_ranks(
    monkeypatch, cores, ranks, count
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert workers._compiler_count() == count


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_the_interpreter_has_nothing_to_compile(monkeypatch, is_interpreted):
    properties = gemm_kernel.device.DeviceProperties("cuda", (9, 0))
    monkeypatch.setattr(workers, "device_properties", lambda device: properties)
    monkeypatch.setattr(workers, "INTERPRETED", is_interpreted)
    assert workers.Workers(torch.device("cpu")).can_compile == (not is_interpreted)
