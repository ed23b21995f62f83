"""The `gluon` family. It runs on Hopper only: without that GPU its rules are tested, and that it compiles."""

import os
import subprocess
import sys

import kernels
import pytest
import torch
import triton

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
gluon = gemm_kernel.kernels.gluon

HOPPER = gemm_kernel.device.DeviceProperties(
    backend="cuda", capability=(9, 0), multiprocessors=132, shared_memory=227 * 1024
)
TILES = list(gluon.tiles())
has_gluon = pytest.mark.skipif(gluon.IMPORT_PROBLEM is not None, reason=str(gluon.IMPORT_PROBLEM))
hopper_only = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)


def make_config(rows=64, columns=96, swap=False, **changes):
    return {
        "kernel": "gluon",
        "BLOCK_SIZE_M": columns if swap else rows,
        "BLOCK_SIZE_N": rows if swap else columns,
        "BLOCK_SIZE_K": 64,
        "GROUP_SIZE_M": 8,
        "num_warps": 4,
        "num_stages": gluon.most_stages(rows, columns, b_is_nt=swap),
        **({"SWAP": 1} if swap else {}),
        **changes,
    }


def make_operands(M, N, K, dtype=torch.float16, layout="NN", device="cpu"):
    """a, b and an out of NaN, each in rows of a multiple of 16 bytes between rows of NaN."""

    def matrix(rows, columns, scale):
        width = (columns + 7) // 8 * 8 + 8
        full = torch.full((rows + 2, width), float("nan"), dtype=dtype, device=device)
        view = full[1 : rows + 1, :columns]
        return view.copy_(torch.randn(rows, columns, device=device) * scale)

    a = matrix(M, K, 1.0)
    b = matrix(N, K, K**-0.5).t() if layout == "NT" else matrix(K, N, K**-0.5)
    return a, b, matrix(M, N, float("nan"))


def values_of(launch):
    """What a launch passes beside its operands, by name."""
    return dict(zip(launch.kernel.arg_names[len(launch.operands) :], launch.values))


def test_a_tile_is_as_wide_as_any_multiple_of_8_but_those_before_one_of_64():
    widths = {block_n for _, block_n in TILES}
    assert widths == {width for width in range(64, 353, 8) if width % 64 != 56}
    for block_n in widths:
        first, *rest = gluon._box_sizes(block_n)
        assert first == 64
        assert rest == sorted(rest, reverse=True)
        assert sum(rest) == block_n % 64


@pytest.mark.parametrize("rows_multiple", [8, 64])
@pytest.mark.parametrize("size", TILES)
def test_a_ring_is_as_deep_as_fits(monkeypatch, size, rows_multiple):
    monkeypatch.setattr(gluon, "_STAGE_ROWS_MULTIPLE", rows_multiple)
    block_m, block_n = size
    for b_is_nt in (False, True):
        rows = gluon.stage_rows(*size, b_is_nt)
        assert rows % rows_multiple == 0
        assert rows >= block_m + block_n
        stages = gluon.most_stages(*size, b_is_nt)
        assert stages >= 3
        assert gluon.shared_memory(block_m, rows, stages) <= 227 * 1024
        assert stages == 12 or gluon.shared_memory(block_m, rows, stages + 1) > 227 * 1024


@has_gluon
@pytest.mark.parametrize(
    ("layout", "rows_multiple", "stages"), [("NT", 8, 8), ("NT", 64, 6), ("NN", 8, 6)]
)
def test_of_a_ring_that_is_too_deep_where_a_stage_is_larger_what_fits_is_used(
    monkeypatch, layout, rows_multiple, stages
):
    monkeypatch.setattr(gluon, "_STAGE_ROWS_MULTIPLE", rows_multiple)
    config = make_config(64, 144, num_stages=8)
    # As a file has it, whose entries are of another layout or from another Triton.
    assert gluon._problem(config, None) is None
    assert gluon._least_shared_memory(config) <= 227 * 1024
    values = values_of(gluon.prepare(*make_operands(64, 144, 64, layout=layout), config))
    assert values["NUM_STAGES"] == stages
    assert gluon.shared_memory(64, values["STAGE_ROWS"], stages, values["STAGING"]) <= 227 * 1024


@has_gluon
@pytest.mark.skipif(gluon.INTERPRETED, reason="refused in the interpreter")
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("size", TILES)
def test_every_tile_is_accepted(size, swap):
    assert gemm_kernel.kernels.config_problem(make_config(*size, swap), HOPPER) is None


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("size", TILES)
def test_every_tile_is_valid_without_a_device(size, swap):
    assert gemm_kernel.kernels.config_problem(make_config(*size, swap)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"BLOCK_SIZE_M": 192, "BLOCK_SIZE_N": 256}, "BLOCK_SIZE_N must be at most 200 where"),
        ({"BLOCK_SIZE_M": 96}, "BLOCK_SIZE_M must be one of 64, 128, 192"),
        ({"BLOCK_SIZE_M": 256}, "BLOCK_SIZE_M must be one of"),
        ({"BLOCK_SIZE_M": 360}, "BLOCK_SIZE_M must be from"),
        ({"swap": True, "BLOCK_SIZE_N": 96}, "BLOCK_SIZE_N must be one of 64, 128, 192"),
        ({"swap": True, "BLOCK_SIZE_M": 100}, "BLOCK_SIZE_M must be a multiple of 8"),
        ({"swap": True, "BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 192}, "BLOCK_SIZE_M must be at most"),
        ({"SWAP": 2}, "SWAP must be from"),
        ({"BLOCK_SIZE_N": 100}, "BLOCK_SIZE_N must be a multiple of 8"),
        ({"BLOCK_SIZE_N": 248}, "but not 8 less than a multiple of 64"),
        ({"BLOCK_SIZE_N": 56}, "BLOCK_SIZE_N must be from"),
        ({"BLOCK_SIZE_M": 32}, "BLOCK_SIZE_M must be from"),
        ({"BLOCK_SIZE_K": 128}, "BLOCK_SIZE_K must be from"),
        ({"A_IN_REGISTERS": 0}, "A_IN_REGISTERS is not a key"),
        ({"SPLIT_K": 2}, "SPLIT_K is not a key"),
        ({"PDL": 2, "PREFETCH": 2}, "PREFETCH is not a key"),
        ({"num_warps": 8}, "num_warps must be 4"),
        ({"num_stages": 1}, "num_stages must be at least 2"),
        ({"maxnreg": 128}, "maxnreg must be absent"),
    ],
)
def test_bad_config_is_refused(changes, reason):
    assert reason in gemm_kernel.kernels.config_problem(make_config(**changes))


@pytest.mark.parametrize(
    "properties",
    [
        HOPPER._replace(capability=(8, 9)),
        HOPPER._replace(capability=(10, 0)),
        HOPPER._replace(capability=(12, 0)),
        HOPPER._replace(backend="rocm", capability=None),
        HOPPER._replace(backend="xpu", capability=None),
        HOPPER._replace(backend="cpu", capability=None),
    ],
)
def test_other_devices_are_refused(properties):
    assert "9.0" in gemm_kernel.kernels.config_problem(make_config(), properties)


@has_gluon
@pytest.mark.skipif(gluon.INTERPRETED, reason="refused in the interpreter")
def test_too_much_shared_memory_is_refused():
    config = make_config(128, 256, num_stages=5)
    assert "shared memory" in gemm_kernel.kernels.config_problem(config, HOPPER)


@has_gluon
@pytest.mark.parametrize(
    ("size", "num_stages", "in_flight", "staging"),
    [
        ((64, 128), 8, 1, 2),  # a lone consumer
        ((128, 192), 5, 1, 1),
        ((128, 160), 4, 0, 2),  # a short ring
        ((128, 256), 4, 0, 2),
        ((192, 112), 5, 0, 1),  # two others multiply meanwhile
    ],
)
def test_a_step_stays_in_flight_and_chunks_of_out_are_staged_as_the_tile_allows(
    size, num_stages, in_flight, staging
):
    operands = make_operands(64, 64, 64, layout="NT")
    launch = gluon.prepare(*operands, make_config(*size, num_stages=num_stages))
    values = values_of(launch)
    assert (values["STEPS_IN_FLIGHT"], values["STAGING"]) == (in_flight, staging)


@pytest.mark.skipif(not gluon.INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_interpreter_is_refused():
    assert gemm_kernel.kernels.config_problem(make_config(), HOPPER) is not None


@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_aligned_operands_are_accepted(layout):
    for M, N, K in ((1, 8, 8), (17, 40, 19), (64, 96, 64), (5, 8, 1)):
        operands = make_operands(M, N, K, layout=layout)
        assert gemm_kernel.kernels.operand_problem(make_config(), *operands) is None


def test_a_stride_that_is_never_used_may_be_any():
    a, b, out = make_operands(1, 40, 24)
    a, out = a.as_strided((1, 24), (3, 1)), out.as_strided((1, 40), (5, 1))
    assert gemm_kernel.kernels.operand_problem(make_config(), a, b, out) is None
    a, b, out = make_operands(17, 40, 1)
    a, b = a.as_strided((17, 1), (16, 3)), b.as_strided((1, 40), (5, 1))
    assert gemm_kernel.kernels.operand_problem(make_config(), a, b, out) is None
    # A row stride of 1 looks like that of a transposed matrix.
    b = b.as_strided((1, 40), (1, 1))
    assert gemm_kernel.kernels.operand_problem(make_config(), a, b, out) is None


@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_that_a_descriptor_would_write_behind_are_refused(dtype, layout):
    # Rows of a and b may end anywhere; only what is written may not.
    for N in range(1, 25):
        operands = make_operands(20, N, 61, dtype, layout)
        problem = gemm_kernel.kernels.operand_problem(make_config(), *operands)
        if N % 8:
            assert problem == "out has rows that do not end at a multiple of 16 bytes"
        else:
            assert problem is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a, b, out: (a.t().contiguous().t(), b, out), "a is not contiguous along its"),
        (lambda a, b, out: (a, b, out.t().contiguous().t()), "out is not contiguous along its"),
        (lambda a, b, out: (a, b.repeat_interleave(2, 1)[:, ::2], out), "b is not contiguous"),
        (lambda a, b, out: (a[:, 1:], b[1:], out), "a is not aligned to 16 bytes"),
        (lambda a, b, out: (a, b[:, 1:], out[:, 1:]), "b is not aligned to 16 bytes"),
        (lambda a, b, out: (a, b[:, :88], out[:, 4:92]), "out is not aligned to 16 bytes"),
        (lambda a, b, out: (a.new_zeros(64, 60)[:, :24], b[:24], out), "a is not aligned"),
        (lambda a, b, out: (a[:1].expand(64, -1), b, out), "a has rows that overlap"),
        (lambda a, b, out: (a[:1].expand(2**31, -1), b, out), "a is too large for a descriptor"),
    ],
)
def test_operands_that_tma_cannot_address_are_refused(change, reason):
    operands = change(*make_operands(64, 96, 64))
    assert reason in gemm_kernel.kernels.operand_problem(make_config(), *operands)


# What a launch does, up to the launch: Triton is told of a Hopper that is not there.
_COMPILE = r"""
import re
import sys
import kernels, torch, triton
from triton.backends.compiler import GPUTarget

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *device: 0)
    get_device_capability = staticmethod(lambda *device: (9, 0))

triton.runtime.driver.set_active(Hopper())
gluon = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1).kernels.gluon
tiles = [(*tile, swap) for tile in gluon.tiles() for swap in (0, 1)][int(sys.argv[1]) :: int(sys.argv[2])]
for index, (rows, columns, swap) in enumerate(tiles):
    layout = ("NN", "NT")[index % 2]
    # The ring is the largest buffer at its shallowest, too.
    stages = gluon.most_stages(rows, columns, swap or layout == "NT") if index % 3 else 2
    block_m, block_n = (columns, rows) if swap else (rows, columns)
    config = dict(BLOCK_SIZE_M=block_m, BLOCK_SIZE_N=block_n, BLOCK_SIZE_K=64, GROUP_SIZE_M=8,
                  num_warps=4, num_stages=stages, PDL=index // 4 % 4, SWAP=swap)
    a, b, out = torch.empty(3, 64, 64, dtype=(torch.float16, torch.bfloat16)[index // 2 % 2])
    b = b.t() if layout == "NT" else b
    launch = gluon.prepare(a, b, out, config)
    bias = out[0] if index // 8 % 2 else None
    compiled = launch.kernel.warmup(*launch.arguments(a, b, out, bias), grid=launch.grid,
                                    num_warps=4, num_stages=stages, **launch.options)
    values = dict(zip(launch.kernel.arg_names[-len(launch.values) :], launch.values))
    needed = gluon.shared_memory(rows, values["STAGE_ROWS"], stages, values["STAGING"])
    assert 0 <= needed - compiled.metadata.shared < 1024, (config, needed)
    assert needed <= 227 * 1024, config
    ptx = compiled.asm["ptx"]
    before, *after = ptx.split("griddepcontrol.launch_dependents")
    assert len(after) == (config["PDL"] in (1, 2)), config
    # What follows takes places when this kernel's last step is multiplied, not loaded: the loader waits once more.
    waits_last = before.rfind("mbarrier.try_wait") > before.rfind("cp.async.bulk.tensor.2d.shared::cluster.global")
    assert waits_last == (config["PDL"] == 2) or not after, config
    width = columns if columns <= 256 else 192
    assert f".m64n{width}k16." in ptx and f".m64n{columns - width or width}k16." in ptx
    # The ring lies at the start of shared memory: rows of a in its stages, where out is staged at last, are the only
    # addresses before its end, and what comes next begins there.
    ring = gluon.shared_memory(rows, values["STAGE_ROWS"], stages, 0) - 1024
    found = re.findall(r"@global_smem, i\d+ (\d+)|@global_smem to i\d+\), (\d+)", compiled.asm["llir"])
    addresses = {int(first or second) for first, second in found}
    staged = {stage * ring // stages + row * 128 for stage in range(stages) for row in range(0, rows, 64)}
    assert ring in addresses, (config, ring, addresses)
    assert {address for address in addresses if address < ring} <= staged, (config, ring, addresses)
print("compiled", len(tiles))
"""


@has_gluon
@pytest.mark.parametrize("part", range(5))
def test_every_tile_compiles_and_its_ring_lies_at_the_start_of_shared_memory(part):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The log of ptxas, which a kernel from the cache has none of.
    log = {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_ALWAYS_COMPILE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(part), "5"],
        env={**environment, **log},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    count = len(range(part, 2 * len(TILES), 5))
    assert f"compiled {count}" in result.stdout
    assert result.stdout.count(" 0 bytes spill stores") == count
    # It warns of this where an accumulator is touched while wgmma is under way: then each one is waited for.
    assert "serialized" not in result.stdout


def launch(a, b, out, config):
    properties = gemm_kernel.device.device_properties(a.device)
    assert gemm_kernel.kernels.config_problem(config, properties) is None
    assert gemm_kernel.kernels.operand_problem(config, a, b, out) is None
    return gemm_kernel.kernels.launch_gemm_kernel(a, b, out, config)


def assert_right(a, b, out):
    exact = a.double() @ b.double()
    bound = 2 * (exact.to(out.dtype).double() - exact).abs().max() + 1e-5
    assert (out.double() - exact).abs().max() <= bound


@pytest.mark.gpu
@hopper_only
@has_gluon
@pytest.mark.parametrize(
    ("layout", "dtype"), [("NN", torch.float16), ("NT", torch.float16), ("NT", torch.bfloat16)]
)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("size", TILES)
def test_ragged_product_is_right_and_repeats(size, swap, layout, dtype):
    config = make_config(*size, swap)
    for M, N, K in (
        (1, 40, 8),  # less than a tile, less than a k step
        (130, 208, 77),  # odd sizes in aligned rows, but for out: its rows end at 16 bytes
        (333, 1000, 1032),  # a ring that wraps
        (2000, 6152, 130),  # several tiles for each CTA, fewer k steps than stages
        (1100, 6200, 520),  # several tiles for each CTA, which begin at different stages
    ):
        a, b, out = make_operands(M, N, K, dtype, layout, "cuda")
        assert_right(a, b, launch(a, b, out, config))
        first = out.clone()
        assert torch.equal(first, launch(a, b, out.fill_(float("nan")), config))


@pytest.mark.gpu
@hopper_only
@has_gluon
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("size", [(192, 192), (128, 168), (64, 328)])
def test_rows_outside_of_out_stay_untouched(size, swap):
    a, b, _ = make_operands(100, 200, 128, device="cuda")
    full = torch.full((300, 400), 7.0, dtype=a.dtype, device="cuda")
    launch(a, b, full[:100, :200], make_config(*size, swap))
    assert (full[100:] == 7).all()
    assert (full[:, 200:] == 7).all()


@pytest.mark.gpu
@hopper_only
@has_gluon
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("size", [(64, 80), (128, 168), (128, 320)])
def test_nan_stays_in_its_row(size, swap):
    a, b, out = make_operands(100, 200, 100, device="cuda")
    a[3, 99] = float("nan")
    launch(a, b, out, make_config(*size, swap))
    assert out[3].isnan().all()
    assert out.isnan().sum() == 200


@pytest.mark.gpu
@hopper_only
@has_gluon
def test_one_launch_serves_other_tensors_of_the_same_form():
    config = make_config(128, 256)
    a, b, out = make_operands(300, 512, 256, device="cuda")
    prepared = gluon.prepare(a, b, out, config)
    for _ in range(2):
        a, b, out = make_operands(300, 512, 256, device="cuda")
        prepared.kernel[prepared.grid](*prepared.arguments(a, b, out), num_warps=4, num_stages=4)
        assert_right(a, b, out)


@pytest.mark.gpu
@hopper_only
@has_gluon
def test_new_sizes_are_no_new_compile():
    config = make_config(64, 128)
    compiled = set()
    for M, N, K in ((1, 8, 8), (16, 128, 64), (333, 1000, 1032)):
        a, b, out = make_operands(M, N, K, device="cuda")
        prepared = gluon.prepare(a, b, out, config)
        compiled.add(
            prepared.kernel.warmup(
                *prepared.arguments(a, b, out),
                grid=prepared.grid,
                num_warps=4,
                num_stages=8,
            ).hash
        )
    assert len(compiled) == 1


def test_version_bounds_match_what_is_installed():
    supported = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
    assert supported or gluon.IMPORT_PROBLEM is not None


@pytest.mark.gpu
@hopper_only
@has_gluon
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("swap", [False, True])
# Of two wgmma, as of 328 columns, what is shared may be in the left one of a tile and the right one of another.
@pytest.mark.parametrize("size", [(64, 192), (128, 168), (192, 96), (128, 328)])
def test_the_last_tiles_reach_back_not_beyond(size, swap, layout):
    # What they share with those before them comes out as from a tile of its own, and so as from either.
    config = make_config(*size, swap)
    rows, columns = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]
    for M, N in ((rows + 1, 264), (3 * rows - 5, columns + 8), (rows, 3 * columns - 16)):
        a, b, out = make_operands(M, N, 520, layout=layout, device="cuda")
        launch(a, b, out, config)
        assert_right(a, b, out)
        alone = torch.empty_like(out[-rows:])
        launch(a[-rows:], b, alone, config)
        assert torch.equal(out[-rows:], alone)
        if columns <= N:
            alone = torch.empty_like(out[:, -columns:])
            launch(a, b[:, -columns:], alone, config)
            assert torch.equal(out[:, -columns:], alone)
