"""The torch ops behind `gemm`: their checks, their fakes and the gradient."""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch.autograd.graph import increment_version

from . import kernels, tuning
from ._ops import add_op_namespace_prefix, ops
from .config import Config
from .kernels.launch import CompiledLaunch


def _check_operands(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """Raise ValueError for anything that the kernels cannot take, before anything is launched."""
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(
            f"gemm expects 2D tensors, got a of shape {tuple(a.shape)} and b of shape "
            f"{tuple(b.shape)}; flatten leading dimensions first"
        )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"Incompatible GEMM shapes: {tuple(a.shape)} @ {tuple(b.shape)}; the columns of a must be as "
            "many as the rows of b (for a weight of shape (N, K) pass weight.t())"
        )
    if a.dtype not in tuning.DTYPES or a.dtype != b.dtype:
        raise ValueError(
            "gemm expects a and b of one dtype, float16 or bfloat16; got dtype "
            f"{_name(a.dtype)} and {_name(b.dtype)}; convert with .to(dtype)"
        )
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if tensor is not None and tensor.layout != torch.strided:
            raise ValueError(
                f"gemm expects dense tensors, got {name} with layout {_name(tensor.layout)}; "
                "convert with .to_dense()"
            )
    if a.device != b.device or (out is not None and out.device != a.device):
        given = f"a on {a.device}, b on {b.device}" + (
            "" if out is None else f", out on {out.device}"
        )
        raise ValueError(f"gemm expects all tensors on one device, got {given}; move them together")
    if a.device.type == "meta" or (a.device.type == "cpu" and not kernels.INTERPRETED):
        raise ValueError(
            f"gemm expects tensors on a GPU, got tensors on {a.device}; move them, or set "
            "TRITON_INTERPRET=1 before loading the kernel to run it on the CPU"
        )
    if out is not None:
        expected = (a.shape[0], b.shape[1])
        if tuple(out.shape) != expected:
            raise ValueError(
                f"gemm expects out of shape {expected}, got {tuple(out.shape)}; "
                "allocate it as a.new_empty(M, N)"
            )
        if out.dtype != a.dtype:
            raise ValueError(
                f"gemm expects out of the dtype of a and b, {_name(a.dtype)}; got dtype {_name(out.dtype)}"
            )


def _name(value: object) -> str:
    return str(value).replace("torch.", "", 1)


def _check_memory(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError if writing ``out`` would change an operand, or another element of ``out``."""
    if _overlaps_itself(out):
        raise ValueError(
            f"gemm expects every element of out at an address of its own, got out of shape "
            f"{tuple(out.shape)} with strides {out.stride()}; pass out.contiguous() and copy back"
        )
    start, end = _extent(out)
    for name, operand in (("a", a), ("b", b)):
        operand_start, operand_end = _extent(operand)
        if start < operand_end and operand_start < end:
            raise ValueError(
                f"gemm expects out to share no memory with its operands, got out and {name} in one range "
                f"of addresses; pass {name}.clone() or another out"
            )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of ``tensor`` and the one behind its last; a pair that overlaps nothing if it is empty."""
    if tensor.numel() == 0:
        return 0, 0
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    # Sorted by stride, each dimension must step over all that the ones below it reach.
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride <= reached:
                return True
            reached += (size - 1) * stride
    return False


def _layout(b: torch.Tensor) -> str:
    """ "NT" for the transpose of an (N, K) row-major weight, "NN" for all else."""
    return "NT" if b.stride(0) == 1 and b.stride(1) != 1 else "NN"


class _CallPlan(NamedTuple):
    """What is left to do for a call whose kind of operands was checked before."""

    launch: CompiledLaunch
    # Bytes from the first element of each operand to behind its last.
    a_bytes: int
    b_bytes: int
    out_bytes: int
    # What the plan stands for: replaced, in a test for example, it is no longer what should run.
    launch_gemm_kernel: Callable


# One for each M that a process meets, so that the number of them must have an end.
_MAX_PLANS = 4096


def _gemm_out(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    # Torch does not see that a kernel writes: a gradient that was to be computed from what out held before
    # would be wrong, and nobody would be told, if its version stayed.
    try:
        kind = (
            *(a.shape, a.stride(), a.dtype, a.device),
            *(b.shape, b.stride(), b.dtype, b.device),
            *(out.shape, out.stride(), out.dtype, out.device),
        )
        addresses = a_address, b_address, out_address = a.data_ptr(), b.data_ptr(), out.data_ptr()
    except RuntimeError:  # what has no strides or no address is refused below
        _check_operands(a, b, out)
        raise
    plans = tuning.call_plans
    plan = plans.get(kind)
    if plan is not None and not (a_address | b_address | out_address) & 15:
        out_end = out_address + plan.out_bytes
        apart_from_a = out_end <= a_address or a_address + plan.a_bytes <= out_address
        apart_from_b = out_end <= b_address or b_address + plan.b_bytes <= out_address
        if apart_from_a and apart_from_b and _is_possible(plan):
            plan.launch(a, b, out, None, (*addresses, None))
            increment_version(out)
            return
    _check_operands(a, b, out)
    _check_memory(a, b, out)
    _launch_and_plan(a, b, out, kind, plans)
    increment_version(out)


def _gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # As above, for an out that is new: nothing overlaps it, and what it is follows from a and b.
    try:
        kind = a.shape, a.stride(), a.dtype, a.device, b.shape, b.stride(), b.dtype, b.device
        a_address, b_address = a.data_ptr(), b.data_ptr()
    except RuntimeError:
        _check_operands(a, b)
        raise
    plans = tuning.call_plans
    plan = plans.get(kind)
    if plan is not None and not (a_address | b_address) & 15 and _is_possible(plan):
        out = a.new_empty(a.shape[0], b.shape[1])
        plan.launch(a, b, out, None, (a_address, b_address, out.data_ptr(), None))
        return out
    _check_operands(a, b)
    out = a.new_empty(a.shape[0], b.shape[1])
    _launch_and_plan(a, b, out, kind, plans)
    return out


def _is_possible(plan: _CallPlan) -> bool:
    return plan.launch_gemm_kernel is kernels.launch_gemm_kernel and plan.launch.is_possible()


def _launch_and_plan(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, kind: tuple, plans: dict[tuple, _CallPlan]
) -> None:
    """Launch, and keep what can be repeated in ``plans``, those that were there when the call began."""
    config = _launch(a, b, out)
    launch = None if config is None else kernels.repeatable_launch(a, b, out, config)
    if launch is not None:
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        sizes = (end - start for start, end in map(_extent, (a, b, out)))
        plans[kind] = _CallPlan(launch, *sizes, kernels.launch_gemm_kernel)


def _launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Config | None:
    """Write ``a @ b`` into ``out``. Returns: the configuration that did, None if no kernel was needed."""
    if out.numel() == 0:
        return None
    if a.shape[1] == 0:
        out.zero_()
        return None
    return tuning.launch_tuned(a, b, out, _layout(b))


def _gemm_fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check_operands(a, b)
    return a.new_empty(a.shape[0], b.shape[1])


def _save_operands(ctx, inputs, output) -> None:
    a, b = inputs
    # An operand is kept only for the gradient of the other one.
    ctx.save_for_backward(a if b.requires_grad else None, b if a.requires_grad else None)


def _gemm_backward(ctx, grad):
    a, b = ctx.saved_tensors
    grad_a = None if b is None else ops.gemm(grad, b.t())
    grad_b = None if a is None else ops.gemm(a.t(), grad)
    return grad_a, grad_b


# A build that is loaded through two spellings of its path is imported twice, under one namespace: the
# ops of the first import serve both.
if not hasattr(ops, "gemm"):
    # `define` and `impl` cost a call several microseconds less than `custom_op`.
    torch.library.define(add_op_namespace_prefix("gemm"), "(Tensor a, Tensor b) -> Tensor")
    torch.library.impl(add_op_namespace_prefix("gemm"), "default", _gemm)
    torch.library.register_fake(add_op_namespace_prefix("gemm"), _gemm_fake)
    torch.library.register_autograd(
        add_op_namespace_prefix("gemm"), _gemm_backward, setup_context=_save_operands
    )

    # The same for operands that need no gradient: looking for one costs an eager call more than the rest.
    torch.library.define(add_op_namespace_prefix("gemm_forward"), "(Tensor a, Tensor b) -> Tensor")
    torch.library.impl(add_op_namespace_prefix("gemm_forward"), "default", _gemm)
    torch.library.register_fake(add_op_namespace_prefix("gemm_forward"), _gemm_fake)

    torch.library.define(
        add_op_namespace_prefix("gemm_out"), "(Tensor a, Tensor b, Tensor(a!) out) -> ()"
    )
    torch.library.impl(add_op_namespace_prefix("gemm_out"), "default", _gemm_out)
    torch.library.register_fake(add_op_namespace_prefix("gemm_out"), _check_operands)


# Called by their overload, which torch would have to find at each call.
_forward = ops.gemm_forward.default
_out = ops.gemm_out.default


def gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``a @ b`` with float32 accumulation, using the configuration tuned for this GPU.

    Shapes: a (M, K), b (K, N), out (M, N). Any strides; float16 or bfloat16, all three alike. Where b is
    the transpose of a weight (N, K), as in ``gemm(x, weight.t())``, the files for layout NT are used.
    Returns: ``out``, allocated when not given. An empty K gives zeros. Differentiable in a and b when
    ``out`` is not given.
    Raises: ValueError when ranks, shapes, dtypes or devices do not match, or ``out`` shares memory with an
    operand; RuntimeError when ``out`` is given and an operand needs a gradient.
    """
    needs_gradient = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if out is None:
        return ops.gemm(a, b) if needs_gradient else _forward(a, b)
    if needs_gradient or (out.requires_grad and torch.is_grad_enabled()):
        raise RuntimeError(
            "gemm expects tensors that need no gradient where out is given, as torch does; drop out, "
            "or call it under torch.no_grad()"
        )
    _out(a, b, out)
    return out
