"""Every configuration computes the right answer, in whatever family."""

import json

import kernels
import pytest
import torch

from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)


def _candidates():
    """All of them where they are compiled; one of those that are the same to the interpreter."""
    candidates = gemm_kernel.tuning.candidate_configs()
    if not gemm_kernel.kernels.INTERPRETED:
        return candidates
    unknown = ("num_warps", "num_stages")
    distinct = {
        json.dumps({key: value for key, value in config.items() if key not in unknown}): config
        for config in candidates
    }
    return list(distinct.values())


CANDIDATES = _candidates()


def _label(config):
    return "-".join(str(value) for value in config.values())


def _padded(rows, columns, device):
    """Random rows that begin at multiples of 16 bytes, with NaN behind the end of each."""
    width = (columns + 7) // 8 * 8 + 8
    full = torch.full((rows, width), torch.nan, dtype=torch.float16, device=device)
    return full[:, :columns].normal_()


@pytest.mark.parametrize("config", CANDIDATES, ids=_label)
def test_every_candidate_is_right_at_an_awkward_size(device, config):
    # triton-lang/triton 615: a fault of code generation that one tile and warp choice reaches
    properties = gemm_kernel.device.device_properties(device)
    problem = gemm_kernel.kernels.config_problem(config, properties)
    if problem:
        pytest.skip(f"not for this device: {problem}")
    M = 1 if config.get("kernel") == "gemv" else 70
    for layout in ("NT", "NN"):
        # three blocks of K at least, for those that split it
        a = _padded(M, 300, device)
        b = _padded(152, 300, device).t() if layout == "NT" else _padded(300, 152, device)
        out = torch.full((M, 152), torch.nan, dtype=torch.float16, device=device)
        if gemm_kernel.kernels.operand_problem(config, a, b, out):
            assert config["kernel"] == "gemv", "only gemv is for one layout"
            continue
        assert_product(gemm_kernel.kernels.launch_gemm_kernel(a, b, out, config), a, b, config)
        again = torch.full_like(out, torch.nan)
        gemm_kernel.kernels.launch_gemm_kernel(a, b, again, config)
        assert torch.equal(out, again)


@pytest.mark.parametrize("group_size", [1, 3, 8, 64])
@pytest.mark.parametrize("tile_rows", [1, 2, 7, 8, 9, 17])
def test_every_tile_of_out_is_written(device, group_size, tile_rows):
    # AMD-AGI/Primus-Turbo 397: the mapping from program to tile did not cover the output
    config = {**gemm_kernel.config.conservative_config(1), "GROUP_SIZE_M": group_size}
    config.update(BLOCK_SIZE_M=16, BLOCK_SIZE_N=16, BLOCK_SIZE_K=16)
    for M, N in ((tile_rows * 16 - 3, 35), (35, tile_rows * 16 - 3)):
        a = torch.randn(M, 9, dtype=torch.float16, device=device)
        b = torch.randn(9, N, dtype=torch.float16, device=device)
        out = torch.full((M, N), torch.nan, dtype=torch.float16, device=device)
        assert_product(gemm_kernel.kernels.launch_gemm_kernel(a, b, out, config), a, b, (M, N))


@pytest.mark.gpu
def test_a_grid_of_many_row_tiles_launches(device):
    # triton-lang/triton 3299: a grid axis that is limited to 65,535 blocks
    config = {**gemm_kernel.config.conservative_config(1), "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16}
    for M, N in ((16 * 65_536 + 1, 16), (16, 16 * 65_536 + 1)):
        a = torch.randn(M, 16, dtype=torch.float16, device=device)
        b = torch.randn(16, N, dtype=torch.float16, device=device)
        out = torch.full((M, N), torch.nan, dtype=torch.float16, device=device)
        assert_product(gemm_kernel.kernels.launch_gemm_kernel(a, b, out, config), a, b)


@pytest.mark.gpu
def test_a_new_m_is_no_new_compile(device):
    tiled = gemm_kernel.kernels.tiled._tiled_kernel
    config = {**gemm_kernel.config.conservative_config(1), "GROUP_SIZE_M": 5}
    b = torch.randn(512, 256, dtype=torch.float16, device=device).t()

    def compiled():
        return sum(len(entry[0]) for entry in tiled.device_caches.values())

    before = compiled()
    for M in range(1, 101):
        a = torch.randn(M, 256, dtype=torch.float16, device=device)
        gemm_kernel.kernels.launch_gemm_kernel(a, b, a.new_empty(M, 512), config)
    assert compiled() == before + 1, json.dumps(config)
