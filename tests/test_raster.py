"""The order in which tiles are taken, and where the last rows of them begin."""

import kernels
import pytest
import torch
import triton
import triton.language as tl

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
first_row = gemm_kernel.kernels.raster.first_row
grouped_tile = gemm_kernel.kernels.raster.grouped_tile


@triton.jit
def _tiles_kernel(found_ptr, num_pid_m, num_pid_n, GROUP_SIZE_M: tl.constexpr):
    index = tl.program_id(0)
    pid_m, pid_n = grouped_tile(index, num_pid_m, num_pid_n, GROUP_SIZE_M)
    tl.store(found_ptr + 2 * index, pid_m)
    tl.store(found_ptr + 2 * index + 1, pid_n)


@triton.jit
def _first_rows_kernel(found_ptr, M, BLOCK_SIZE_M: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(found_ptr + pid, first_row(pid, M, BLOCK_SIZE_M))


def tiles(device, rows, columns, group, count):
    found = torch.full((count, 2), -1, dtype=torch.int32, device=device)
    _tiles_kernel[(count,)](found, rows, columns, group)
    return [tuple(pair) for pair in found.tolist()]


@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(5, 3, 2), (5, 3, 3), (4, 4, 2), (1, 4, 8), (7, 2, 3), (6, 5, 1)]
)
def test_a_group_of_rows_shares_its_columns_and_each_tile_is_taken_once(
    device, rows, columns, group
):
    expected = [
        (row, column)
        for first in range(0, rows, group)
        for column in range(columns)
        for row in range(first, min(first + group, rows))
    ]
    assert tiles(device, rows, columns, group, rows * columns) == expected


def test_a_group_that_is_taller_than_the_matrix_overflows_nothing(device):
    assert tiles(device, 2, 4096, 1 << 20, 3) == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize(
    ("M", "expected"), [(100, [0, 36]), (128, [0, 64]), (129, [0, 64, 65]), (10, [0])]
)
def test_the_last_rows_begin_so_that_none_is_beyond_the_matrix(device, M, expected):
    found = torch.full((len(expected),), -1, dtype=torch.int32, device=device)
    _first_rows_kernel[(len(expected),)](found, M, 64)
    assert found.tolist() == expected
