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


def gluon(block_m, block_n):
    return make_config("gluon", block_m, block_n, 64, 4, 4)


@pytest.mark.parametrize("columns", [64, 72, 168, 328])
def test_a_gluon_tile_takes_as_long_as_it_has_columns_and_longer_the_more_it_reads(columns):
    # 64 x `columns` of out for (64 + columns) written and as many read.
    used = 2 * (64 + columns) / (64 * columns)
    longer = (1 + cost_model._SHARED_MEMORY * used) / (1 + cost_model._SHARED_MEMORY / 32)
    longer *= cost_model._TWO_PARTS if columns > 256 else 1
    assert blocks(64, columns, 640, gluon(64, columns)) == pytest.approx(
        10 * columns / 64 * longer, rel=1e-3
    )


def test_a_further_gluon_tile_waits_until_the_one_before_is_stored():
    # A multiplication is all that counts.
    rates = cost_model.Rates(1, 0.085, 1e18, 1e18)
    K = 1 << 16
    for make, more_us in ((gluon, cost_model._STORE_US), (tile, 0)):
        one, two, three = (
            cost_model.time_us(make(64, 64), rows, 64, K, rates) for rows in (64, 128, 192)
        )
        wave_us = one - cost_model._LAUNCH_US
        assert two - one == pytest.approx(wave_us + more_us)
        assert three - two == pytest.approx(wave_us + more_us)


def test_a_row_of_gluon_tiles_alone_loads_more_slowly():
    # What comes in is all that counts.
    rates = cost_model.Rates(1 << 20, 1e-9, 1.0, 1e18)
    alone, shared = (cost_model.time_us(gluon(64, 64), M, 64, 1 << 16, rates) for M in (64, 65))
    assert alone / shared == pytest.approx(cost_model._ALONE, rel=1e-3)


def test_a_row_major_b_is_loaded_by_64_columns_and_slowly_where_they_are_out_of_line():
    # What comes in is all that counts.
    rates = cost_model.Rates(1, 1e-9, 1.0, 1e18)

    def load_us(columns, layout):
        return cost_model.time_us(gluon(64, columns), 64, columns, 1 << 16, rates, layout)

    assert load_us(192, "NN") == load_us(192, "NT")
    assert load_us(168, "NT") < load_us(192, "NT") < load_us(168, "NN")
    assert load_us(144, "NN") == load_us(168, "NN")
