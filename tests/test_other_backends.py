"""ROCm and XPU without such a device: torch is made to answer as it does there, and CUDA may not be asked."""

import ctypes
from types import SimpleNamespace

import kernels
import pytest
import torch

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning
scratch = gemm_kernel.kernels.scratch

N, K = 4096, 4096


def refuse(name):
    def refused(*_, **__):
        raise AssertionError(f"{name} was called")

    return refused


@pytest.fixture(autouse=True)
def _asked_anew():
    caches = gemm_kernel.device.device_properties, scratch._capture_query
    for cache in caches:
        cache.cache_clear()
    tuning._load_tuned_configs.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    tuning._load_tuned_configs.cache_clear()


@pytest.fixture
def rocm(monkeypatch):
    """An MI300X: device type "cuda", without what only CUDA's properties have."""
    properties = SimpleNamespace(
        name="AMD Instinct MI300X",
        major=9,
        minor=4,
        gcnArchName="gfx942:sramecc+:xnack-",
        warp_size=64,
        multi_processor_count=304,
        shared_memory_per_block=65536,
    )
    monkeypatch.setattr(torch.version, "hip", "7.1.25424-x")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    # gfx942 would be taken for a compute capability of 9.4.
    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse("get_device_capability"))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(ctypes, "CDLL", refuse("a library of the CUDA driver"))
    return torch.device("cuda", 0)


@pytest.fixture
def xpu(monkeypatch):
    """A Data Center GPU Max: no function of torch.cuda is there for it."""
    properties = SimpleNamespace(
        name="Intel(R) Data Center GPU Max 1550",
        gpu_subslice_count=128,
        gpu_eu_count=1024,
        local_mem_size=131072,
        sub_group_sizes=[16, 32],
        architecture=13136561920,
    )
    for name, value in vars(torch.cuda).items():
        if callable(value) and not isinstance(value, type) and not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, refuse(f"torch.cuda.{name}"))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 0)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: properties.name)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(ctypes, "CDLL", refuse("a library of the CUDA driver"))
    return torch.device("xpu", 0)


def test_rocm_is_not_taken_for_cuda(rocm):
    properties = gemm_kernel.device.device_properties(rocm)
    assert properties == ("rocm", None, 304, 65536, "gfx942", 64, None)
    assert tuning.resolve_device(None) == rocm
    assert "device_name=AMD_Instinct_MI300X,layout=NT" in tuning.config_file_name(
        N, K, rocm, layout="NT"
    )
    assert gemm_kernel.arguments.default_dtype(rocm) == torch.bfloat16
    assert "AMD_Instinct_MI300X" in gemm_kernel.explain(16, N, K, layout="NT")


def test_xpu_asks_nothing_of_cuda(xpu):
    properties = gemm_kernel.device.device_properties(xpu)
    assert properties == ("xpu", None, 128, 131072, None, None, None)
    assert tuning.resolve_device(None) == xpu
    name = "Intel(R)_Data_Center_GPU_Max_1550"
    assert f"device_name={name}.json" in tuning.config_file_name(N, K, xpu)
    assert gemm_kernel.arguments.default_dtype(xpu) == torch.bfloat16
    assert name in gemm_kernel.explain(16, N, K)
    with gemm_kernel.device.device_guard(xpu):
        pass


@pytest.mark.parametrize("backend", ["rocm", "xpu"])
def test_candidates_are_those_of_the_device(backend, request):
    properties = gemm_kernel.device.device_properties(request.getfixturevalue(backend))
    option = {"rocm": "matrix_instr_nonkdim", "xpu": "grf_mode"}[backend]
    for M in (1, 16, 512, 4096):
        found = tuning.candidate_configs(M, N, K, properties, "NT")
        assert {config.get("kernel", "tiled") for config in found} <= {"tiled", "swap", "gemv"}
        assert any(option in config for config in found)
        for config in found:
            assert not set(config) & {"PDL", "maxnreg"}
            options = gemm_kernel.config.launch_options(config, properties.backend)
            assert set(options) == {key for key in config if key.islower()} - {"kernel"}


@pytest.mark.parametrize("backend", ["rocm", "xpu"])
def test_a_launch_there_is_not_kept(backend, request, monkeypatch):
    # Its path is that of Triton's launcher for CUDA.
    device = request.getfixturevalue(backend)
    monkeypatch.setattr(gemm_kernel.kernels, "INTERPRETED", False)
    monkeypatch.setattr(gemm_kernel.kernels, "compile_kernel", refuse("compile_kernel"))
    a = SimpleNamespace(device=device, data_ptr=lambda: 0)
    config = gemm_kernel.config.conservative_config(16)
    assert gemm_kernel.kernels.repeatable_launch(a, a, a, config) is None


@pytest.fixture
def made(monkeypatch):
    """What `torch.zeros` and `torch.empty` are asked for: how many, and on which device."""
    asked = []

    def recorder(new):
        def record(count, dtype, device):
            asked.append((count, device))
            return new(count)

        return record

    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, recorder(getattr(torch, name)))
    return asked


def test_counters_of_a_capture_are_cleared_by_the_launch_on_rocm(rocm, made, monkeypatch):
    # The number of a capture is known to CUDA's driver alone.
    active = SimpleNamespace(get_current_stream=lambda index: 70)
    monkeypatch.setattr(scratch.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for launches in (1, 2):
        assert scratch.get_scratch(rocm, 3, 5).counter_count == 5
        assert made == [(3, rocm), (5, rocm)] * launches


def test_counters_on_xpu_are_new_at_each_launch(xpu, made):
    for launches in (1, 2):
        assert scratch.get_scratch(xpu, 3, 5).counter_count == 5
        assert made == [(3, xpu), (5, xpu)] * launches
