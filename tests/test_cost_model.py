"""What the work model says of a configuration: waves, padding, memory, and what a split costs."""

import kernels
import pytest

from .cases import make_config

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
cost_model = gemm_kernel.cost_model

# A block takes a thousand microseconds, and nothing else counts.
BY_BLOCKS = cost_model.Rates(1, 1000.0, 1e18, 1e18)
BY_MEMORY = cost_model.Rates(1, 1e-9, 1e18, 1000.0)


def blocks(M, N, K, config, multiprocessors=1):
    """The time in blocks of 64 x 64 x 64."""
    rates = BY_BLOCKS._replace(multiprocessors=multiprocessors)
    return pytest.approx(cost_model.time_us(config, M, N, K, rates) / 1000, rel=0.02)


def tile(block_m, block_n, block_k=64, **keys):
    return make_config("tma", block_m, block_n, block_k, 4, 4, **keys)


def test_programs_run_in_waves():
    square = tile(64, 64)
    assert blocks(64, 64, 640, square) == 10
    assert blocks(65, 64, 640, square) == 20
    assert blocks(128, 128, 640, square, multiprocessors=4) == 10
    assert blocks(128, 128, 640, square, multiprocessors=3) == 20


def test_k_is_padded_to_whole_steps_of_each_part():
    assert blocks(64, 64, 641, tile(64, 64)) == 11
    assert blocks(64, 64, 641, tile(64, 64, 128)) == 12
    split = tile(64, 64, 128, SPLIT_K=2)
    assert blocks(64, 64, 5 * 128, split, multiprocessors=2) == 6
    # Its programs are twice as many.
    assert blocks(64, 64, 4 * 128, split) == 8


@pytest.mark.parametrize(
    ("columns", "as_many"), [(32, 32), (64, 64), (96, 112), (128, 128), (160, 176)]
)
def test_a_narrow_part_of_the_columns_takes_longer(columns, as_many):
    expected = 10 * as_many / 64
    assert blocks(64, columns, 640, tile(64, columns)) == expected
    # With the operands swapped, rows of a are columns.
    assert blocks(columns, 64, 640, tile(columns, 64, SWAP=1)) == expected


def test_no_product_is_faster_than_memory():
    elements = 64 * 640 + 64 * 640 + 64 * 64
    assert cost_model.time_us(tile(64, 64), 64, 64, 640, BY_MEMORY) > 2 * elements / 1000


def test_a_split_writes_and_reads_its_partial_sums():
    whole, split = (
        cost_model.time_us(tile(64, 64, SPLIT_K=parts), 64, 64, 640, BY_MEMORY) for parts in (1, 2)
    )
    assert split - whole > 2 * 8 * 64 * 64 / 1000


def test_of_equals_the_tile_that_loads_less_costs_less():
    small, large = (
        cost_model.cost(tile(64, columns), 64, 64, 64, BY_MEMORY)[1] for columns in (64, 128)
    )
    assert large < small
