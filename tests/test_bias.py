"""A bias is added in every epilogue: in float32, once, to the right columns, and without a spill."""

import kernels
import pytest
import torch

from .cases import make_config
from .compile_targets import compile_all
from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
launch_gemm_kernel = gemm_kernel.kernels.launch_gemm_kernel


# Each epilogue of each family: whole tiles and parts of them, both sides, a split sum, a persistent program.
CONFIGS = [
    make_config("tiled", 64, 64, 32, 4, 3),
    make_config("swap", 16, 64, 64, 4, 3),
    make_config("swap", 32, 128, 32, 4, 3, SPLIT_K=3),
    make_config("gemv", 1, 2, 512, 4, 2),
    make_config("gemv", 1, 256, 8, 4, 1),
    make_config("tma", 64, 320, 64, 4, 4),
    make_config("tma", 64, 96, 64, 4, 4, SPLIT_K=2),
    make_config("tma", 96, 128, 64, 8, 4, SWAP=1, SPLIT_K=2),
    make_config("tma", 128, 128, 64, 8, 3, PERSISTENT=1),
    make_config("tma", 128, 256, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=2),
]
GLUON = [
    make_config("gluon", block_m, block_n, 64, 4, 3)
    for block_m, block_n in (
        (64, 64),
        (64, 168),
        (64, 352),
        (128, 136),
        (128, 256),
        (128, 328),
        (192, 96),
        (192, 200),
    )
] + [
    make_config("gluon", block_m, block_n, 64, 4, 3, SWAP=1)
    for block_m, block_n in ((168, 64), (136, 128), (328, 128), (200, 192))
]
LAYOUTS = {"NT": torch.float16, "NN": torch.bfloat16}


def label(config):
    return "-".join(map(str, config.values()))


def make_operands(M, N, K, layout, dtype, device):
    """a, b, a bias that ends in front of NaN, and an out of NaN."""
    a = torch.randn(M, (K + 7) // 8 * 8, dtype=dtype, device=device)[:, :K]
    b = torch.randn((N, K) if layout == "NT" else (K, N), dtype=dtype, device=device)
    bias = torch.full((N + 1,), torch.nan, dtype=dtype, device=device)[:N].normal_()
    out = torch.full((M, N), torch.nan, dtype=dtype, device=device)
    return a, b.t() if layout == "NT" else b, bias, out


def check(config, device, M=70, N=72, K=200, layouts=LAYOUTS):
    properties = gemm_kernel.device.device_properties(device)
    problem = gemm_kernel.kernels.config_problem(config, properties)
    if problem:
        pytest.skip(f"not for this device: {problem}")
    M = 1 if config["kernel"] == "gemv" else M
    for layout in layouts:
        a, b, bias, out = make_operands(M, N, K, layout, LAYOUTS[layout], device)
        if gemm_kernel.kernels.operand_problem(config, a, b, out):
            assert config["kernel"] == "gemv", "only gemv is for one layout"
            continue
        launch_gemm_kernel(a, b, out, config, bias)
        assert_product(out, a, b, layout, bias)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_every_epilogue_adds_the_bias(device, config):
    check(config, device)


@pytest.mark.gpu
@pytest.mark.parametrize("config", GLUON, ids=label)
def test_every_gluon_tile_adds_the_bias(device, config):
    # more tiles than multiprocessors, so that some programs take a second one
    layout = list(LAYOUTS)[GLUON.index(config) // 2 % 2]
    check(config, device, M=1500, N=2984, K=304, layouts=[layout])


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_the_sum_is_rounded_once(device, config):
    # 683 * 3 = 2049 has no float16: rounded before the bias is added, it would be 2048.
    properties = gemm_kernel.device.device_properties(device)
    if gemm_kernel.kernels.config_problem(config, properties):
        pytest.skip("not for this device")
    M, N, K = 1, 16, 3 * config["BLOCK_SIZE_K"]
    a = torch.zeros(M, K, dtype=torch.float16, device=device)
    a[:, :: config["BLOCK_SIZE_K"]] = 683
    b = torch.ones(N, K, dtype=torch.float16, device=device).t()
    if config["kernel"] == "gemv" and config["BLOCK_SIZE_N"] > config["BLOCK_SIZE_K"]:
        b = b.contiguous()
    bias = torch.full((N,), -2048, dtype=torch.float16, device=device)
    out = torch.full((M, N), torch.nan, dtype=torch.float16, device=device)
    assert (launch_gemm_kernel(a, b, out, config, bias) == 1).all()


def test_a_bias_takes_no_register_from_the_accumulator():
    configs = [
        make_config("gluon", 128, 352, 64, 4, 3),
        make_config("tma", 128, 256, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=2),
    ]
    if gemm_kernel.kernels.gluon.IMPORT_PROBLEM:
        configs = [config for config in configs if config["kernel"] != "gluon"]
    requests = [{"config": config, "has_bias": True} for config in configs]
    for report in compile_all("sm_90", requests):
        assert report["spilled"] == 0, report
        assert report["wgmma"] > 0, report


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [(3, 40, 24), (0, 8, 8), (3, 0, 8), (3, 8, 0)], ids=str)
def test_gemm_takes_a_bias(device, shape):
    M, N, K = shape
    for dtype in (torch.float16, torch.bfloat16):
        a, b, bias, out = make_operands(M, N, K, "NT", dtype, device)
        assert_product(gemm_kernel.gemm(a, b, bias=bias), a, b, bias=bias)
        assert gemm_kernel.gemm(a, b, out=out, bias=bias) is out
        assert_product(out, a, b, bias=bias)


def test_a_bias_may_have_any_stride(device):
    a, b, bias, _ = make_operands(5, 40, 24, "NT", torch.float16, device)
    for view in (torch.stack([bias, bias], 1)[:, 0], bias[:1].expand(40), bias.flip(0)[1:]):
        b_of_view = b[:, : len(view)]
        for _ in range(2):
            assert_product(gemm_kernel.gemm(a, b_of_view, bias=view), a, b_of_view, bias=view)
            out = torch.full((5, len(view)), torch.nan, dtype=torch.float16, device=device)
            gemm_kernel.gemm(a, b_of_view, out=out, bias=view)
            assert_product(out, a, b_of_view, bias=view)


@pytest.mark.kernels_ci
def test_a_bad_bias_is_refused(device):
    a, b, bias, out = make_operands(4, 6, 8, "NN", torch.float16, device)
    bad = {
        r"bias of shape \(6,\)": bias[:5],
        r"one number for each column, got \(1, 6\)": bias[None],
        "dtype float32": bias.float(),
        "bias on meta": bias.to("meta"),
        "bias with layout sparse": bias.to_sparse(),
    }
    for message, value in bad.items():
        with pytest.raises(ValueError, match=message):
            gemm_kernel.gemm(a, b, bias=value)
        with pytest.raises(ValueError, match=message):
            gemm_kernel.gemm(a, b, out=out, bias=value)
    with pytest.raises(ValueError, match="out and bias"):
        gemm_kernel.gemm(a, b, out=out, bias=out[2])


def test_warmup_compiles_for_calls_with_a_bias_too(device, monkeypatch):
    launch = gemm_kernel.kernels.launch_gemm_kernel
    biases = []

    def spy(a, b, out, config, bias=None):
        biases.append(bias is not None)
        return launch(a, b, out, config, bias)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
    for has_bias in (False, True):
        biases.clear()
        gemm_kernel.warmup(32, 16, device, dtype=torch.float16, bias=has_bias)
        assert biases
        assert set(biases) == {has_bias}
