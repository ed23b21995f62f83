"""A candidate that hangs, crashes or breaks the device costs the tuner that candidate, and nothing else."""

import contextlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import kernels
import pytest
import torch

from .test_config import GOOD

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
VARIANT = Path(gemm_kernel.__file__).parent

N, K = 64, 64
ALSO_RIGHT, RIGHT, HANGS, EXITS, CRASHES, BREAKS, TALKS, SPOILS, TIRES = range(2, 11)

# Put behind the package's own `launch_gemm_kernel`; num_stages says what a configuration does.
FAULTS = """
_launch = launch_gemm_kernel
_is_broken = False
_tired = []
_last = None

def launch_gemm_kernel(a, b, out, config):
    import os, signal, time
    global _is_broken, _last
    stages = config["num_stages"] if config["BLOCK_SIZE_K"] == 32 else None  # not the default's
    _last = len(a), stages
    if stages == 4:
        endless(a)
    if stages == 5:
        os._exit(3)
    if stages == 6:
        os.kill(os.getpid(), signal.SIGSEGV)
    if stages == 7:
        break_device(a)
    if stages == 8:
        os.write(1, b"written past Python")
        print("{not JSON")
    if _is_broken:
        raise RuntimeError("unspecified launch failure")
    if stages == 10:
        _tired.append(config)
        if len(_tired) > 6:
            endless(a)
    _launch(a, b, out, config)
    if stages == 9:
        b.zero_()
    return out

def endless(a):
    if a.is_cuda:
        _endless_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device=a.device))
    else:
        while True:
            pass

def break_device(a):
    global _is_broken
    if a.is_cuda:
        # an address that is nobody's
        _write_kernel[(1,)](a, 1 << 44)
        torch.cuda.synchronize()
    from .. import measure
    measure.device_works = lambda device: False
    _is_broken = True
    raise RuntimeError("an illegal memory access was encountered")
"""
KERNELS = """
import triton
import triton.language as tl

@triton.jit
def _endless_kernel(flag_ptr):
    count = 0
    while tl.load(flag_ptr, volatile=True) == 0:
        count += 1

@triton.jit
def _write_kernel(ptr, offset):
    tl.store(ptr + tl.cast(offset, tl.int64), 0.0)


"""


@contextlib.contextmanager
def faulty_package(tmp_path, additions):
    """The kernel package with ``additions`` behind its files, loaded from a folder of its own."""
    variant = tmp_path / "faulty"
    shutil.copytree(VARIANT, variant, ignore=shutil.ignore_patterns("__pycache__", "configs"))
    for file, addition in additions.items():
        with open(variant / file, "a") as stream:
            stream.write(addition)
    name = "faulty_gemm"
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    try:
        spec.loader.exec_module(package)
        yield package
    finally:
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            del sys.modules[module]


@pytest.fixture
def faulty(tmp_path):
    with faulty_package(tmp_path, {"kernels/__init__.py": KERNELS + FAULTS}) as package:
        yield package


def entry(num_stages):
    return {**GOOD, "num_stages": num_stages}


def test_each_fault_costs_its_candidate_alone(device, tmp_path, monkeypatch, faulty):
    # vllm-project/vllm issue 48732: one illegal access, and hours of tuning are lost
    monkeypatch.setattr(faulty.workers, "MEASURE_LIMIT_S", 10.0 if device.type == "cuda" else 1.5)
    faults = [entry(stages) for stages in (HANGS, EXITS, CRASHES, BREAKS)]
    results = []
    with faulty.workers.Workers(device) as workers:
        path = faulty.tune_gemm(
            N, K, (16,), torch.float16, tmp_path, [*faults, entry(TALKS), entry(SPOILS), entry(RIGHT)],
            device=device, on_result=results.append, workers=workers,
        )  # fmt: skip
        assert workers._measurer.starts == 1 + len(faults)
    (result,) = results
    result.skipped.pop("wrong result", None)  # SPOILS itself, where it is found out
    assert result.skipped == {"took too long": 1, "ended its process": 2, "broke the device": 1}
    assert entry(RIGHT) in [timed.config for timed in result.quick]
    # Which of them is a matter of luck, as is whether it starts early.
    winner = without_early_start(json.loads(path.read_text())["16"])
    default = without_early_start(faulty.tuning.default_config(16, N, K, device))
    assert winner in (default, entry(TALKS), entry(RIGHT))


def without_early_start(config):
    return {key: value for key, value in config.items() if key not in ("PDL", "PREFETCH")}


# Rounds where there are no CUDA graphs, with given times by M and num_stages.
ROUNDS = """
_TIMES_MS = {16: {3: 1.0, 2: 1.005, 10: 1.0}, 40: {3: 1.02, 2: 1.0, 10: 1.0}}

class GraphedCalls:
    def __init__(self, fn):
        self._fn = fn

    def time_ms(self):
        from . import kernels
        self._fn()
        M, stages = kernels._last
        return _TIMES_MS[M].get(stages, 2.0)

def own_timer(device):
    return None
"""


def test_what_is_lost_in_the_final_rounds_costs_itself_alone_and_winners_are_shared(
    tmp_path, monkeypatch
):
    if not gemm_kernel.kernels.INTERPRETED:
        pytest.skip("launches cannot be counted within CUDA graphs")
    device = torch.device("cpu")
    results = []

    def candidates(M):
        return [entry(RIGHT), entry(ALSO_RIGHT), *([entry(TIRES)] if M == 16 else [])]

    additions = {"kernels/__init__.py": KERNELS + FAULTS, "measure.py": ROUNDS}
    with faulty_package(tmp_path, additions) as faulty, faulty.workers.Workers(device) as workers:
        monkeypatch.setattr(faulty.workers, "MEASURE_LIMIT_S", 2.0)
        monkeypatch.setattr(faulty.workers.Workers, "can_compile", False)
        path = faulty.tune_gemm(
            N, K, (16, 40), torch.float16, tmp_path, candidates,
            device=device, on_result=results.append, workers=workers,
        )  # fmt: skip
        assert workers._measurer.starts == 2
    assert [result.skipped for result in results] == [{"took too long": 1}, {}]
    assert [result.config["num_stages"] for result in results] == [RIGHT, ALSO_RIGHT]
    assert (results[0].tuned_ms, results[0].noise) == (1.0, 0)
    assert [timed.time_ms for timed in results[0].top[:2]] == [1.0, 1.005]
    assert json.loads(path.read_text()) == {"16": entry(ALSO_RIGHT), "40": entry(ALSO_RIGHT)}


def test_a_child_that_cannot_start_is_an_error_with_its_reason(device, faulty, monkeypatch):
    monkeypatch.setattr(faulty.worker, "_BOOT", "raise SystemExit('no such luck')")
    worker = faulty.worker.Worker("measure", device=str(device))
    with pytest.raises(RuntimeError, match="does not start: .*status 1: no such luck"):
        worker.call("set_rows", 1, limit_s=1)
    assert not worker.is_running()


def test_compiling_ahead_needs_no_gpu(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    worker = gemm_kernel.worker.Worker("compile", target=["cuda", 90, 32], backend="cuda")
    try:
        problem = gemm_kernel.tuning.Problem(4096, 4096, "NT", "bfloat16")
        assert worker.call("compile", problem, 64, GOOD, limit_s=100) is None
        assert len(list(cache.rglob("*.cubin"))) == 1
        with pytest.raises(gemm_kernel.bench.Skip, match="does not fit"):
            worker.call("compile", problem, 64, {**GOOD, "num_warps": 3}, limit_s=100)
    finally:
        worker.close()


@pytest.mark.gpu
def test_what_was_compiled_ahead_is_what_is_measured(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem = gemm_kernel.tuning.Problem(512, 512, "NT", "float16")
    M = 64
    configs = gemm_kernel.tuner.default_candidates(problem, device)(M)[:24]
    with gemm_kernel.workers.Workers(device) as workers:
        futures = workers.compile(problem, M, configs, 0)
        good = [c for c, future in zip(configs, futures) if future.result(300) is None]
        assert len(good) > 12
        compiled = set(tmp_path.rglob("*.json"))
        bench = workers.bench(problem)
        bench.set_rows(M)
        for config in good:
            assert bench.quick_ms(config) > 0
    assert set(tmp_path.rglob("*.json")) == compiled


def test_an_interrupt_ends_the_children(device, tmp_path, faulty):
    workers = faulty.workers.Workers(device)
    pids = []

    def stop(*_):
        pids.append(workers._measurer._process.pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), workers:
        faulty.tune_gemm(
            N,
            K,
            (16,),
            torch.float16,
            tmp_path,
            [],
            device=device,
            on_progress=stop,
            workers=workers,
        )
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
