"""The `tma` family: right at every edge with every tile, and never launched where it cannot run."""

import kernels
import pytest
import torch

from . import cases
from .compile_targets import compile_all
from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tma = gemm_kernel.kernels.tma
DeviceProperties = gemm_kernel.device.DeviceProperties

H200 = DeviceProperties("cuda", (9, 0), 132, 232448)
DTYPES = [torch.float16, torch.bfloat16]


def make_config(*tile, **keys):
    return cases.make_config("tma", *tile, **keys)


# Every width and height, with one part and with two, and both epilogues of a persistent program.
# The interpreter knows no warps, stages and registers: to it tiles differ in their parts and in how they
# are stored, and only in their numbers otherwise. One of each is enough there, the compiler gets all.
INTERPRETED_TOO = [
    *[make_config(64, n, 64, 4, 4) for n in (64, 96, 128, 160, 192, 256, 288, 320, 384)],
    make_config(64, 96, 128, 4, 3),
    make_config(256, 192, 64, 8, 3),
    make_config(128, 128, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=1),
    make_config(128, 256, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=2),
    # the sides swapped, and K split: one part and two of each
    *[make_config(m, 64, 64, 4, 4, SWAP=1) for m in (16, 48, 96)],
    make_config(96, 128, 64, 8, 4, SWAP=1, SPLIT_K=3),
    *[make_config(64, n, 64, 4, 4, SPLIT_K=2) for n in (64, 96)],
]
COMPILED_ONLY = [
    *[make_config(64, n, 128, 4, 3) for n in (64, 128)],
    *[make_config(128, n, 64, 8, 3) for n in (64, 96, 128, 160, 192, 256, 288, 320, 384)],
    make_config(128, 128, 64, 4, 3),
    *[make_config(256, n, 64, 8, 3) for n in (64, 96, 128, 160)],
    make_config(128, 128, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=2),
    make_config(128, 256, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=1),
    *[
        make_config(256, 128, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=subtile)
        for subtile in (1, 2)
    ],
    make_config(64, 128, 64, 4, 4, PERSISTENT=1),
    *[make_config(m, 64, 64, 4, 4, SWAP=1) for m in (32, 64, 128, 192, 256, 320, 384)],
    *[make_config(m, 128, 128, 8, 3, SWAP=1, SPLIT_K=2) for m in (16, 64, 160)],
    *[make_config(m, 64, 128, 4, 4, SWAP=1, SPLIT_K=3, PDL=1) for m in (16, 96)],
    make_config(64, 64, 128, 4, 4, PDL=1),
    make_config(64, 160, 64, 4, 4, PDL=1, PREFETCH=4),
    make_config(96, 64, 128, 4, 4, SWAP=1, SPLIT_K=3, PDL=1, PREFETCH=2),
    make_config(128, 192, 64, 8, 4, SPLIT_K=2),
]
CONFIGS = INTERPRETED_TOO + COMPILED_ONLY
TWO_PARTS = make_config(64, 320, 64, 4, 4)
PERSISTENT = make_config(128, 256, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=2)
SWAPPED = make_config(48, 64, 64, 4, 4, SWAP=1, SPLIT_K=2)


def label(config):
    return "-".join(str(value) for value in list(config.values())[1:])


def nan_rows(rows, columns, dtype, device):
    """NaN of shape (rows, columns) with aligned rows, and NaN behind the end of each: nothing may read it."""
    width = -(-columns // 8) * 8 + 8
    return torch.full((rows, width), torch.nan, dtype=dtype, device=device)[:, :columns]


def granules(config, dtype):
    """What N and K have to be multiples of, in rows that are padded."""
    if gemm_kernel.kernels.INTERPRETED and dtype == torch.bfloat16:
        return 4, 4  # computed in float32, in rows without padding
    # Loads end exactly, and so does a store by pointer. One by descriptor writes 16 bytes at a time.
    return (8 if config.get("PERSISTENT", 0) else 1), 1


def make_operands(config, M, N, K, layout, dtype, device):
    """a, b and an out of NaN; N and K are rounded up to what ``config`` takes in such rows."""
    N, K = (-(-size // granule) * granule for size, granule in zip((N, K), granules(config, dtype)))
    a, out = nan_rows(M, K, dtype, device), nan_rows(M, N, dtype, device)
    b = nan_rows(K, N, dtype, device) if layout == "NN" else nan_rows(N, K, dtype, device).t()
    return a.copy_(torch.randn_like(a)), b.copy_(torch.randn_like(b)), out


def launch(a, b, out, config):
    assert tma.operand_problem(config, a, b, out) is None
    return gemm_kernel.kernels.launch_gemm_kernel(a, b, out, config)


def skip_unless_possible(config, device):
    problem = gemm_kernel.kernels.config_problem(
        config, gemm_kernel.device.device_properties(device)
    )
    if problem:
        pytest.skip(f"not for this device: {problem}")


def edge_shapes(config):
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    return (
        (block_m + 37, block_n + 19, 2 * block_k + 13),  # over the edge on every side
        (5, 11, 3),  # less than a tile on every side
        (1, block_n + 85, block_k),  # one row
        # a single column and a single k, of which a box of the descriptor holds almost nothing
        (block_m + 12, 1, block_k + 5),
        (68, 67, 1),
    )


@pytest.mark.parametrize(
    "config",
    [*INTERPRETED_TOO, *(pytest.param(config, marks=pytest.mark.gpu) for config in COMPILED_ONLY)],
    ids=label,
)
@pytest.mark.parametrize("layout", ["NT", "NN"])
def test_every_tile_is_right_at_every_edge(device, config, layout):
    skip_unless_possible(config, device)
    for dtype in DTYPES:
        for shape in edge_shapes(config):
            a, b, out = make_operands(config, *shape, layout, dtype, device)
            if (
                config.get("SPLIT_K", 1) * config["BLOCK_SIZE_K"]
                >= a.shape[1] + config["BLOCK_SIZE_K"]
            ):
                assert "SPLIT_K" in tma.operand_problem(config, a, b, out)
                continue
            assert_product(launch(a, b, out, config), a, b, (shape, layout, dtype))
            M, N = out.shape
            behind = out.as_strided((M, out.stride(0) - N), out.stride(), N)
            assert behind.isnan().all(), "wrote behind the end of a row"


@pytest.mark.kernels_ci
@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_a_product_is_right(device, config):
    skip_unless_possible(config, device)
    a, b, out = make_operands(config, 200, 645, 264, "NT", torch.float16, device)
    assert_product(launch(a, b, out, config), a, b)


@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT, SWAPPED], ids=label)
def test_a_transposed_a_of_ragged_rows_is_taken(device, config):
    # A box begins at a multiple of 16 bytes of what is contiguous: of the rows, here.
    a = torch.randn(200, 136, dtype=torch.float16, device=device)[:, :134].t()
    b = torch.randn(72, 200, dtype=torch.float16, device=device).t()
    assert_product(cases.launch(a, b, config), a, b, config)


@pytest.mark.parametrize("swap", [0, 1])
def test_a_transposed_a_is_taken(device, swap):
    config = make_config(64, 64, 64, 4, 4, SWAP=swap)
    skip_unless_possible(config, device)
    for dtype in DTYPES:
        a = torch.randn(200, 72, dtype=dtype, device=device).t()
        b = torch.randn(200, 136, dtype=dtype, device=device)
        out = torch.full((72, 136), torch.nan, dtype=dtype, device=device)
        assert_product(launch(a, b, out, config), a, b, (swap, dtype))


@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT, SWAPPED], ids=label)
def test_the_last_tile_of_rows_reaches_back_not_beyond(device, config):
    # What it shares with the one before it comes out as from a tile of its own, and so as from either.
    rows = config["BLOCK_SIZE_M"]
    for M in (rows + 1, 3 * rows - 5):
        a, b = cases.make_operands(M, 72, 200, "NT", torch.float16, device)
        out = cases.launch(a, b, config)
        assert_product(out, a, b, M)
        assert torch.equal(out[-rows:], cases.launch(a[-rows:], b, config))


@pytest.mark.parametrize("group_size", [1, 3, 8, 1 << 20])
@pytest.mark.parametrize("keys", [{}, {"PERSISTENT": 1}], ids=["", "persistent"])
def test_every_tile_of_out_is_written(device, group_size, keys):
    config = make_config(64, 64, 64, 4, 2, **keys)
    config["GROUP_SIZE_M"] = group_size
    skip_unless_possible(config, device)
    # Many rows of tiles, many columns, and a last group of less than three rows.
    for M, N in ((1084, 67), (67, 1084), (316, 316)):
        a, b, out = make_operands(config, M, N, 8, "NN", torch.float16, device)
        assert_product(launch(a, b, out, config), a, b, (M, N))


@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_infinity_and_nan_stay_where_they_belong(device, config):
    skip_unless_possible(config, device)
    a, b, out = make_operands(config, 70, 331, 67, "NT", torch.float16, device)
    a[3, 5], a[64, 0], b[7, -2] = torch.inf, torch.nan, -torch.inf
    launch(a, b, out, config)
    exact = (a.double() @ b.double()).to(out.dtype)
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out.isinf(), exact.isinf())


def test_an_out_of_any_strides_is_written_by_pointer(device):
    config = TWO_PARTS
    skip_unless_possible(config, device)
    a, b, _ = make_operands(config, 70, 403, 67, "NT", torch.float16, device)
    for out in (
        torch.full((403, 70), torch.nan, dtype=a.dtype, device=device).t(),
        torch.full((140, 811), torch.nan, dtype=a.dtype, device=device)[::2, 1::2][:, :403],
    ):
        assert_product(launch(a, b, out, config), a, b, out.stride())


@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_a_launch_holds_for_other_tensors(device, config):
    skip_unless_possible(config, device)
    shape = (70, 331, 67, "NT", torch.float16, device)
    prepared = tma.prepare(*make_operands(config, *shape), config)
    a, b, out = make_operands(config, *shape)
    options = {key: config[key] for key in ("num_warps", "num_stages")}
    prepared.kernel[prepared.grid](*prepared.arguments(a, b, out), **options)
    assert_product(out, a, b)


@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_a_stride_that_is_never_used_may_be_any(device, config):
    skip_unless_possible(config, device)
    for shape in ((1, 80, 40), (70, 80, 1), (70, 1, 40)):
        operands = make_operands(config, *shape, "NN", torch.float16, device)
        # A row stride of 1 looks like that of a transposed matrix.
        for row_stride, column_stride in ((3, 5), (1, 1)):
            strides = (
                (row_stride if rows == 1 else stride, column_stride if columns == 1 else 1)
                for (rows, columns), (stride, _) in ((one.shape, one.stride()) for one in operands)
            )
            a, b, out = (one.as_strided(one.shape, pair) for one, pair in zip(operands, strides))
            assert_product(launch(a, b, out.fill_(torch.nan), config), a, b, (shape, row_stride))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"BLOCK_SIZE_M": 32}, "BLOCK_SIZE_M"),
        ({"BLOCK_SIZE_M": 96}, "BLOCK_SIZE_M must be 64, 128 or 256"),
        ({"BLOCK_SIZE_N": 32}, "BLOCK_SIZE_N"),
        ({"BLOCK_SIZE_N": 65}, "BLOCK_SIZE_N one of"),
        ({"BLOCK_SIZE_N": 224}, "BLOCK_SIZE_N one of"),
        ({"BLOCK_SIZE_N": 512}, "BLOCK_SIZE_N"),
        ({"BLOCK_SIZE_K": 32}, "BLOCK_SIZE_K"),
        ({"BLOCK_SIZE_K": 512}, "BLOCK_SIZE_K"),
        ({"GROUP_SIZE_M": 0}, "GROUP_SIZE_M"),
        ({"num_warps": 2}, "num_warps"),
        ({"num_warps": 16}, "num_warps"),
        ({"BLOCK_SIZE_M": 64}, "num_warps"),
        ({"num_stages": 1}, "num_stages"),
        ({"num_stages": 12}, "shared memory"),
        ({"maxnreg": 64}, "maxnreg"),
        ({"PERSISTENT": 2}, "PERSISTENT"),
        ({"PERSISTENT": True}, "PERSISTENT"),
        ({"EPILOGUE_SUBTILE": 2}, "needs PERSISTENT"),
        ({"PERSISTENT": 1, "EPILOGUE_SUBTILE": 3}, "EPILOGUE_SUBTILE"),
        ({"PERSISTENT": 1, "BLOCK_SIZE_N": 192}, "two-part"),
        ({"PERSISTENT": 1, "num_stages": 4}, "shared memory"),
        ({"num_warps": 4}, "registers"),
        ({"BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256, "num_stages": 2}, "registers"),
        ({"SPLIT_K": 17}, "SPLIT_K"),
        ({"PERSISTENT": 1, "SPLIT_K": 2}, "no SPLIT_K"),
    ],
)
def test_a_bad_config_is_refused_with_the_reason(change, reason, monkeypatch):
    monkeypatch.setattr(tma, "TensorDescriptor", object)  # whatever Triton is installed
    config = make_config(128, 256, 64, 8, 3)
    assert gemm_kernel.kernels.config_problem(config, H200) is None
    assert reason in gemm_kernel.kernels.config_problem({**config, **change}, H200)


@pytest.mark.parametrize(
    "properties",
    [
        DeviceProperties("cuda", (8, 9), 58, 101376),
        DeviceProperties("cuda", None, 132, 232448),
        DeviceProperties("rocm", None, 304, 65536),
        DeviceProperties("xpu", None, 64, 131072),
    ],
    ids=str,
)
def test_other_devices_are_refused(properties):
    assert "9.0" in gemm_kernel.kernels.config_problem(make_config(64, 64, 64, 4, 2), properties)


def test_an_old_triton_is_refused(monkeypatch):
    monkeypatch.setattr(tma, "TensorDescriptor", None)
    config = make_config(64, 64, 64, 4, 2)
    assert "Triton 3.4" in gemm_kernel.kernels.config_problem(config, H200)
    # The entry itself is a valid one.
    assert gemm_kernel.kernels.config_problem(config) is None


def test_the_tested_configurations_fit_an_h200():
    for config in CONFIGS:
        assert gemm_kernel.kernels.config_problem(config, H200) is None, config


def test_configurations_compile_to_what_they_stand_for():
    configs = [
        *(TWO_PARTS, PERSISTENT),
        make_config(64, 96, 128, 4, 4),
        make_config(128, 256, 64, 8, 3),
        make_config(256, 192, 64, 8, 4),
        make_config(256, 128, 64, 8, 3, PERSISTENT=1),
        make_config(16, 64, 128, 4, 6, SWAP=1, SPLIT_K=2, PDL=1),
        make_config(96, 128, 64, 8, 4, SWAP=1),
    ]
    requests = [
        {"config": config, "layout": layout, "M": config["BLOCK_SIZE_M"], "disassemble": True}
        for config in configs
        for layout in ("NT", "NN")
    ]
    for report in compile_all("sm_90", requests):
        assert report["bulk_copies"] > 0, report
        assert report["wgmma"] > 0, report
        assert report["wgmma_waits"] < 1, report
        assert report["spilled"] == 0, report
        # Loads that the compiler waits for together share their barriers.
        assert 0 <= tma._shared_memory(report["config"]) - report["shared"] < 256, report


def _operands(**changes):
    operands = {
        "a": torch.zeros(64, 64, dtype=torch.float16),
        "b": torch.zeros(64, 64, dtype=torch.float16),
        "out": torch.zeros(64, 64, dtype=torch.float16),
    }
    return {**operands, **changes}.values()


_WIDE = torch.zeros(128, 136, dtype=torch.float16)


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        (_operands(a=_WIDE[:64, 1:65]), "a is not aligned"),
        (_operands(b=_WIDE[:64, 1:65]), "b is not aligned"),
        (_operands(b=_WIDE[:64, 1:65].t()), "b is not aligned"),
        (_operands(a=torch.zeros(64, 68, dtype=torch.float16)[:, :64]), "a is not aligned"),
        (_operands(a=_WIDE[:64, 0:128:2]), "a is not contiguous"),
        (_operands(b=_WIDE[:64, 0:128:2]), "b is not contiguous"),
        (_operands(a=_WIDE[:1, :64].expand(64, 64)), "a has rows that overlap"),
        (_operands(b=torch.zeros(64, 1, dtype=torch.float16)), "b is not aligned"),
        (_operands(a=torch.empty(1, dtype=torch.float16).expand(2**31, 64)), "a is too large"),
    ],
)
def test_operands_that_a_descriptor_cannot_hold_are_refused(operands, reason):
    assert reason in tma.operand_problem(make_config(64, 64, 64, 4, 2), *operands)


def test_sizes_beyond_32_bits_are_refused():
    b = torch.zeros(8, 8, dtype=torch.float16)
    for size, strides in (((2**31, 8), (8, 1)), ((2, 8), (2**38, 1))):
        huge = torch.empty_strided(size, strides, dtype=torch.float16, device="meta")
        problem = tma.operand_problem(make_config(64, 64, 64, 4, 2), huge, b, huge)
        assert "a is too large for a descriptor" in problem


def test_only_a_persistent_kernel_needs_aligned_rows_of_out():
    config = make_config(64, 64, 64, 4, 2)
    for out, reason in (
        (_WIDE[:64, 1:65], "out is not aligned"),
        (_WIDE[:64, :64].t(), "out is not contiguous"),
    ):
        operands = _operands(out=out)
        assert tma.operand_problem(config, *operands) is None
        assert reason in tma.operand_problem({**config, "PERSISTENT": 1}, *operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_a_descriptor_would_write_behind_are_refused(dtype):
    config = make_config(64, 64, 64, 4, 2)
    # What is launched in the interpreter: rows without padding, and only a single one may have any length.
    is_float32 = gemm_kernel.kernels.INTERPRETED and dtype == torch.bfloat16
    M, elements = (1, 4) if is_float32 else (20, 8)
    for N in range(1, 25):
        a, out = nan_rows(M, 64, dtype, "cpu"), nan_rows(M, N, dtype, "cpu")
        operands = a, nan_rows(N, 64, dtype, "cpu").t(), out
        assert tma.operand_problem(config, *operands) is None
        problem = tma.operand_problem({**config, "PERSISTENT": 1}, *operands)
        if N % elements:
            assert problem == "out has rows that do not end at a multiple of 16 bytes"
        else:
            assert problem is None


def test_aligned_slices_and_weights_are_taken():
    config = make_config(64, 64, 64, 4, 2, PERSISTENT=1)
    for b in (_WIDE[:64, 8:72], _WIDE[:64, 8:72].t()):
        assert tma.operand_problem(config, _WIDE[:64, 8:72], b, _WIDE[:64, 16:80]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize("layout", ["NT", "NN"])
def test_every_tile_gives_the_same_bits_twice(device, config, layout):
    skip_unless_possible(config, device)
    for shape in ((1000, 3000, 1001), (2048, 2560, 2048), (4097, 1283, 515)):
        a, b, out = make_operands(config, *shape, layout, torch.bfloat16, device)
        if "SPLIT_K" in config and tma.operand_problem(config, a, b, out):
            continue  # too many tiles to be split
        assert_product(launch(a, b, out, config), a, b, shape)
        again = torch.full_like(out, torch.nan)
        for _ in range(5):
            assert torch.equal(launch(a, b, again, config), out)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_offsets_beyond_32_bits(device, config):
    skip_unless_possible(config, device)
    M, N, K = 70_003, 32_768, 64
    a, b, out = make_operands(config, M, N, K, "NT", torch.float16, device)
    launch(a, b, out, config)
    for rows in (slice(0, 300), slice(65_400, 65_700), slice(M - 300, M)):
        assert_product(out[rows], a[rows], b, rows)
    assert not out.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_a_new_m_is_no_new_compile(device, config):
    skip_unless_possible(config, device)
    config = {**config, "GROUP_SIZE_M": 5}
    b = torch.randn(512, 256, dtype=torch.float16, device=device).t()

    def compiled():
        kernels_ = (tma._tma_kernel, tma._tma_persistent_kernel)
        return sum(len(entry[0]) for one in kernels_ for entry in one.device_caches.values())

    before = compiled()
    for M in (1, 2, 15, 16, 17, 64, 100, 256, 1000, 4096):
        a = torch.randn(M, 256, dtype=torch.float16, device=device)
        assert_product(launch(a, b, torch.full_like(a.new_empty(M, 512), torch.nan), config), a, b)
    assert compiled() == before + 1
