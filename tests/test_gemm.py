"""`gemm`: numbers, layouts, edges, errors, and the torch ops behind it."""

from typing import NamedTuple

import kernels
import pytest
import torch

from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

DTYPES = [torch.float16, torch.bfloat16]


class Case(NamedTuple):
    M: int
    N: int
    K: int

    def __str__(self):
        return f"{self.M}x{self.N}x{self.K}"


CASES = [
    Case(1, 64, 64),  # one row: decode
    Case(1, 1, 1),  # the least there is
    Case(17, 33, 19),  # multiples of nothing, below every tile
    Case(64, 128, 128),  # multiples of all tiles: no mask does anything
    Case(130, 70, 257),  # several tiles with a tail on each side
    Case(3, 1, 300),  # one column
    Case(5, 200, 8),  # K far below BLOCK_SIZE_K
    Case(33, 16, 1001),  # odd K: nothing is aligned
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_gemm_equals_the_exact_product(device, case, dtype, layout):
    a = torch.randn(case.M, case.K, dtype=dtype, device=device)
    b = torch.randn(case.K, case.N, dtype=dtype, device=device)
    if layout == "NT":
        b = b.t().contiguous().t()
    assert_product(gemm_kernel.gemm(a, b), a, b)
    out = torch.full((case.M, case.N), torch.nan, dtype=dtype, device=device)
    assert gemm_kernel.gemm(a, b, out=out) is out
    assert_product(out, a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 17, 256, 1000])
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (512, 511), (14336, 4096)])
def test_gemm_at_real_sizes(device, M, N, K, dtype):
    a = torch.randn(M, K, dtype=dtype, device=device)
    for b in (
        torch.randn(K, N, dtype=dtype, device=device),
        torch.randn(N, K, dtype=dtype, device=device).t(),
    ):
        assert_product(gemm_kernel.gemm(a, b), a, b)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (0, 3, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_operands_give_what_torch_gives(device, shape, dtype):
    M, N, K = shape
    a = torch.randn(M, K, dtype=dtype, device=device)
    b = torch.randn(K, N, dtype=dtype, device=device)
    expected = torch.mm(a, b)
    assert torch.equal(gemm_kernel.gemm(a, b), expected)
    out = torch.full((M, N), torch.nan, dtype=dtype, device=device)
    assert torch.equal(gemm_kernel.gemm(a, b, out=out), expected)


def _views(rows, columns, dtype, device):
    """Views of shape (rows, columns) that no contiguous tensor has; NaN lies around each of them."""

    def nan(*shape):
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    # fmt: off
    yield "transposed", nan(columns, rows).t()
    yield "columns of a wider buffer", nan(rows, columns + 7)[:, 5 : 5 + columns]
    yield "every second row", nan(2 * rows, columns)[::2]
    yield "every third column", nan(rows, 3 * columns)[:, ::3]
    yield "off alignment by one element", nan(rows * columns + 1)[1:].view(rows, columns)
    # fmt: on


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_any_strides_are_right(device, operand, dtype):
    M, N, K = 37, 45, 70
    sizes = {"a": (M, K), "b": (K, N), "out": (M, N)}
    for name, view in _views(*sizes[operand], dtype, device):
        tensors = {
            key: torch.randn(size, dtype=dtype, device=device) for key, size in sizes.items()
        }
        tensors[operand] = view
        if operand != "out":
            view.copy_(torch.randn(sizes[operand], device=device))
        strides = view.stride()
        a, b, out = tensors["a"], tensors["b"], tensors["out"]
        before = a.clone(), b.clone()
        out.fill_(torch.nan)
        assert gemm_kernel.gemm(a, b, out=out) is out
        assert_product(out, a, b, name)
        assert_product(gemm_kernel.gemm(a, b), a, b, name)
        assert view.stride() == strides
        assert torch.equal(a, before[0]), name
        assert torch.equal(b, before[1]), name


def test_expanded_operands_are_right(device):
    a = torch.randn(1, 40, dtype=torch.float16, device=device).expand(9, 40)
    b = torch.randn(40, 1, dtype=torch.float16, device=device).expand(40, 33)
    assert_product(gemm_kernel.gemm(a, b), a, b)


def test_bytes_around_out_are_untouched(device):
    M, N, K = 19, 21, 40
    buffer = torch.full((M + 2, N + 9), 7.0, dtype=torch.float16, device=device)
    out = buffer[1 : 1 + M, 4 : 4 + N]
    a = torch.randn(M, K, dtype=torch.float16, device=device)
    b = torch.randn(K, N, dtype=torch.float16, device=device)
    gemm_kernel.gemm(a, b, out=out)
    assert_product(out, a, b)
    out.fill_(7.0)
    assert (buffer == 7.0).all()


def test_nan_and_inf_stay_where_torch_has_them(device):
    a = torch.randn(20, 33, dtype=torch.float16, device=device)
    b = torch.randn(33, 18, dtype=torch.float16, device=device)
    a[3, 5], a[7, 1], b[4, 9] = torch.nan, torch.inf, -torch.inf
    exact = a.double() @ b.double()
    out = gemm_kernel.gemm(a, b)
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out.isinf(), exact.isinf())


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements(device):
    # 524,353 rows of 4096: the last ones lie past 2**31 elements (databricks/megablocks PR 185)
    M, N, K = 524_353, 16, 4096
    if torch.cuda.mem_get_info(device)[0] < 7 * 2**30:
        pytest.skip("needs 7 GB of free memory")
    a = torch.empty(M, K, dtype=torch.float16, device=device)
    a[-64:].normal_()
    b = torch.randn(K, N, dtype=torch.float16, device=device)
    assert_product(gemm_kernel.gemm(a, b)[-64:], a[-64:], b)


def _half(*shape):
    return lambda device: torch.randn(shape, dtype=torch.float16, device=device)


# fmt: off
BAD_OPERANDS = {
    "a of rank 1": (_half(8), _half(8, 4), "2D"),
    "b of rank 3": (_half(4, 8), _half(2, 8, 4), "2D"),
    "inner sizes": (_half(4, 8), _half(4, 8), r"Incompatible GEMM shapes: \(4, 8\) @ \(4, 8\)"),
    "two dtypes": (_half(4, 8), lambda d: _half(8, 4)(d).bfloat16(), "dtype float16 and bfloat16"),
    "float32": (lambda d: _half(4, 8)(d).float(), lambda d: _half(8, 4)(d).float(), "dtype float32"),
    "int8": (lambda d: _half(4, 8)(d).to(torch.int8), lambda d: _half(8, 4)(d).to(torch.int8), "dtype int8"),
    "two devices": (_half(4, 8), lambda d: torch.empty(8, 4, dtype=torch.float16, device="meta"), "one device"),
    "meta": (lambda d: _half(4, 8)("meta"), lambda d: _half(8, 4)("meta"), "GPU, got tensors on meta"),
    "sparse": (lambda d: _half(4, 8)(d).to_sparse(), _half(8, 4), "dense"),
}
# fmt: on


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", BAD_OPERANDS)
def test_bad_operands_are_refused(device, name):
    make_a, make_b, message = BAD_OPERANDS[name]
    with pytest.raises(ValueError, match=message):
        gemm_kernel.gemm(make_a(device), make_b(device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [(3, 6), (4, 5), (4, 7), (6, 4), (24,), (1, 4, 6)], ids=str)
def test_out_of_another_shape_is_refused(device, shape):
    a, b = _half(4, 8)(device), _half(8, 6)(device)
    out = torch.full(shape, 7.0, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"out of shape \(4, 6\), got"):
        gemm_kernel.gemm(a, b, out=out)
    assert (out == 7.0).all()


@pytest.mark.kernels_ci
def test_out_of_another_dtype_or_device_is_refused(device):
    a, b = _half(4, 8)(device), _half(8, 6)(device)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match="dtype"):
            gemm_kernel.gemm(a, b, out=torch.empty(4, 6, dtype=dtype, device=device))
    with pytest.raises(ValueError, match="one device"):
        gemm_kernel.gemm(a, b, out=torch.empty(4, 6, dtype=torch.float16, device="meta"))


@pytest.mark.kernels_ci
def test_out_that_shares_memory_with_an_operand_is_refused(device):
    # pytorch/pytorch 13892: tiles read what other tiles have already overwritten
    a, b = _half(64, 64)(device), _half(64, 64)(device)
    buffer = _half(96, 64)(device)
    for left, right, out in ((a, b, a), (a, b, b), (a, a, a), (buffer[:64], b, buffer[32:])):
        with pytest.raises(ValueError, match="share no memory"):
            gemm_kernel.gemm(left, right, out=out)


@pytest.mark.kernels_ci
def test_out_that_overlaps_itself_is_refused(device):
    # pytorch/pytorch 23063
    a, b = _half(4, 8)(device), _half(8, 6)(device)
    expanded = torch.empty(1, 6, dtype=torch.float16, device=device).expand(4, 6)
    windows = torch.empty(64, dtype=torch.float16, device=device).as_strided((4, 6), (3, 1))
    for out in (expanded, windows):
        with pytest.raises(ValueError, match="address of its own"):
            gemm_kernel.gemm(a, b, out=out)


def test_out_next_to_an_operand_is_taken(device):
    buffer = torch.randn(128 + 32, 64, dtype=torch.float16, device=device)
    a, b, out = buffer[:32], buffer[32:96], buffer[96:128]
    gemm_kernel.gemm(a, b, out=out)
    assert_product(out, a, b)


@pytest.mark.two_gpus
@pytest.mark.gpu
def test_operands_decide_the_device(device):
    # linkedin/Liger-Kernel 1303: launched on the current device instead of the tensors'
    a = torch.randn(64, 64, dtype=torch.float16, device="cuda:1")
    b = torch.randn(64, 64, dtype=torch.float16, device="cuda:1")
    with torch.cuda.device(0):
        assert_product(gemm_kernel.gemm(a, b), a, b)
        assert torch.cuda.current_device() == 0
