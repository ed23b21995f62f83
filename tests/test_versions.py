"""What depends on the installed Triton: its launcher, and what stands in for features that it lacks."""

import importlib
import logging
from types import SimpleNamespace

import kernels
import pytest
import torch
import triton

from .test_look_up import write

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning
launching = gemm_kernel.kernels.launch

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
N, K = 48, 80


def real_launcher(**others):
    """Triton's own launcher for CUDA, with what compiling would have given it, and what it launched."""
    launcher_class = importlib.import_module("triton.backends.nvidia.driver").CudaLauncher
    launcher = object.__new__(launcher_class)
    calls = []
    plain = {
        **{
            f"{name}_scratch_{what}": 0
            for name in ("global", "profile")
            for what in ("size", "align")
        },
        "num_ctas": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": True,
        "gsan_enabled": False,
        "arg_annotations": ("annotations",),
        "kernel_signature": b"signature",
        "launch": lambda *arguments: calls.append(arguments),
    }
    vars(launcher).update({**plain, **others})
    return launcher, calls


@pytest.fixture
def driver(monkeypatch):
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda index: 70 + index,
        allocate_default_profile_scratch=lambda *_: None,
    )
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))


def kept_launch(launcher):
    compiled = SimpleNamespace(run=launcher, function=7, packed_metadata="packed")
    launch = launching.Launch("kernel", (5, 1, 1), launching.pointers, (N, K))
    return launching.CompiledLaunch(launch, compiled, 0)


def test_a_kept_launch_gives_this_triton_what_its_own_launcher_would(driver):
    launcher, calls = real_launcher()
    launcher(5, 1, 1, 70, 7, "packed", None, None, None, 16, 32, 48, N, K)
    (expected,) = calls
    calls.clear()
    kept = kept_launch(launcher)
    assert calls == []
    kept("a", "b", "out", (16, 32, 48))
    assert calls == [expected]
    # Before 3.5 launchers do not say whether they need memory for a profiler.
    assert (kept._launcher is launcher.launch) == (VERSION >= (3, 5))


@pytest.mark.parametrize("scratch", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_that_needs_scratch_goes_through_tritons_launcher(driver, scratch):
    launcher, _ = real_launcher(**{scratch: 128})
    assert kept_launch(launcher)._launcher is launcher


def test_what_a_triton_lacks_gives_way_to_the_next_entry(device, tuned_dir, monkeypatch, caplog):
    H200 = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232448)
    families = gemm_kernel.kernels
    monkeypatch.setattr(families.tma, "TensorDescriptor", None)
    monkeypatch.setattr(families.gluon, "_IMPORT_PROBLEM", "needs Triton's Gluon: not there")
    monkeypatch.setattr(families.swap.dependent_launch, "gdc_wait", None)
    monkeypatch.setattr(tuning, "device_properties", lambda device: H200)
    plain = gemm_kernel.config.plain_config
    missing = {
        "16": {"kernel": "swap", **plain(16, 64, 128, 4, 4), "PDL": 1},
        "32": {"kernel": "tma", **plain(64, 64, 64, 4, 4)},
        "64": {"kernel": "tma", **plain(64, 96, 64, 4, 4)},
        "128": {"kernel": "gluon", **plain(128, 192, 64, 4, 4)},
    }
    # The files stay valid: it is this installation that cannot run them.
    assert [families.config_problem(config) for config in missing.values()] == [None] * 4
    tuned = plain(32, 32, 32, 4, 2)
    write(tuned_dir, {**missing, "256": tuned}, N, K, device=device)
    with caplog.at_level(logging.WARNING):
        for M in (16, 32, 64, 128, 256):
            assert tuning.get_config(M, N, K, device) == tuned
    (record,) = caplog.records
    for reason in ("Triton 3.4", "and 1 more"):
        assert reason in record.getMessage()
    a = torch.randn(16, K, dtype=torch.float16, device=device)
    b = torch.randn(K, N, dtype=torch.float16, device=device)
    monkeypatch.undo()
    assert gemm_kernel.gemm(a, b).shape == (16, N)


def test_this_triton_has_what_its_version_promises():
    assert (gemm_kernel.kernels.tma.TensorDescriptor is not None) == (VERSION >= (3, 4))
    assert (gemm_kernel.kernels.swap.dependent_launch.gdc_wait is not None) == (VERSION >= (3, 4))
    has_gluon = gemm_kernel.kernels.gluon._IMPORT_PROBLEM is None
    assert has_gluon == ((3, 6) <= VERSION <= (3, 9))
