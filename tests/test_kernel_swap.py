"""The `swap` family: every tile, layout and split is right, and the same bits come out each time."""

import kernels
import pytest
import torch

from .cases import launch, make_config, make_operands
from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
launch_gemm_kernel = gemm_kernel.kernels.launch_gemm_kernel
config_problem = gemm_kernel.kernels.config_problem
operand_problem = gemm_kernel.kernels.operand_problem

H200 = gemm_kernel.device.DeviceProperties("cuda", (9, 0), 132, 232_448)
DTYPES = [torch.float16, torch.bfloat16]


def config_of(block_m, block_n, block_k, num_warps, num_stages, split_k=1):
    tile = block_m, block_n, block_k, num_warps, num_stages
    return make_config("swap", *tile, SPLIT_K=split_k)


# What the tuner tries: BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages.
TILES = [
    (64, 64, 4, 5),
    (64, 64, 4, 8),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 4, 6),
    (64, 256, 4, 3),
    (64, 256, 4, 4),
    (128, 64, 4, 4),
    (128, 64, 4, 6),
    (128, 128, 4, 3),
    (128, 128, 4, 4),
    (128, 128, 8, 4),
]
CONFIGS = [
    config_of(block_m, *tile, split_k)
    for block_m in (16, 32, 64)
    for tile in TILES
    for split_k in (1, 3, 16)
]


def _label(config):
    return "-".join(str(value) for value in config.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (1, 1, 1),
        (3, 70, 100),  # every side ragged, fewer k blocks than parts
        (16, 64, 128),  # no side ragged
        (17, 130, 520),  # one more than a tile
        (70, 65, 257),  # more rows than a tile has
    ],
)
@pytest.mark.parametrize("split_k", [1, 5])
def test_awkward_sizes(device, M, N, K, layout, dtype, split_k):
    a, b = make_operands(M, N, K, layout, dtype, device)
    config = config_of(16, 64, 128, 4, 3, split_k)
    assert_product(launch(a, b, config), a, b, config)


@pytest.mark.parametrize("config", CONFIGS[::7], ids=_label)
def test_some_candidates(device, config):
    if config_problem(config, gemm_kernel.device.device_properties(device)):
        pytest.skip("not for this device")
    a, b = make_operands(19, 135, 600, "NT", torch.float16, device)
    assert_product(launch(a, b, config), a, b, config)


@pytest.mark.parametrize("split_k", [1, 3])
def test_any_strides(device, split_k):
    config = config_of(32, 64, 64, 4, 3, split_k)
    a = torch.randn(200, 40, dtype=torch.float16, device=device).t()[3::2, 1:]
    b = torch.randn(398, 80, dtype=torch.float16, device=device)[::2, 5:79:2]
    assert_product(launch(a, b, config), a, b)
    out = torch.full((74, 19), torch.nan, dtype=torch.float16, device=device)[::2].t()
    assert_product(launch_gemm_kernel(a, b, out, config), a, b)


def test_padding_is_never_multiplied(device):
    # What surrounds the operands is NaN, and 0 * NaN is NaN.
    a = torch.full((20, 200), torch.nan, dtype=torch.float16, device=device)
    b = torch.full((120, 200), torch.nan, dtype=torch.float16, device=device)
    a[:9, :150], b[:70, :150] = torch.randn(9, 150), torch.randn(70, 150)
    a, b = a[:9, :150], b[:70, :150].t()
    for split_k in (1, 2, 7):
        assert_product(launch(a, b, config_of(16, 64, 64, 4, 3, split_k)), a, b)


def test_inf_and_nan_spread_as_in_torch(device):
    a, b = make_operands(4, 70, 130, "NT", torch.float16, device)
    a[1, 7], a[2, 100], b[3, 5] = torch.inf, torch.nan, -torch.inf
    out = launch(a, b, config_of(16, 64, 64, 4, 3, 3))
    exact = a.float() @ b.float()
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out.isinf(), exact.isinf())


def test_a_dirty_out_is_overwritten(device):
    # triton-lang/triton 2183: split-K that adds to what out happens to hold
    a, b = make_operands(5, 100, 300, "NT", torch.float16, device)
    config = config_of(16, 64, 64, 4, 3, 4)
    first = launch(a, b, config)
    again = launch_gemm_kernel(a, b, torch.full_like(first, 1000.0), config)
    assert torch.equal(first, again)
    assert torch.equal(launch_gemm_kernel(a, b, again, config), first)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"BLOCK_SIZE_M": 8}, "from 16 to 64"),
        ({"BLOCK_SIZE_M": 128}, "from 16 to 64"),
        ({"BLOCK_SIZE_N": 96}, "power of two"),
        ({"BLOCK_SIZE_K": 512}, "from 32 to 256"),
        ({"SPLIT_K": 0}, "from 1 to 16"),
        ({"SPLIT_K": 17}, "from 1 to 16"),
        ({"SPLIT_K": True}, "integer"),
        ({"num_warps": 2}, "4 or 8"),
        ({"num_warps": 16}, "4 or 8"),
        ({"BLOCK_SIZE_K": 256, "num_stages": 8}, "shared memory"),
        ({"WHAT": 1}, "not a key"),
    ],
)
def test_a_bad_config_is_refused(change, reason):
    config = config_of(16, 64, 128, 4, 4, 2)
    assert config_problem(config, H200) is None
    assert reason in config_problem({**config, **change}, H200)


def test_every_candidate_is_valid_on_its_device():
    problems = [config_problem(config, H200) for config in CONFIGS]
    # Of the deepest, those with many rows pass the shared memory.
    assert all(problem is None or "shared memory" in problem for problem in problems)
    assert problems.count(None) > 0.8 * len(CONFIGS)


def test_split_k_is_optional():
    config = config_of(16, 64, 128, 4, 4)
    del config["SPLIT_K"]
    assert config_problem(config, H200) is None


def test_scratch_is_bounded():
    def problem(M, N, split_k):
        a = torch.empty(M, 64, dtype=torch.float16, device="meta")
        b = torch.empty(64, N, dtype=torch.float16, device="meta")
        out = torch.empty(M, N, dtype=torch.float16, device="meta")
        return operand_problem(config_of(64, 64, 64, 4, 3, split_k), a, b, out)

    assert problem(64, 4096, 16) is None
    assert problem(64, 1 << 20, 1) is None
    assert "tiles" in problem(64, 1 << 20, 2)
    assert "bytes of scratch" in problem(64, 14336, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=_label)
def test_every_candidate_on_a_gpu(device, config):
    if config_problem(config, gemm_kernel.device.device_properties(device)):
        pytest.skip("not for this device")
    M = config["BLOCK_SIZE_M"] - 3
    for layout in ("NN", "NT"):
        # 16-byte rows and a tail in every side, no tail along K, rows without alignment
        for N, K in ((272, 2000), (256, 2048), (201, 777)):
            a, b = make_operands(M, N, K, layout, torch.bfloat16, device)
            out = launch(a, b, config)
            assert_product(out, a, b, (config, layout, N, K))
            for _ in range(3):
                assert torch.equal(launch(a, b, config), out)


@pytest.mark.gpu
def test_a_new_m_is_no_new_compile(device):
    kernel = gemm_kernel.kernels.swap._swap_kernel
    b = torch.randn(512, 256, dtype=torch.float16, device=device).t()

    def compiled():
        return sum(len(entry[0]) for entry in kernel.device_caches.values())

    before = compiled()
    for M in range(1, 65):
        a = torch.randn(M, 256, dtype=torch.float16, device=device)
        launch(a, b, config_of(16, 64, 32, 4, 7, 2))
    assert compiled() == before + 1
