"""Which matrices a TMA descriptor can stand for: the hardware's rules, for every family that uses it."""

from __future__ import annotations

import torch

from .launch import cdiv

# Sizes and coordinates are 32-bit integers, those of a last tile that reaches over the edge as well.
_MAX_SIZE = 2**31 - 1024


def is_transposed(tensor: torch.Tensor) -> bool:
    """Do the columns of ``tensor`` lie in memory as rows do, so that its transpose is what is read?

    Where a side of one element has a stride of 1, too, the tensor is taken as it is.
    """
    return tensor.stride(0) == 1 and tensor.stride(1) != 1


def row_stride(tensor: torch.Tensor) -> int:
    """The stride between the rows of ``tensor`` that its descriptor is given, in elements."""
    rows, columns = tensor.shape
    # The stride of a single row is never used, and torch lets it be anything; TMA wants it aligned.
    elements = 16 // tensor.element_size()
    return tensor.stride(0) if rows > 1 else cdiv(columns, elements) * elements


def descriptor_problem(name: str, tensor: torch.Tensor, written: bool = False) -> str | None:
    """Why TMA cannot read (or, if so marked, write) ``tensor`` row by row, or None."""
    rows, columns = tensor.shape
    elements = 16 // tensor.element_size()
    stride = row_stride(tensor)
    if max(rows, columns) > _MAX_SIZE or stride >= 1 << 38:
        return f"{name} is too large for a descriptor: {rows} x {columns}, rows {stride} apart"
    if tensor.stride(1) != 1 and columns > 1:
        return f"{name} is not contiguous along its rows or columns, strides {tensor.stride()}"
    if stride < columns:
        return f"{name} has rows that overlap"
    if tensor.data_ptr() % 16 or stride % elements:
        return f"{name} is not aligned to 16 bytes"
    # Loads end at the last element of a row; stores go on to a multiple of 16 bytes, into what lies
    # behind it (seen on an H200).
    if written and columns % elements:
        return f"{name} has rows that do not end at a multiple of 16 bytes"
    return None
