"""Several devices, streams, threads and processes: calls go to the tensors' own device, in order.

The tests on two GPUs give each a name of its own, as two models in one machine have.
"""

import json
import os
import pickle
import subprocess
import sys
import threading

import kernels
import pytest
import torch

from .exact import assert_product
from .processes import fork, wait_for
from .test_config import GOOD
from .test_look_up import entry, warnings_of, write
from .test_package import LOAD, ROOT, run_python
from .test_tuning import fixed_timer

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning

N, K = 48, 80


def half(*shape, device):
    return torch.randn(shape, dtype=torch.float16, device=device)


def operands(index, M=64):
    device = torch.device("cuda", index)
    return half(M, K, device=device), half(N, K, device=device).t()


two_gpus = [pytest.mark.gpu, pytest.mark.two_gpus]


class TestTwoGpus:
    pytestmark = two_gpus

    @pytest.fixture(autouse=True)
    def _current_device_stays(self):
        before = torch.cuda.current_device()
        yield
        after = torch.cuda.current_device()
        torch.cuda.set_device(before)
        assert after == before

    @pytest.mark.parametrize("current", [0, 1])
    @pytest.mark.parametrize("side_stream", [False, True])
    @pytest.mark.parametrize("how", ["eager", "out", "compiled"])
    def test_k5_the_tensors_decide(self, current, side_stream, how):
        # R23 linkedin/Liger-Kernel 1303, kernels-community PR 1029, unsloth PR 6912, triton 2441
        other = 1 - current
        gemm = gemm_kernel.gemm
        if how == "compiled":
            gemm = torch.compile(lambda a, b: gemm_kernel.gemm(a, b), fullgraph=True)
        with torch.cuda.device(current):
            a, b = operands(other)
            stream = torch.cuda.Stream(other) if side_stream else torch.cuda.default_stream(other)
            torch.cuda.synchronize(other)
            for _ in range(3):
                with torch.cuda.device(other), torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
                    a.normal_()
                    with torch.cuda.device(current):
                        if how == "out":
                            out = torch.full((64, N), torch.nan, dtype=a.dtype, device=a.device)
                            assert gemm(a, b, out=out) is out
                        else:
                            out = gemm(a, b)
                        assert torch.cuda.current_device() == current
                    # In the order of the stream: behind the fill of a, and before this.
                    copy = out.clone()
                    out.zero_()
                stream.synchronize()
                assert out.device == a.device
                assert_product(copy, a, b)
            assert torch.cuda.current_device() == current

    def test_k5_two_devices_in_turn_from_one_current_device(self):
        pairs = [operands(index, M) for M in (1, 17, 64) for index in (0, 1)]
        for _ in range(3):
            for a, b in pairs:
                assert_product(gemm_kernel.gemm(a, b), a, b)

    def test_k5_two_models_use_their_own_files(self, tuned_dir, monkeypatch, caplog):
        names = {0: "GPU One", 1: "GPU Two / OAM"}
        real = torch.cuda.get_device_name

        def name(device=None):
            index = torch.cuda.current_device() if device is None else torch.device(device).index
            return names.get(index) or real(device)

        monkeypatch.setattr(torch.cuda, "get_device_name", name)
        launched = []
        launch = gemm_kernel.kernels.launch_gemm_kernel

        def spy(a, b, out, config):
            launched.append((a.device.index, config["num_stages"]))
            return launch(a, b, out, config)

        monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
        for index, stages in ((0, 2), (1, 4)):
            write(tuned_dir, {"64": entry(stages)}, N, K, "NT", torch.device("cuda", index))
        for current in (0, 1):
            tuning._load_tuned_configs.cache_clear()
            launched.clear()
            with torch.cuda.device(current):
                for index in (0, 1, 0, 1):
                    a, b = operands(index)
                    assert_product(gemm_kernel.gemm(a, b), a, b)
            assert set(launched) == {(0, 2), (1, 4)}
        assert not warnings_of(caplog)

    def test_k5_operands_on_two_gpus_are_refused(self):
        # R28 AnswerDotAI/ModernBERT 152, R07 flagos-ai/FlagGems PR 3828
        a, b = operands(0)
        canary = torch.full((64, N), 7.0, dtype=torch.float16, device="cuda:1")
        for left, right, out in (
            (a, b.to("cuda:1"), None),
            (a, b, canary),
            (a.to("cuda:1"), b, canary),
        ):
            with pytest.raises(ValueError, match="on one device"):
                gemm_kernel.gemm(left, right, out=out)
        assert (canary == 7.0).all()

    def test_k5_tuning_and_warmup_take_the_device_they_are_given(self, tuned_dir):
        device = torch.device("cuda", 1)
        allocated = torch.cuda.memory_allocated(0)
        path = gemm_kernel.tune_gemm(
            N, K, (16,), save_dir=tuned_dir, candidates=[entry(2)], device=device
        )
        assert path.name == tuning.config_file_name(N, K, device)
        gemm_kernel.warmup(N, K, device)
        assert torch.cuda.memory_allocated(0) == allocated

    def test_k5_threads_on_two_gpus(self):
        errors = []

        def work(index):
            try:
                torch.cuda.set_device(1 - index)
                with torch.cuda.stream(torch.cuda.Stream(1 - index)):
                    for M in range(1, 200):
                        a, b = operands(index, M)
                        assert_product(gemm_kernel.gemm(a, b), a, b, M)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1) * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []

    @pytest.mark.parametrize("visible", ["1", "the UUID of 1"])
    def test_k5_the_command_tunes_the_visible_gpu(self, tmp_path, visible):
        # R27 vllm-project/vllm PR 16263: an index of the machine used as one of the process
        if visible != "1":
            visible = f"GPU-{torch.cuda.get_device_properties(1).uuid}"
        local = f"kernels-test/gemm-triton-autotune={ROOT}"
        result = subprocess.run(
            [sys.executable, str(ROOT / "tune.py"), "--n", "64", "--k", "64", "--m", "1"]
            + ["--layout", "nt", "--save-dir", str(tmp_path)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": visible, "LOCAL_KERNELS": local},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        name = tuning.device_name(torch.device("cuda", 1))
        assert name in result.stdout
        assert [path.name for path in tmp_path.glob("*.json")] == [
            f"N=64,K=64,device_name={name},layout=NT.json"
        ]

    def test_k11_two_ranks_keep_the_union(self, tmp_path):
        # R67 flashinfer-ai/flashinfer 3186, sgl-project/sglang PR 35343
        code = f"""
import os, torch
import torch.distributed as dist
{LOAD}
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("gloo")
path = k.tune_gemm(64, 64, (1 + rank, 16 + rank, 64 + rank), save_dir={str(tmp_path)!r})
dist.barrier()
k.tuning._load_tuned_configs.cache_clear()
os.environ["GEMM_TUNED_CONFIG_DIR"] = {str(tmp_path)!r}
Ms = list(k.tuning._load_tuned_configs(64, 64))
assert Ms == [1, 2, 16, 17, 64, 65], Ms
dist.destroy_process_group()
"""
        script = tmp_path.parent / "rank.py"
        script.write_text(code)
        result = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            + [str(script)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert result.returncode == 0, result.stderr
        (path,) = tmp_path.iterdir()
        assert len(json.loads(path.read_text())) == 6


@pytest.mark.gpu
def test_k5_a_side_stream_is_kept(device):
    a, b = operands(device.index)
    stream = torch.cuda.Stream(device)
    gemm_kernel.gemm(a, b)
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            a.normal_()
            out = gemm_kernel.gemm(a, b)
            copy = out.clone()
        stream.synchronize()
        assert_product(copy, a, b)


@pytest.fixture
def thread_safe_kernels(monkeypatch):
    """Triton's interpreter has one state for all threads: on the CPU torch multiplies in its place."""
    if gemm_kernel.kernels.INTERPRETED:
        monkeypatch.setattr(
            gemm_kernel.kernels,
            "launch_gemm_kernel",
            lambda a, b, out, config: out.copy_(a.float() @ b.float()),
        )
    # As many switches between threads as there can be.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(work, count=12):
    """Run ``work(index)`` in threads that start at once; the exceptions that came."""
    errors = []
    barrier = threading.Barrier(count)

    def run(index):
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_k9_threads_report_each_cause_once(device, tuned_dir, caplog, thread_safe_kernels):
    # R52 sgl-project/sglang 9562: the line that floods the log
    path = write(tuned_dir, {"16": {**GOOD, "num_warps": 3}, "64": entry(2)}, N, K, device=device)
    b, untuned = half(K, N, device=device), half(K, 24, device=device)

    def work(index):
        for M in (1, 16, 64):
            a = half(M, K, device=device)
            assert_product(gemm_kernel.gemm(a, b), a, b)
            assert_product(gemm_kernel.gemm(a, untuned), a, untuned)
            assert "tuned, from" in gemm_kernel.explain(64, N, K, device)

    assert in_threads(work) == []
    lines = sorted(record.getMessage() for record in warnings_of(caplog))
    assert len(lines) == 2
    assert str(path) in lines[1]


def test_k9_an_entry_that_fails_in_all_threads_fails_no_call(
    device, tuned_dir, caplog, monkeypatch, thread_safe_kernels
):
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def fail(a, b, out, config):
        if config["num_stages"] == 5:
            raise RuntimeError("PassManager::run failed")
        return launch(a, b, out, config)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", fail)
    b = half(K, N, device=device)

    def work(index):
        for M in (16, 17, 64, 65):
            a = half(M, K, device=device)
            assert_product(gemm_kernel.gemm(a, b), a, b)

    for _ in range(20):
        write(tuned_dir, {"16": entry(5), "64": entry(2), "65": entry(5)}, N, K, device=device)
        assert in_threads(work) == []
        assert list(tuning._load_tuned_configs(N, K, device)) == [64]
        (warning,) = warnings_of(caplog)
        assert "M=16, 65" in warning.getMessage()
        caplog.clear()


def test_k9_clearing_and_tuning_meanwhile_fails_no_call(device, tuned_dir, thread_safe_kernels):
    b = half(K, N, device=device)
    path = write(tuned_dir, {"16": entry(2), "64": entry(2)}, N, K, device=device)
    done = threading.Event()

    def work(index):
        if index == 0:
            for round in range(30):
                tuned = {16: entry(2 + round % 2), 64: entry(2)}
                gemm_kernel.tuned_file.save_tuned_configs(path, tuned)
                tuning._load_tuned_configs.cache_clear()
                # What was read before is not found after it.
                assert tuning.get_config(16, N, K, device) == tuned[16]
            done.set()
            return
        while not done.is_set():
            for M in (1, 16, 64):
                a = half(M, K, device=device)
                assert_product(gemm_kernel.gemm(a, b), a, b)
                gemm_kernel.explain(M, N, K, device)
                config = tuning.get_config(M, N, K, device)
                # Of an M without an entry the default is chosen where it is faster, as on an H200.
                assert M == 1 or config in (entry(2), entry(3))

    assert in_threads(work, count=6) == []


FORK = f"""
import logging, os, signal, threading, torch
torch.set_num_threads(1)
{LOAD}
logging.getLogger("gemm_triton_autotune").addHandler(logging.NullHandler())
logging.getLogger("gemm_triton_autotune").propagate = False
cpu = torch.device("cpu")
a = torch.ones(3, 5, dtype=torch.float16)
def look_up():
    assert "on CPU" in k.explain(3, 5, 3, cpu)
def use():
    look_up()
    if k.kernels.INTERPRETED:
        assert float(k.gemm(a, a.t()).sum()) == 45.0
def fork(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a child that hangs fails, by its signal
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid
def join(children):
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
for used_before in (False, True):
    if used_before:
        use()
    join([fork(use) for _ in range(2)])
    # Forked while other threads are in the middle of a look-up. The child looks up, too: what torch and
    # numpy make of a fork among threads is not ours.
    stop = threading.Event()
    def repeat():
        M = 1
        while not stop.is_set():
            k.tuning.get_config(M, 8, 8, cpu); k.tuning._load_tuned_configs.cache_clear(); M += 1
    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    children = [fork(look_up) for _ in range(5)]
    stop.set()
    for thread in threads:
        thread.join()
    join(children)
print("forked")
"""


def test_k9_a_fork_after_import_or_use_works():
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    assert run_python(FORK, CUDA_VISIBLE_DEVICES="", **environment) == "forked"


def test_k9_what_a_process_has_loaded_can_be_left_to_a_child(tuned_dir):
    # a server that forks its workers after a first look-up
    cpu = torch.device("cpu")
    write(tuned_dir, {"16": entry(2)}, N, K, device=cpu)
    assert tuning.get_config(16, N, K, cpu) == entry(2)

    def child():
        assert tuning.get_config(16, N, K, cpu) == entry(2)
        assert tuning.get_config(16, N + 1, K, cpu) == tuning.default_config(16, N + 1, K, cpu)

    assert wait_for(fork(child)) == 0


def test_k9_a_configuration_can_be_sent_to_another_process(device, tuned_dir):
    write(tuned_dir, {"16": entry(2)}, N, K, device=device)
    config = tuning.get_config(16, N, K, device)
    assert pickle.loads(pickle.dumps(config)) == config == json.loads(json.dumps(config))


def test_k5_look_up_without_a_device_follows_the_current_one(tuned_dir, monkeypatch):
    # what was read for the device that was current then is not for the one that is now
    properties = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232448)
    monkeypatch.setattr(tuning, "device_properties", lambda device: properties)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    for index, stages in ((0, 2), (1, 3)):
        write(tuned_dir, {"16": entry(stages)}, N, K, device=torch.device("cuda", index))
    for index, stages in ((0, 2), (1, 3), (0, 2)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        assert tuning.get_config(16, N, K) == entry(stages)
        assert tuning._load_tuned_configs(N, K)[16] == entry(stages)
        assert tuning._load_tuned_configs(N, K, torch.device("cuda"))[16] == entry(stages)


def test_k9_tuning_reports_no_weight_twice(device, tuned_dir, caplog):
    path = tuned_dir / tuning.config_file_name(N, K, device)
    for Ms in ((1, 2), (4,)):
        gemm_kernel.tune_gemm(N, K, Ms, torch.float16, tuned_dir, [], timer=fixed_timer(1.0))
        for M in Ms:
            assert tuning.get_config(M, N, K, device) == json.loads(path.read_text())[str(M)]
    assert not warnings_of(caplog)
