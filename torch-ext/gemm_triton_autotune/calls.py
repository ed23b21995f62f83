"""What a call does: check and launch, or, for a kind of operands that was seen before, repeat a kept launch."""

from __future__ import annotations

import math
from typing import Callable, NamedTuple

import torch
from torch.autograd.graph import increment_version

from . import kernels, tuning
from .config import Config
from .kernels.descriptor import is_transposed
from .kernels.kept_launch import KeptLaunch
from .operands import check_allocated, check_linear, check_memory, check_operands, extent


def layout_of(b: torch.Tensor) -> str:
    """ "NT" for the transpose of an (N, K) row-major weight, "NN" for all else."""
    return "NT" if is_transposed(b) else "NN"


class _CallPlan(NamedTuple):
    """What is left to do for a call whose kind of operands was checked before."""

    launch: KeptLaunch
    out_shape: tuple[int, ...]
    # Bytes from the first element of each operand to behind its last.
    a_bytes: int
    b_bytes: int
    out_bytes: int
    # What the plan stands for: replaced, in a test for example, it is no longer what should run.
    launch_gemm_kernel: Callable


# One for each M that a process meets, so that the number of them must have an end.
_MAX_PLANS = 4096


def gemm_out(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    # Torch does not see that a kernel writes: a gradient that was to be computed from what out held before
    # would be wrong, and nobody would be told, if its version stayed.
    try:
        kind = (
            *(a.shape, a.stride(), a.dtype, a.device),
            *(b.shape, b.stride(), b.dtype, b.device),
            *(out.shape, out.stride(), out.dtype, out.device),
        )
        a_address, b_address, out_address = a.data_ptr(), b.data_ptr(), out.data_ptr()
        any_address, bias_address = a_address | b_address | out_address, None
        if bias is not None:
            kind += bias.shape, bias.stride(), bias.dtype, bias.device
            bias_address = bias.data_ptr()
            any_address |= bias_address
    except RuntimeError:  # what has no strides or no address is refused below
        check_operands(a, b, out, bias)
        raise
    plans = tuning.call_plans
    plan = plans.get(kind)
    # An address of 0 is that of memory that was freed.
    is_allocated = a_address and b_address and out_address and bias_address != 0
    if plan is not None and is_allocated and not any_address & 15:
        out_end = out_address + plan.out_bytes
        apart_from_a = out_end <= a_address or a_address + plan.a_bytes <= out_address
        apart_from_b = out_end <= b_address or b_address + plan.b_bytes <= out_address
        apart_from_bias = (
            bias is None or out_end <= bias_address or bias_address + bias.nbytes <= out_address
        )
        if apart_from_a and apart_from_b and apart_from_bias and _is_possible(plan):
            plan.launch(a, b, out, bias, (a_address, b_address, out_address, bias_address))
            increment_version(out)
            return
    check_operands(a, b, out, bias)
    check_memory(a, b, out, bias)
    _launch_and_plan(a, b, out, kind, plans, bias)
    increment_version(out)


def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # As above, for an out that is new: nothing overlaps it, and what it is follows from a and b.
    try:
        kind = a.shape, a.stride(), a.dtype, a.device, b.shape, b.stride(), b.dtype, b.device
        a_address, b_address = a.data_ptr(), b.data_ptr()
    except RuntimeError:
        check_operands(a, b)
        raise
    plans = tuning.call_plans
    plan = plans.get(kind)
    is_allocated = a_address and b_address
    is_aligned = not (a_address | b_address) & 15
    if plan is not None and is_allocated and is_aligned and _is_possible(plan):
        out = a.new_empty(*plan.out_shape)
        plan.launch(a, b, out, None, (a_address, b_address, out.data_ptr(), None))
        return out
    check_operands(a, b)
    out = a.new_empty(a.shape[0], b.shape[1])
    _launch_and_plan(a, b, out, kind, plans)
    return out


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    # As above. Views of two dimensions would cost a layer more than all else here: a launch needs none, since
    # it was prepared for the shapes and takes the addresses.
    try:
        kind = (
            *(input.shape, input.stride(), input.dtype, input.device),
            *(weight.shape, weight.stride(), weight.dtype, weight.device),
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
        )
        input_address, weight_address = input.data_ptr(), weight.data_ptr()
        bias_address = None if bias is None else bias.data_ptr()
    except RuntimeError:
        check_linear(input, weight, bias)
        raise
    plans = tuning.call_plans
    plan = plans.get(kind)
    is_allocated = input_address and weight_address and bias_address != 0
    is_aligned = not (input_address | weight_address | (bias_address or 0)) & 15
    if plan is not None and is_allocated and is_aligned and _is_possible(plan):
        out = input.new_empty(*plan.out_shape)
        addresses = input_address, weight_address, out.data_ptr(), bias_address
        plan.launch(input, weight, out, bias, addresses)
        return out
    check_linear(input, weight, bias)
    N, K = weight.shape
    out = input.new_empty(*input.shape[:-1], N)
    M = math.prod(input.shape[:-1])
    rows = input.reshape(M, K)
    if rows.data_ptr() == input_address:
        _launch_and_plan(rows, weight.t(), out.view(M, N), kind, plans, bias, tuple(out.shape))
    else:  # a copy, which each call makes anew
        _launch(rows, weight.t(), out.view(M, N), bias)
    return out


def _is_possible(plan: _CallPlan) -> bool:
    return plan.launch_gemm_kernel is kernels.launch_gemm_kernel and plan.launch.is_possible()


def _launch_and_plan(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    kind: tuple,
    plans: dict[tuple, _CallPlan],
    bias: torch.Tensor | None = None,
    out_shape: tuple[int, ...] | None = None,
) -> None:
    """Launch, and keep what can be repeated in ``plans``, those that were there when the call began."""
    config = _launch(a, b, out, bias)
    if config is None or (bias is not None and not bias.is_contiguous()):
        return
    launch = kernels.repeatable_launch(a, b, out, config, bias)
    if launch is not None:
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        sizes = (end - start for start, end in map(extent, (a, b, out)))
        shape = tuple(out.shape) if out_shape is None else out_shape
        plans[kind] = _CallPlan(launch, shape, *sizes, kernels.launch_gemm_kernel)


def _launch(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
) -> Config | None:
    """Write ``a @ b + bias`` into ``out``. Returns: the configuration that did, None if no kernel was needed."""
    if out.numel() == 0:
        return None
    if a.shape[1] == 0:
        out.zero_() if bias is None else out.copy_(bias)
        return None
    check_allocated(a, b, out, bias)
    bias = None if bias is None else bias.contiguous()
    layout = layout_of(b)
    try:
        return tuning.launch_tuned(a, b, out, layout, bias=bias)
    except Exception as error:
        # A capture may forbid what only a first launch does, to load a kernel for example.
        if a.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            K, N = b.shape
            has_bias = "" if bias is None else ", bias=True"
            raise RuntimeError(
                f"gemm cannot be launched for the first time in this CUDA graph capture ({error}); call "
                f"warmup(N={N}, K={K}, layout={layout!r}{has_bias}), or gemm itself, before it"
            ) from error
        raise
