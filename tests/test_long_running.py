"""A process that runs for months and meets ever new shapes: memory and log lines have an end."""

import gc
import logging
import os
import resource
import tracemalloc

import kernels
import pytest
import torch

from .exact import assert_product
from .test_config import GOOD
from .test_look_up import entry, warnings_of, write

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning

N, K = 64, 128


def test_a_hundred_thousand_look_ups_leave_nothing(device, tuned_dir, caplog):
    caplog.set_level(logging.DEBUG)
    entries = {str(M): entry(2 + M % 3) for M in (1, 16, 256, 4096)}
    write(tuned_dir, {**entries, "64": {**GOOD, "num_warps": 3}}, N, K, device=device)

    def look_up(first, count):
        for M in range(first, first + count):
            tuning.get_config(M, N, K, device)
            tuning.get_config(M, N + 1, K, device, "NT")

    # By then what is kept, four thousand defaults of which one serves eight rows, is full and in its final size; counted from
    # the start.
    tracemalloc.start()
    look_up(1, 60_000)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    look_up(60_000, 20_000)
    gc.collect()
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 20_000
    assert peak - before < 400_000
    # One line for the entry, one for the weight without a file, whatever the level.
    assert len(caplog.records) == 2


def test_ever_new_weights_fill_no_memory_and_no_log(device, tuned_dir, caplog, monkeypatch):
    monkeypatch.setattr(tuning, "search_path", lambda: [tuned_dir])
    for n in range(1, tuning._MAX_LOADED + 1000):
        tuning.get_config(16, n, K, device)
    assert len(tuning._load_tuned_configs._loaded) <= tuning._MAX_LOADED
    lines = [record.getMessage() for record in warnings_of(caplog)]
    assert len(lines) == len(set(lines)) == tuning._MAX_LOGGED + 1
    assert "no more are in this process" in lines[-1]
    # A weight that was forgotten is looked up again, and is not reported again.
    assert tuning.get_config(16, 1, K, device) == tuning.default_config(16, 1, K)
    assert len(warnings_of(caplog)) == tuning._MAX_LOGGED + 1


@pytest.mark.gpu
def test_a_hundred_thousand_calls_leave_nothing(device, tuned_dir, caplog):
    write(tuned_dir, {str(M): entry(2 + M % 3) for M in (1, 16, 256, 4096)}, N, K, device=device)
    largest = 20_000
    a = torch.randn(largest, K, dtype=torch.float16, device=device)
    b = torch.randn(K, N, dtype=torch.float16, device=device)

    def call(rounds):
        for _ in range(rounds):
            for M in range(1, largest + 1):
                gemm_kernel.gemm(a[:M], b)
        torch.cuda.synchronize(device)
        gc.collect()

    call(1)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    kernel = gemm_kernel.kernels.tiled._tiled_kernel
    compiled = sum(len(entry[0]) for entry in kernel.device_caches.values())
    resident = _resident_bytes()
    call(5)
    assert len(tuning.call_plans) <= gemm_kernel.calls._MAX_PLANS
    assert torch.cuda.memory_allocated(device) == allocated
    assert torch.cuda.memory_reserved(device) - reserved <= 64 << 20
    assert sum(len(entry[0]) for entry in kernel.device_caches.values()) == compiled
    assert _resident_bytes() - resident < 50 << 20
    assert not warnings_of(caplog)
    for M in (1, 17, largest):
        assert_product(gemm_kernel.gemm(a[:M], b), a[:M], b)


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_a_search_path_that_is_gone_costs_one_line(device, tmp_path, monkeypatch, caplog):
    # a network folder that comes and goes
    monkeypatch.setenv(
        "GEMM_TUNED_CONFIG_DIR", os.pathsep.join(["/nowhere", str(tmp_path / "gone")])
    )
    tuning._load_tuned_configs.cache_clear()
    try:
        for M in range(1, 200):
            tuning.get_config(M, N, K, device)
        assert len(warnings_of(caplog)) == 1
    finally:
        tuning._load_tuned_configs.cache_clear()
