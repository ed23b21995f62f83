"""The `gemv` family: one row, along K or along N."""

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


def config_of(block_n, block_k, num_warps, num_stages):
    return make_config("gemv", 1, block_n, block_k, num_warps, num_stages)


# What the tuner tries: BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages.
TILES = {
    "NT": [
        (1, 512, 2, 1),
        (1, 512, 2, 3),
        (1, 1024, 4, 1),
        (1, 1024, 4, 2),
        (1, 1024, 4, 3),
        (1, 1024, 4, 4),
        (1, 2048, 4, 1),
        (1, 2048, 4, 2),
        (1, 2048, 8, 1),
        (1, 4096, 4, 1),
        (1, 4096, 8, 1),
        (2, 1024, 4, 1),
        (2, 1024, 4, 2),
        (2, 1024, 4, 3),
        (2, 2048, 4, 1),
        (4, 512, 4, 1),
        (4, 512, 4, 3),
        (4, 1024, 4, 1),
        (4, 1024, 8, 2),
    ],
    "NN": [
        (64, 64, 4, 1),
        (64, 64, 4, 3),
        (64, 32, 2, 3),
        (128, 32, 4, 1),
        (128, 32, 4, 3),
        (128, 64, 4, 2),
        (128, 64, 8, 3),
        (256, 16, 4, 1),
        (256, 16, 4, 3),
        (256, 32, 8, 1),
        (256, 32, 8, 3),
        (512, 16, 8, 2),
    ],
}
CASES = [(layout, config_of(*tile)) for layout, tiles in TILES.items() for tile in tiles]


def _label(value):
    return value if isinstance(value, str) else "-".join(str(entry) for entry in value.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ("NT", config_of(1, 512, 4, 1)),
        ("NT", config_of(4, 512, 4, 2)),
        ("NN", config_of(64, 16, 4, 1)),
        ("NN", config_of(64, 16, 4, 3)),
    ],
    ids=_label,
)
@pytest.mark.parametrize(("N", "K"), [(1, 1), (7, 100), (64, 512), (70, 1300)])
def test_awkward_sizes(device, N, K, layout, config, dtype):
    a, b = make_operands(1, N, K, layout, dtype, device)
    if operand_problem(config, a, b, a.new_empty(1, N)):
        pytest.skip("an operand with one column or row is of both layouts, and counts as the other")
    assert_product(launch(a, b, config), a, b, config)


@pytest.mark.parametrize(("layout", "config"), CASES[::3], ids=_label)
def test_some_candidates(device, layout, config):
    if config_problem(config, gemm_kernel.device.device_properties(device)):
        pytest.skip("not for this device")
    # Three tiles and three k blocks or more, the last ones ragged: the interpreter takes a program after the
    # other, and more of them take the same path.
    N, K = 2 * config["BLOCK_SIZE_N"] + 1, 2 * config["BLOCK_SIZE_K"] + 188
    a, b = make_operands(1, N, K, layout, torch.float16, device)
    assert_product(launch(a, b, config), a, b, config)


def test_padding_is_never_multiplied(device):
    a = torch.full((1, 1000), torch.nan, dtype=torch.float16, device=device)
    weight = torch.full((40, 1000), torch.nan, dtype=torch.float16, device=device)
    a[:, :900], weight[:30, :900] = torch.randn(1, 900), torch.randn(30, 900)
    a, b = a[:, :900], weight[:30, :900].t()
    assert_product(launch(a, b, config_of(4, 512, 4, 1)), a, b)


def test_strided_rows(device):
    a = torch.randn(900, 2, dtype=torch.float16, device=device)[:, 1:].t()
    b = torch.randn(60, 1000, dtype=torch.float16, device=device)[::2, 50:950].t()
    out = torch.full((30, 1), torch.nan, dtype=torch.float16, device=device).t()
    assert_product(launch_gemm_kernel(a, b, out, config_of(2, 512, 4, 2)), a, b)


def test_a_dirty_out_is_overwritten(device):
    a, b = make_operands(1, 100, 300, "NN", torch.float16, device)
    config = config_of(64, 32, 4, 1)
    first = launch(a, b, config)
    again = launch_gemm_kernel(a, b, torch.full_like(first, 1000.0), config)
    assert torch.equal(first, again)
    assert torch.equal(launch_gemm_kernel(a, b, again, config), first)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"BLOCK_SIZE_M": 16}, "from 1 to 1"),
        ({"BLOCK_SIZE_N": 3}, "power of two"),
        ({"BLOCK_SIZE_K": 8192}, "from 8 to 4096"),
        ({"SPLIT_K": 2}, "SPLIT_K is not a key"),
        ({"BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 4096}, "registers"),
        ({"BLOCK_SIZE_N": 4, "BLOCK_SIZE_K": 4096, "num_stages": 12}, "shared memory"),
    ],
)
def test_a_bad_config_is_refused(change, reason):
    config = config_of(2, 1024, 4, 2)
    assert config_problem(config, H200) is None
    assert reason in config_problem({**config, **change}, H200)


def test_every_candidate_is_valid_on_its_device():
    assert {config_problem(config, H200) for _, config in CASES} == {None}


def test_operands_that_it_would_crawl_on_are_refused():
    along_k, along_n = config_of(1, 1024, 4, 1), config_of(256, 16, 4, 1)
    for layout, fitting, other in (("NT", along_k, along_n), ("NN", along_n, along_k)):
        a, b = make_operands(1, 512, 512, layout, torch.float16, "meta")
        out = a.new_empty(1, 512)
        assert operand_problem(fitting, a, b, out) is None
        assert "long in" in operand_problem(other, a, b, out)
        assert "one row" in operand_problem(fitting, a.expand(2, 512), b, out.expand(2, 512))


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "config"), CASES, ids=_label)
def test_every_candidate_on_a_gpu(device, layout, config):
    if config_problem(config, gemm_kernel.device.device_properties(device)):
        pytest.skip("not for this device")
    # 16-byte rows and a tail in every side, no tail, rows without alignment
    for N, K in ((1000, 5008), (1024, 4096), (203, 777)):
        a, b = make_operands(1, N, K, layout, torch.bfloat16, device)
        out = launch(a, b, config)
        assert_product(out, a, b, (config, N, K))
        for _ in range(3):
            assert torch.equal(launch(a, b, config), out)
