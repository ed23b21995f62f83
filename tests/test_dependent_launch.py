"""Programmatic dependent launch: started early, and yet every element that the launch before wrote is seen."""

import kernels
import pytest
import torch
import triton
import triton.language as tl

from .cases import make_config
from .compile_targets import TARGETS
from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
config_problem = gemm_kernel.kernels.config_problem
launch_gemm_kernel = gemm_kernel.kernels.launch_gemm_kernel
prefetch_offsets = gemm_kernel.kernels.dependent_launch.prefetch_offsets


def config_of(kernel, block_m, block_n, block_k, num_stages=4, PDL=1, **keys):
    return make_config(kernel, block_m, block_n, block_k, 4, num_stages, PDL=PDL, **keys)


CONFIGS = [
    config_of("swap", 16, 64, 128),
    config_of("swap", 16, 128, 64, SPLIT_K=3),
    config_of("gemv", 1, 2, 512, num_stages=1),
    config_of("gemv", 1, 4, 256),
    config_of("tma", 64, 64, 64),
    config_of("tma", 64, 96, 128, SPLIT_K=2),
    config_of("tma", 16, 64, 128, SWAP=1, SPLIT_K=2),
    config_of("swap", 16, 64, 128, PDL=2, SPLIT_K=2),
    config_of("gemv", 1, 2, 512, num_stages=1, PDL=2),
    config_of("tma", 64, 96, 64, PDL=2),
    config_of("swap", 16, 64, 128, PDL=3),
    config_of("gemv", 1, 2, 512, num_stages=1, PDL=3),
    config_of("tma", 64, 96, 64, PDL=3),
]
# These bring nothing into L2 ahead. Of `gluon`, rings as long as K, and longer than it.
WITHOUT_PREFETCH = [
    *(config_of("tma", 64, 128, 64, PERSISTENT=1, PDL=when) for when in (1, 2, 3)),
    *(config_of("gluon", 64, 192, 64, PDL=when) for when in (1, 2, 3)),
    *(config_of("gluon", 128, 320, 64, num_stages=3, PDL=when) for when in (1, 2)),
    config_of("gluon", 64, 64, 64, num_stages=12, PDL=2),
    config_of("gluon", 168, 128, 64, SWAP=1, PDL=2),
]
ALL = [*CONFIGS, *WITHOUT_PREFETCH]


def test_the_prefetch_belongs_to_an_early_launch():
    for config in CONFIGS:
        assert config_problem({**config, "PREFETCH": 4}) is None
        assert "power of two" in config_problem({**config, "PREFETCH": 3})
        assert "needs PDL" in config_problem({**config, "PREFETCH": 4, "PDL": 0})
    assert "64 or more" in config_problem(config_of("swap", 16, 64, 32, PREFETCH=1))
    assert "not a key" in config_problem(config_of("tiled", 64, 64, 64, PREFETCH=1))
    for config in WITHOUT_PREFETCH:
        assert config_problem(config) is None
        problem = config_problem({**config, "PREFETCH": 1})
        assert "no PREFETCH" in problem or "not a key" in problem


def test_all_candidates_are_launched_early_and_the_best_otherwise_too():
    properties = TARGETS["sm_90"].properties
    for config in gemm_kernel.tuning.candidate_configs(1, 4096, 4096, properties, "NT"):
        can = config.get("kernel") not in (None, "tiled")
        assert bool(config.get("PDL")) == (can and gemm_kernel.kernels.dependent_launch.gdc_wait is not None)  # fmt: skip
    for config in ALL:
        refined = gemm_kernel.candidates.refinements(config)
        assert config not in refined
        # Also as late as can be, where an order of the programs matters that an early start may disturb.
        assert any("PDL" not in each for each in refined) == (config["kernel"] in ("tma", "gluon"))
        assert any("PREFETCH" in each for each in refined) == (config in CONFIGS)
        assert all(config_problem(each) is None for each in refined)
    assert gemm_kernel.candidates.refinements(make_config("tiled", 64, 64, 64, 4, 4)) == []


@triton.jit
def _offsets_kernel(
    out_ptr,
    first_n,
    first_k,
    N,
    K,
    stride_bk,
    stride_bn,
    BLOCK_SIZE_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    LINES_N: tl.constexpr,
    LINES_K: tl.constexpr,
):
    offs = prefetch_offsets(
        first_n, first_k, N, K, stride_bk, stride_bn, BLOCK_SIZE_N, COLUMNS, B_TRANSPOSED
    )
    places = tl.arange(0, LINES_N)[:, None] * LINES_K + tl.arange(0, LINES_K)[None, :]
    tl.store(out_ptr + places, offs)


# The last of each layout lie past 2**31 elements of b.
@pytest.mark.parametrize(
    ("layout", "first_n", "first_k", "N", "K"),
    [
        ("NT", 0, 0, 4096, 4096),
        ("NT", 4064, 4032, 4090, 4100),  # over both edges
        ("NT", 0, 0, 1, 1),
        ("NT", 128128, 25600, 128200, 25728),
        ("NN", 0, 0, 4096, 4096),
        ("NN", 4032, 4032, 4090, 4100),
        ("NN", 0, 0, 1, 1),
        ("NN", 64, 25600, 128256, 25728),
    ],
)
def test_each_line_of_a_part_is_prefetched_and_none_outside_of_b(
    device, layout, first_n, first_k, N, K
):
    block_n, columns = 64, 128
    is_nt = layout == "NT"
    stride_k, stride_n = (1, K) if is_nt else (N, 1)
    lines = (block_n, columns // 64) if is_nt else (1, columns)
    out = torch.full(lines, -1, dtype=torch.int64, device=device)
    _offsets_kernel[(1,)](
        out, first_n, first_k, N, K, stride_k, stride_n, block_n, columns, is_nt, *lines
    )
    found = set(out.flatten().tolist())
    assert all(0 <= offset < N * K for offset in found)
    # A line is 64 elements along the contiguous side, from the beginning of the part on.
    step_n, step_k = (1, 64) if is_nt else (64, 1)
    assert found >= {
        n * stride_n + k * stride_k
        for n in range(first_n, min(first_n + block_n, N), step_n)
        for k in range(first_k, min(first_k + columns, K), step_k)
    }


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [*ALL, *({**config, "PREFETCH": blocks} for config in CONFIGS for blocks in (1, 8))],
    ids=lambda config: config["kernel"],
)
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_what_the_launch_before_wrote_is_seen(device, layout, config):
    problem = config_problem(config, gemm_kernel.device.device_properties(device))
    if problem:
        pytest.skip(f"not for this device: {problem}")
    M = 1 if config["kernel"] == "gemv" else 16
    N, K = 2056, 1032  # multiples of 8, as descriptors want them, and of no tile
    dtype = torch.float16
    a = torch.randn(M, K, dtype=dtype, device=device)
    # Each launch writes the b of the next one: in layout NT as the transpose of what it writes.
    rows, columns = (N, K) if layout == "NT" else (K, N)
    left = torch.randn(rows, 64, dtype=dtype, device=device)
    right = torch.randn(64, columns, dtype=dtype, device=device)
    # It lets the next one start as early as there is.
    writer = config_of("tma", 64, 64, 64)
    weight = torch.full((rows, columns), torch.nan, dtype=dtype, device=device)
    b = weight.t() if layout == "NT" else weight
    if gemm_kernel.kernels.operand_problem(config, a, b, a.new_empty(M, N)):
        pytest.skip("not for this layout")
    outs, weights = [], []
    for _ in range(20):
        left.neg_().mul_(0.9)
        launch_gemm_kernel(left, right, weight, writer)
        outs.append(launch_gemm_kernel(a, b, a.new_full((M, N), torch.nan), config))
        weights.append(b.clone())
    for out, b in zip(outs, weights):
        assert_product(out, a, b, config)


def chained(config, x, weights, times=10):
    """Products of which each one reads what the one before wrote, as a and as bias, and writes what that one read."""
    x, y = x.clone(), torch.full_like(x, torch.nan)
    for _ in range(times):
        launch_gemm_kernel(x, weights[0], y, config)
        launch_gemm_kernel(y, weights[1], x, config, y[0])
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("config", ALL, ids=lambda config: config["kernel"])
def test_what_the_launch_before_reads_is_not_written_early(device, config):
    problem = config_problem(config, gemm_kernel.device.device_properties(device))
    if problem:
        pytest.skip(f"not for this device: {problem}")
    K = 1032
    x = torch.randn(1 if config["kernel"] == "gemv" else 16, K, dtype=torch.float16, device=device)
    # Sums keep their size, so that no bit is lost to a zero or an infinity.
    weights = [
        (0.8 * K**-0.5 * torch.randn(K, K, device=device)).to(torch.float16).t() for _ in range(2)
    ]
    late = {**config, "PDL": 0}
    expected = chained(late, x, weights)
    assert torch.isfinite(expected).all()
    assert torch.equal(chained(config, x, weights), expected)
