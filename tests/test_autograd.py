"""Gradients and the rules of torch around them: exact, for what needs one, and never dropped in silence."""

import kernels
import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
gemm, linear = gemm_kernel.gemm, gemm_kernel.op.linear

M, N, K = 15, 24, 40


def make(*shape, device, dtype=torch.float16, grad=True):
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=grad)


def operands(device, dtype=torch.float16, leading=(3, 5)):
    """input (..., K), weight (N, K), bias (N,)."""
    return [make(*shape, device=device, dtype=dtype) for shape in ((*leading, K), (N, K), (N,))]


@pytest.fixture
def launches(monkeypatch):
    """The layouts of b in the order in which products are launched."""
    seen = []
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def spy(a, b, out, config, *bias):
        seen.append(gemm_kernel.calls.layout_of(b))
        return launch(a, b, out, config, *bias)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
    # A launch that is kept goes another way when it is repeated.
    monkeypatch.setattr(gemm_kernel.kernels, "repeatable_launch", lambda *_: None)
    return seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leading", [(), (7,), (3, 5), (2, 1, 3)], ids=str)
def test_gradients_of_a_layer_are_the_exact_ones(device, dtype, leading):
    input, weight, bias = operands(device, dtype, leading)
    out = linear(input, weight, bias)
    grad = torch.randn_like(out)
    out.backward(grad)
    rows, grad_rows = input.detach().reshape(-1, K), grad.reshape(-1, N)
    assert out.shape == (*leading, N)
    assert_product(out.detach().view(-1, N), rows, weight.detach().t(), bias=bias.detach())
    assert_product(input.grad.view(-1, K), grad_rows, weight.detach())
    assert_product(weight.grad, grad_rows.t(), rows)
    ones = torch.ones(1, len(grad_rows), dtype=dtype, device=device)
    assert_product(bias.grad[None], ones, grad_rows)
    # As the weight lies: an optimizer's foreach kernels want it so.
    assert weight.grad.stride() == weight.stride()


def test_gradients_of_gemm_with_a_bias_are_the_exact_ones(device):
    a, b, bias = (make(*shape, device=device) for shape in ((M, K), (K, N), (N,)))
    grad = make(M, N, device=device, grad=False)
    gemm(a, b, bias=bias).backward(grad)
    assert_product(a.grad, grad, b.detach().t())
    assert_product(b.grad, a.detach().t(), grad)
    assert_product(bias.grad[None], torch.ones_like(grad[:, :1]).t(), grad)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_only_gradients_that_are_needed_are_computed(device, launches, needed):
    tensors = operands(device)
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index in needed)
    linear(*tensors).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [
        index in needed for index in range(3)
    ]
    assert launches == ["NT"] + ["NN"] * (0 in needed) + ["NN"] * (1 in needed)


def test_a_weight_that_is_used_twice_gets_both_gradients(device):
    input, weight, _ = operands(device)
    square = make(K, K, device=device)
    twice = linear(linear(input, square), square).float().sum()
    twice.backward()
    exact = square.detach().double().requires_grad_()
    (input.detach().double() @ exact.t() @ exact.t()).sum().backward()
    error = (square.grad - exact.grad).abs().max() / exact.grad.abs().max()
    assert error < 5e-3


def test_a_gradient_has_a_gradient(device):
    tensors = operands(device)

    def second_order(function, tensors):
        (grad,) = torch.autograd.grad(
            function(*tensors).square().sum(), tensors[0], create_graph=True
        )
        return torch.autograd.grad(grad.sum(), tensors)

    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = second_order(torch.nn.functional.linear, exact)
    for grad, other in zip(second_order(linear, tensors), expected):
        assert (grad - other).abs().max() <= 5e-3 * other.abs().max()


def test_no_gradient_is_kept_where_none_is_wanted(device):
    tensors = operands(device)
    with torch.no_grad():
        assert not linear(*tensors).requires_grad
        assert not gemm(tensors[0][0], tensors[1].t()).requires_grad
    with torch.inference_mode():
        assert linear(*tensors).is_inference()
        assert gemm(tensors[0][0], tensors[1].t()).is_inference()
    for needed in range(3):
        for index, tensor in enumerate(tensors):
            tensor.requires_grad_(index == needed)
        assert linear(*tensors).requires_grad
        assert gemm(tensors[0][0], tensors[1].t(), bias=tensors[2]).requires_grad


@pytest.mark.parametrize("needed", ["a", "b", "bias", "out"])
def test_out_with_any_tensor_that_needs_a_gradient_is_refused(device, needed):
    shapes = {"a": (M, K), "b": (K, N), "bias": (N,), "out": (M, N)}
    call = {
        name: make(*shape, device=device, grad=name == needed) for name, shape in shapes.items()
    }
    with pytest.raises(RuntimeError, match="gradient"):
        gemm(**call)
    with torch.no_grad():
        gemm(**call)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_converts_as_for_matmul(device, dtype):
    # NVIDIA/torch-harmonics PR 246: mixed types, or autocast ignored
    full = [tensor.detach().requires_grad_() for tensor in operands(device, torch.float32)]
    input, weight, bias = full
    with torch.autocast(device.type, dtype):
        out = linear(*full)
        assert out.dtype == torch.nn.functional.linear(*full).dtype == dtype
        halves = [tensor.detach().to(dtype) for tensor in full]
        assert torch.equal(out, linear(*halves))
        assert torch.equal(gemm(input[0], weight.t(), bias=bias), out[0])
        other = torch.bfloat16 if dtype == torch.float16 else torch.float16
        for mixed in (weight, halves[1], weight.to(other)):
            assert gemm(halves[0][0], mixed.t()).dtype == dtype
        # What torch.matmul does not convert either.
        with pytest.raises(ValueError, match="dtype"):
            gemm(input[0], weight.double().t())
        with torch.no_grad(), pytest.raises(ValueError, match="dtype"):
            gemm(input[0], weight.t(), out=torch.empty(5, N, device=device))
    out.sum().backward()
    assert [tensor.grad.dtype for tensor in full] == [torch.float32] * 3
    rows = input.detach().reshape(-1, K).to(dtype)
    assert_product(weight.grad.to(dtype), torch.ones(N, M, dtype=dtype, device=device), rows)
    with torch.autocast(device.type, enabled=False), pytest.raises(ValueError, match="float32"):
        linear(*full)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_computes_the_same(device, launches, use_reentrant):
    tensors = operands(device)
    linear(*tensors).square().sum().backward()
    expected = [tensor.grad.clone() for tensor in tensors]
    before = len(launches)
    for tensor in tensors:
        tensor.grad = None
    checkpoint(linear, *tensors, use_reentrant=use_reentrant).square().sum().backward()
    assert len(launches) == 2 * before + 1
    assert all(map(torch.equal, [tensor.grad for tensor in tensors], expected))


def test_vmap_over_the_rows_is_one_product(device, launches):
    input, weight, bias = operands(device)
    for in_dim in (0, 1):
        launches.clear()
        mapped = torch.func.vmap(linear, (in_dim, None, None))(input, weight, bias)
        assert launches == ["NT"]
        assert torch.equal(mapped, linear(input.movedim(in_dim, 0), weight, bias))
    mapped = torch.func.vmap(gemm, (0, None))(input, weight.t())
    mapped.sum().backward()
    assert_product(
        weight.grad,
        torch.ones_like(input[..., :1]).view(-1, 1).expand(-1, N).t(),
        input.view(-1, K),
    )
    assert input.grad is not None


def test_what_vmap_cannot_do_is_said(device):
    a, b, out = (make(2, *shape, device=device, grad=False) for shape in ((M, K), (K, N), (M, N)))
    for call, in_dims in ((gemm, (0, 0)), (gemm, (None, 0)), (gemm, (0, None, 0))):
        arguments = [t if dim == 0 else t[0] for t, dim in zip((a, b, out), in_dims)]
        with pytest.raises(NotImplementedError, match="vmap"):
            torch.func.vmap(call, in_dims)(*arguments)
    with pytest.raises(NotImplementedError, match="weight or the bias"):
        torch.func.vmap(linear, (None, None, 0))(a[0], b[0].t(), out[:, 0])


def test_a_transform_that_is_not_supported_never_drops_a_gradient(device):
    a, b, bias = (make(*shape, device=device, grad=False) for shape in ((M, K), (K, N), (N,)))
    for call in (lambda a: gemm(a, b), lambda a: linear(a, b.t(), bias)):
        with pytest.raises(NotImplementedError, match="forward mode"):
            torch.func.jvp(call, (a,), (a,))
        with forward_ad.dual_level():
            with pytest.raises(NotImplementedError, match="forward mode"):
                call(forward_ad.make_dual(a, a))
            assert torch.equal(call(a), call(a))
        with pytest.raises(RuntimeError):
            torch.func.grad(lambda a, call=call: call(a).sum())(a)


@pytest.mark.kernels_ci
def test_ops_keep_their_contract(device):
    ops = gemm_kernel.op.ops
    input, weight, bias = operands(device)
    plain = [tensor.detach() for tensor in (input, weight, bias)]
    transposed = make(5, 3, K, device=device, grad=False).movedim(0, 1).requires_grad_()
    shifted = make(M * K + 1, device=device, grad=False)[1:].view(3, 5, K).requires_grad_()
    for first in (transposed, shifted):
        opcheck(ops.linear, (first, weight, bias))
    opcheck(ops.linear, (input, weight, None))
    opcheck(ops.linear_forward, plain)
    a, b, out = plain[0][0], plain[1].t(), torch.empty(5, N, dtype=torch.float16, device=device)
    opcheck(ops.gemm, (a.clone().requires_grad_(), weight.t()))
    opcheck(ops.gemm_forward, (a, b))
    opcheck(ops.gemm_out, (a, b, out))
    opcheck(ops.gemm_out, (a, b, out.t().contiguous().t(), plain[2]))
