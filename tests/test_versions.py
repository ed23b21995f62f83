"""What stands in for features that the installed Triton lacks; its launcher is in test_kept_launch."""

import logging

import kernels
import pytest
import torch
import triton

from .cases import forget_defaults
from .test_look_up import write

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
N, K = 48, 80


def test_what_a_triton_lacks_gives_way_to_the_next_entry(device, tuned_dir, monkeypatch, caplog):
    H200 = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232448)
    families = gemm_kernel.kernels
    monkeypatch.setattr(families.tma, "TensorDescriptor", None)
    monkeypatch.setattr(families.gluon, "IMPORT_PROBLEM", "needs Triton's Gluon: not there")
    monkeypatch.setattr(tuning, "device_properties", lambda device: H200)
    plain = gemm_kernel.config.plain_config
    missing = {
        "32": {"kernel": "tma", **plain(64, 64, 64, 4, 4)},
        "64": {"kernel": "tma", **plain(64, 96, 64, 4, 4)},
        "128": {"kernel": "gluon", **plain(128, 192, 64, 4, 4)},
    }
    # The files stay valid: it is this installation that cannot run them.
    assert [families.config_problem(config) for config in missing.values()] == [None] * 3
    tuned = plain(32, 32, 32, 4, 2)
    write(tuned_dir, {**missing, "256": tuned}, N, K, device=device)
    with caplog.at_level(logging.WARNING):
        for M in (16, 32, 64, 128, 256):
            assert tuning.get_config(M, N, K, device) == tuned
    (record,) = caplog.records
    for reason in ("needs Triton 3.4", "needs Triton's Gluon"):
        assert reason in record.getMessage()
    a = torch.randn(16, K, dtype=torch.float16, device=device)
    b = torch.randn(K, N, dtype=torch.float16, device=device)
    monkeypatch.undo()
    assert gemm_kernel.gemm(a, b).shape == (16, N)


@pytest.mark.parametrize(
    ("driver", "has_wait", "is_early"),
    [((12, 2), True, False), ((12, 3), True, True), (None, True, True), ((13, 0), False, False)],
)
def test_an_early_launch_is_left_out_where_it_cannot_be(
    device, tuned_dir, monkeypatch, caplog, driver, has_wait, is_early
):
    H200 = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232448, driver=driver)
    wait = object() if has_wait else None
    monkeypatch.setattr(gemm_kernel.kernels.dependent_launch, "gdc_wait", wait)
    monkeypatch.setattr(tuning, "device_properties", lambda device: H200)
    forget_defaults()
    late = {"kernel": "swap", **gemm_kernel.config.plain_config(16, 64, 128, 4, 4)}
    early = {**late, "PDL": 2, "PREFETCH": 2}
    write(tuned_dir, {"16": early}, N, K, device=device)
    try:
        # The entry stays, and costs no warning.
        with caplog.at_level(logging.WARNING):
            assert tuning.get_config(16, N, K, device) == (early if is_early else late)
        assert caplog.records == []
        default = tuning.default_config(16, 4096, 4096, device)
        assert bool(default.get("PDL")) == is_early
        refined = gemm_kernel.candidates.refinements(late, H200)
        assert bool(refined) == is_early
    finally:
        forget_defaults()


def test_this_triton_has_what_its_version_promises():
    assert (gemm_kernel.kernels.tma.TensorDescriptor is not None) == (VERSION >= (3, 4))
    assert (gemm_kernel.kernels.swap.dependent_launch.gdc_wait is not None) == (VERSION >= (3, 5))
    has_gluon = gemm_kernel.kernels.gluon.IMPORT_PROBLEM is None
    assert has_gluon == ((3, 6) <= VERSION <= (3, 9))
