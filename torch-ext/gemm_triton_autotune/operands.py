"""What a call's operands must be: everything is checked before anything is launched, and nothing twice."""

from __future__ import annotations

import torch

from .arguments import DTYPES
from .kernels import INTERPRETED


def check_operands(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Raise ValueError for anything that the kernels cannot take, before anything is launched."""
    check_shapes(a, b, out, bias)
    _check_kinds("gemm", {"a": a, "b": b, "out": out, "bias": bias})


def check_shapes(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
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
    if out is not None:
        expected = (a.shape[0], b.shape[1])
        if tuple(out.shape) != expected:
            raise ValueError(
                f"gemm expects out of shape {expected}, got {tuple(out.shape)}; "
                "allocate it as a.new_empty(M, N)"
            )
    _check_bias("gemm", bias, b.shape[1])


def check_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """As `check_operands`, for the operands of a layer under the names that they have there."""
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            "Linear expects an input (..., K) and a weight (N, K), got input of shape "
            f"{tuple(input.shape)} and weight of shape {tuple(weight.shape)}"
        )
    _check_kinds("Linear", {"input": input, "weight": weight, "bias": bias})
    _check_bias("Linear", bias, weight.shape[0])


def _check_kinds(caller: str, operands: dict[str, torch.Tensor | None]) -> None:
    """Are they of one dtype, dense, and on one device that the kernels run on? The first two decide."""
    tensors = {name: tensor for name, tensor in operands.items() if tensor is not None}
    (first, a), (second, b), *others = tensors.items()
    if a.dtype not in DTYPES or a.dtype != b.dtype:
        raise ValueError(
            f"{caller} expects {first} and {second} of one dtype, float16 or bfloat16; got dtype "
            f"{_name(a.dtype)} and {_name(b.dtype)}; convert with .to(dtype)"
        )
    for name, tensor in others:
        if tensor.dtype != a.dtype:
            raise ValueError(
                f"{caller} expects {name} of the dtype of {first} and {second}, {_name(a.dtype)}; got dtype "
                f"{_name(tensor.dtype)}"
            )
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{caller} expects dense tensors, got {name} with layout {_name(tensor.layout)}; "
                "convert with .to_dense()"
            )
    if any(tensor.device != a.device for tensor in tensors.values()):
        given = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(
            f"{caller} expects all tensors on one device, got {given}; move them together"
        )
    if a.device.type == "meta" or (a.device.type == "cpu" and not INTERPRETED):
        raise ValueError(
            f"{caller} expects tensors on a GPU, got tensors on {a.device}; move them, or set "
            "TRITON_INTERPRET=1 before loading the kernel to run it on the CPU"
        )


def _check_bias(caller: str, bias: torch.Tensor | None, N: int) -> None:
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(
            f"{caller} expects bias of shape {(N,)}, one number for each column, got {tuple(bias.shape)}"
        )


def _name(value: object) -> str:
    return str(value).replace("torch.", "", 1)


def check_memory(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise ValueError if writing ``out`` would change an operand, or another element of ``out``."""
    if _overlaps_itself(out):
        raise ValueError(
            f"gemm expects every element of out at an address of its own, got out of shape "
            f"{tuple(out.shape)} with strides {out.stride()}; pass out.contiguous() and copy back"
        )
    start, end = extent(out)
    for name, operand in (("a", a), ("b", b), ("bias", bias)):
        if operand is None:
            continue
        operand_start, operand_end = extent(operand)
        if start < operand_end and operand_start < end:
            raise ValueError(
                f"gemm expects out to share no memory with its operands, got out and {name} in one range "
                f"of addresses; pass {name}.clone() or another out"
            )


def check_allocated(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise RuntimeError, as torch does, if the memory of an operand, none of them empty, was freed."""
    for name, tensor in (("a", a), ("b", b), ("out", out), ("bias", bias)):
        if tensor is not None and tensor.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"gemm expects operands that lie in memory, got {name} of shape {tuple(tensor.shape)}, whose "
                "storage has been freed; gather it again (FSDP frees the weights of a layer that is not running)"
            )


def extent(tensor: torch.Tensor) -> tuple[int, int]:
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
