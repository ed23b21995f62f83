"""The `tma` family: right at every edge with every tile, and never launched where it cannot run."""

import kernels
import pytest
import torch

from .exact import assert_product
from .test_compile import compile_all

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tma = gemm_kernel.kernels.tma
DeviceProperties = gemm_kernel.device.DeviceProperties

H200 = DeviceProperties("cuda", (9, 0), 132, 232448)
DTYPES = [torch.float16, torch.bfloat16]


def make_config(block_m, block_n, block_k, num_warps, num_stages, **keys):
    return {
        "kernel": "tma",
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "BLOCK_SIZE_K": block_k,
        "GROUP_SIZE_M": 8,
        "num_warps": num_warps,
        "num_stages": num_stages,
        **keys,
    }


# Every width and height, with one part and with two, and both epilogues of a persistent program.
CONFIGS = [
    *[make_config(64, n, 64, 4, 4) for n in (64, 96, 128, 160, 192, 256, 288, 320, 384)],
    *[make_config(64, n, 128, 4, 3) for n in (64, 96, 128)],
    *[make_config(128, n, 64, 8, 3) for n in (64, 96, 128, 160, 192, 256, 288, 320, 384)],
    make_config(128, 128, 64, 4, 3),
    *[make_config(256, n, 64, 8, 3) for n in (64, 96, 128, 160, 192)],
    *[
        make_config(m, n, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=subtile)
        for m, n in ((128, 128), (128, 256), (256, 128))
        for subtile in (1, 2)
    ],
    make_config(64, 128, 64, 4, 4, PERSISTENT=1),
]
TWO_PARTS = make_config(64, 320, 64, 4, 4)
PERSISTENT = make_config(128, 256, 64, 8, 3, PERSISTENT=1, EPILOGUE_SUBTILE=2)


def label(config):
    return "-".join(str(value) for value in list(config.values())[1:])


def nan_rows(rows, columns, dtype, device):
    """NaN of shape (rows, columns) with aligned rows, and NaN behind the end of each: nothing may read it."""
    width = -(-columns // 8) * 8 + 8
    return torch.full((rows, width), torch.nan, dtype=dtype, device=device)[:, :columns]


def make_operands(M, N, K, layout, dtype, device):
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


# More than a tile of each on every side and no multiple of any; less than one; one row; a single column
# and a single k, of which a box of the descriptor holds almost nothing. Multiples of 4, because in the
# interpreter bfloat16 is computed in float32, whose rows are aligned when 4 divides them.
SHAPES = [(300, 404, 204), (36, 52, 20), (1, 404, 68), (140, 4, 132), (68, 324, 4)]


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize("layout", ["NT", "NN"])
def test_every_tile_is_right_at_every_edge(device, config, layout):
    skip_unless_possible(config, device)
    for dtype in DTYPES:
        for M, N, K in SHAPES:
            a, b, out = make_operands(M, N, K, layout, dtype, device)
            assert_product(launch(a, b, out, config), a, b, (M, N, K, layout, dtype))
            behind = out.as_strided((M, out.stride(0) - N), out.stride(), N)
            assert behind.isnan().all(), "wrote behind the end of a row"


@pytest.mark.kernels_ci
@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_a_product_is_right(device, config):
    skip_unless_possible(config, device)
    a, b, out = make_operands(200, 648, 264, "NT", torch.float16, device)
    assert_product(launch(a, b, out, config), a, b)


@pytest.mark.parametrize("group_size", [1, 3, 8, 1 << 20])
@pytest.mark.parametrize("keys", [{}, {"PERSISTENT": 1}], ids=["", "persistent"])
def test_every_tile_of_out_is_written(device, group_size, keys):
    config = make_config(64, 64, 64, 4, 2, **keys)
    config["GROUP_SIZE_M"] = group_size
    skip_unless_possible(config, device)
    for M, N in ((1084, 68), (68, 1084), (636, 636)):
        a, b, out = make_operands(M, N, 8, "NN", torch.float16, device)
        assert_product(launch(a, b, out, config), a, b, (M, N))


@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_infinity_and_nan_stay_where_they_belong(device, config):
    skip_unless_possible(config, device)
    a, b, out = make_operands(70, 332, 68, "NT", torch.float16, device)
    a[3, 5], a[64, 0], b[7, 330] = torch.inf, torch.nan, -torch.inf
    launch(a, b, out, config)
    exact = (a.double() @ b.double()).to(out.dtype)
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out.isinf(), exact.isinf())


def test_an_out_of_any_strides_is_written_by_pointer(device):
    config = TWO_PARTS
    skip_unless_possible(config, device)
    a, b, _ = make_operands(70, 404, 68, "NT", torch.float16, device)
    for out in (
        torch.full((404, 70), torch.nan, dtype=a.dtype, device=device).t(),
        torch.full((140, 811), torch.nan, dtype=a.dtype, device=device)[::2, 1::2][:, :404],
    ):
        assert_product(launch(a, b, out, config), a, b, out.stride())


@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_a_launch_holds_for_other_tensors(device, config):
    skip_unless_possible(config, device)
    prepared = tma.prepare(*make_operands(70, 332, 68, "NT", torch.float16, device), config)
    a, b, out = make_operands(70, 332, 68, "NT", torch.float16, device)
    options = {key: config[key] for key in ("num_warps", "num_stages")}
    prepared.kernel[prepared.grid](*prepared.operands(a, b, out), *prepared.values, **options)
    assert_product(out, a, b)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"BLOCK_SIZE_M": 32}, "BLOCK_SIZE_M"),
        ({"BLOCK_SIZE_M": 96}, "power of two"),
        ({"BLOCK_SIZE_N": 32}, "BLOCK_SIZE_N"),
        ({"BLOCK_SIZE_N": 65}, "BLOCK_SIZE_N must be one of"),
        ({"BLOCK_SIZE_N": 224}, "BLOCK_SIZE_N must be one of"),
        ({"BLOCK_SIZE_N": 512}, "BLOCK_SIZE_N"),
        ({"BLOCK_SIZE_K": 32}, "BLOCK_SIZE_K"),
        ({"BLOCK_SIZE_K": 256}, "BLOCK_SIZE_K"),
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
        ({"SPLIT_K": 2}, "SPLIT_K"),
    ],
)
def test_a_bad_config_is_refused_with_the_reason(change, reason):
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
    assert "Triton 3.4" in gemm_kernel.kernels.config_problem(make_config(64, 64, 64, 4, 2))


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
    ]
    requests = [{"config": config, "layout": lay} for config in configs for lay in ("NT", "NN")]
    for report in compile_all("cuda:90", requests):
        assert report["bulk_copies"] > 0, report
        assert report["wgmma"] > 0, report
        assert report["wgmma_waits"] < 1, report
        assert report["stack"] == 0, report
        assert report["shared"] == tma._shared_memory(report["config"]), report


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
        (_operands(a=_WIDE[:64, :64].t()), "a is not contiguous"),
        (_operands(b=_WIDE[:64, 0:128:2]), "b is not contiguous"),
        (_operands(a=_WIDE[:1, :64].expand(64, 64)), "a has rows that overlap"),
        (_operands(b=torch.zeros(64, 1, dtype=torch.float16)), "b is not aligned"),
        (_operands(b=torch.zeros(64, 1, dtype=torch.float16).t()), "b is not aligned"),
        (_operands(a=torch.empty(1, dtype=torch.float16).expand(2**31, 64)), "a is"),
    ],
)
def test_operands_that_a_descriptor_cannot_hold_are_refused(operands, reason):
    assert reason in tma.operand_problem(make_config(64, 64, 64, 4, 2), *operands)


def test_sizes_beyond_32_bits_are_refused():
    huge = torch.empty(2**31, 8, dtype=torch.float16, device="meta")
    b = torch.zeros(8, 8, dtype=torch.float16)
    assert "too large" in tma.operand_problem(make_config(64, 64, 64, 4, 2), huge, b, huge)


def test_only_a_persistent_kernel_needs_an_aligned_out():
    operands = _operands(out=_WIDE[:64, 1:65])
    config = make_config(64, 64, 64, 4, 2)
    assert tma.operand_problem(config, *operands) is None
    assert "out is not aligned" in tma.operand_problem({**config, "PERSISTENT": 1}, *operands)


def test_aligned_slices_and_weights_are_taken():
    config = make_config(64, 64, 64, 4, 2, PERSISTENT=1)
    for b in (_WIDE[:64, 8:72], _WIDE[:64, 8:72].t(), torch.zeros(1, 64, dtype=torch.float16).t()):
        out = _WIDE[:64, 16 : 16 + b.shape[1]]
        assert tma.operand_problem(config, _WIDE[:64, 8:72], b, out) is None


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize("layout", ["NT", "NN"])
def test_every_tile_gives_the_same_bits_twice(device, config, layout):
    skip_unless_possible(config, device)
    for M, N, K in ((1000, 3000, 1001), (2048, 2560, 2048), (4097, 1283, 515)):
        a, b, out = make_operands(M, N, K, layout, torch.bfloat16, device)
        assert_product(launch(a, b, out, config), a, b, (M, N, K))
        again = torch.full_like(out, torch.nan)
        for _ in range(5):
            assert torch.equal(launch(a, b, again, config), out)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [TWO_PARTS, PERSISTENT], ids=label)
def test_offsets_beyond_32_bits(device, config):
    skip_unless_possible(config, device)
    M, N, K = 70_003, 32_768, 64
    a, b, out = make_operands(M, N, K, "NT", torch.float16, device)
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
