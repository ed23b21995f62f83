"""`gemm`, `linear`, and the torch ops behind them: fakes, gradients, vmap, autocast."""

from __future__ import annotations

import math
from typing import Callable

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import calls
from ._ops import add_op_namespace_prefix, ops
from .operands import check_linear, check_operands, check_shapes


def _gemm_fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    check_operands(a, b)
    return a.new_empty(a.shape[0], b.shape[1])


def _linear_fake(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    check_linear(input, weight, bias)
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def _save_operands(ctx, inputs, output) -> None:
    a, b = inputs[:2]
    # An operand is kept only for the gradient of the other one.
    ctx.save_for_backward(
        a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None
    )


def _gemm_backward(ctx, grad):
    a, b = ctx.saved_tensors
    grad_a = None if b is None else gemm(grad, b.t())
    grad_b = None if a is None else gemm(a.t(), grad)
    return grad_a, grad_b


def _linear_backward(ctx, grad):
    input, weight = ctx.saved_tensors
    grad_input = grad_weight = grad_bias = None
    rows = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
    if weight is not None:
        grad_input = linear(grad, weight.t())
    if input is not None:
        grad_weight = gemm(rows.t(), input.reshape(rows.shape[0], input.shape[-1]))
    if ctx.needs_input_grad[2]:
        grad_bias = rows.sum(0)
    return grad_input, grad_weight, grad_bias


def _gemm_vmap(info, in_dims, a, b):
    if in_dims[1] is not None:
        raise _no_vmap("b")
    return linear(a.movedim(in_dims[0], 0), b.t()), 0


def _linear_vmap(info, in_dims, input, weight, bias):
    if in_dims[1] is not None or in_dims[2] is not None:
        raise _no_vmap("the weight or the bias")
    return linear(input.movedim(in_dims[0], 0), weight, bias), 0


def _out_vmap(info, in_dims, *operands):
    raise _no_vmap("out")


def _no_vmap(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"vmap over {what} is not supported by gemm, which takes one b for all rows; call it in a loop, "
        "or use torch.bmm"
    )


# What autocast converts, as for torch.matmul.
_CAST = (torch.float16, torch.bfloat16, torch.float32)


def _autocast(op: Callable, device_type: str) -> Callable:
    """``op`` under autocast: as torch.matmul, in autocast's dtype (but a weight is converted at each call)."""

    def cast(*operands: torch.Tensor | None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            return op(
                *(
                    one.to(dtype) if one is not None and one.dtype in _CAST else one
                    for one in operands
                )
            )

    return cast


def _refuse_tangents(*operands: torch.Tensor | None) -> None:
    """Torch asks no op of ours for a forward-mode gradient, and would go on without it."""
    for operand in operands:
        if operand is not None and forward_ad.unpack_dual(operand).tangent is not None:
            raise NotImplementedError(
                "gemm has gradients in reverse mode only, and an operand carries a tangent of forward mode; "
                "use torch.matmul there"
            )


def _define(
    name: str,
    schema: str,
    forward: Callable,
    fake: Callable,
    vmap: Callable,
    backward: Callable | None = None,
) -> None:
    """One op of this build: ``name`` under its namespace."""
    # `define` and `impl` cost a call several microseconds less than `custom_op`.
    torch.library.define(add_op_namespace_prefix(name), schema)
    torch.library.impl(add_op_namespace_prefix(name), "default", forward)
    torch.library.register_fake(add_op_namespace_prefix(name), fake)
    torch.library.register_vmap(add_op_namespace_prefix(name), vmap)
    if backward is not None:
        torch.library.register_autograd(
            add_op_namespace_prefix(name), backward, setup_context=_save_operands
        )


# A build that is loaded through two spellings of its path is imported twice, under one namespace: the
# ops of the first import serve both.
if not hasattr(ops, "gemm"):
    # The forward ops are for operands that need no gradient: looking for one costs an eager call more than
    # the rest.
    _GEMM = "(Tensor a, Tensor b) -> Tensor"
    _define("gemm", _GEMM, calls.gemm, _gemm_fake, _gemm_vmap, _gemm_backward)
    _define("gemm_forward", _GEMM, calls.gemm, _gemm_fake, _gemm_vmap)
    _LINEAR = "(Tensor input, Tensor weight, Tensor? bias) -> Tensor"
    _define("linear", _LINEAR, calls.linear, _linear_fake, _linear_vmap, _linear_backward)
    _define("linear_forward", _LINEAR, calls.linear, _linear_fake, _linear_vmap)
    _OUT = "(Tensor a, Tensor b, Tensor(a!) out, Tensor? bias=None) -> ()"
    _define("gemm_out", _OUT, calls.gemm_out, check_operands, _out_vmap)

    # A fragment ends with the object that made it. Its keys are those that only autocast adds to a call.
    _fragment = torch.library.Library(add_op_namespace_prefix("").rstrip(":"), "FRAGMENT")
    for _name in ("gemm", "gemm_forward", "linear", "linear_forward"):
        for _device_type in ("cuda", "xpu", "cpu"):
            _cast = _autocast(getattr(ops, _name).default, _device_type)
            _fragment.impl(_name, _cast, f"Autocast{_device_type.upper()}")


# Called by their overload, which torch would have to find at each call, and that by what it calls in C++: a
# frame of Python less. What torch.compile traces is the overload itself, which it knows.
_forward, _linear_forward, _out = (
    getattr(op.default, "_op", op.default)
    for op in (ops.gemm_forward, ops.linear_forward, ops.gemm_out)
)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``a @ b + bias`` with float32 accumulation, using the configuration tuned for this GPU.

    Shapes: a (M, K), b (K, N), bias (N,), out (M, N). Any strides; float16 or bfloat16, all alike. Where b is
    the transpose of a weight (N, K), as in ``gemm(x, weight.t())``, the files for layout NT are used.
    Returns: ``out``, allocated when not given, each element rounded once. An empty K gives zeros, or the bias.
    Differentiable in a, b and bias when ``out`` is not given.
    Raises: ValueError when ranks, shapes, dtypes or devices do not match, or ``out`` shares memory with an
    operand; RuntimeError when ``out`` is given and an operand needs a gradient.
    """
    needs_gradient = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if forward_ad._current_level >= 0:
        _refuse_tangents(a, b, out, bias)
    if out is None:
        if bias is not None:
            check_shapes(a, b, out, bias)
            try:
                return linear(a, b.t(), bias)
            except ValueError:
                # The same under the names that the operands have here.
                check_operands(a, b, None, bias)
                raise
        if needs_gradient:
            return ops.gemm(a, b)
        return ops.gemm_forward(a, b) if is_compiling() else _forward(a, b)
    others_need_gradient = out.requires_grad or (bias is not None and bias.requires_grad)
    if needs_gradient or (others_need_gradient and torch.is_grad_enabled()):
        raise RuntimeError(
            "gemm expects tensors that need no gradient where out is given, as torch does; drop out, "
            "or call it under torch.no_grad()"
        )
    (ops.gemm_out if is_compiling() else _out)(a, b, out, bias)
    return out


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``torch.nn.functional.linear`` by `gemm`: ``input @ weight.t() + bias``.

    Shapes: input (..., K), weight (N, K), bias (N,); returns (..., N). Differentiable in all three.
    Raises: ValueError when shapes, dtypes or devices do not match.
    """
    needs_gradient = torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if forward_ad._current_level >= 0:
        _refuse_tangents(input, weight, bias)
    if needs_gradient:
        return ops.linear(input, weight, bias)
    return (ops.linear_forward if is_compiling() else _linear_forward)(input, weight, bias)
