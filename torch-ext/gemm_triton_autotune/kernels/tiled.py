"""The `tiled` family: one output tile for each program, through plain pointers.

It runs on every device and takes every shape, stride and alignment, so it is the fall-back of all
other families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ..config import DEFAULT_KERNEL, IntRange, Parameter
from ..device import DeviceProperties
from .bias import load_bias
from .launch import Launch, cdiv, shared_memory_problem
from .raster import grouped_tile

NAME = DEFAULT_KERNEL

_TILE = IntRange(16, 256, power_of_two=True)  # tl.dot takes no tile side below 16
PARAMETERS = {
    "BLOCK_SIZE_M": Parameter(_TILE),
    "BLOCK_SIZE_N": Parameter(_TILE),
    "BLOCK_SIZE_K": Parameter(IntRange(16, 512, power_of_two=True)),
    "GROUP_SIZE_M": Parameter(IntRange(1, 1 << 20)),
    "SPLIT_K": Parameter(IntRange(1, 1), default=1),
}


@triton.jit(do_not_specialize=["M"])
def _tiled_kernel(
    # pointers
    a_ptr,
    b_ptr,
    out_ptr,
    bias_ptr,
    # shape
    M,
    N,
    K,
    # strides in elements
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    # tile
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    M_MULTIPLE_OF_16: tl.constexpr,
):
    """out = a @ b + bias; a (M, K), b (K, N), bias (N,) or None, out (M, N).

    A program computes one BLOCK_SIZE_M x BLOCK_SIZE_N tile of out.
    """
    # A loop that may be empty gives the accumulator a second start value, and ptxas then waits after
    # every single wgmma (its message C7515).
    tl.assume(K > 0)
    if M_MULTIPLE_OF_16:
        # The same value, and the compiler sees that it is divisible (tl.multiple_of on an argument is lost).
        M = M // 16 * 16

    # (x - 1) // y + 1 rounds up without the overflow that x + y - 1 has near 2**31.
    num_pid_m = (M - 1) // BLOCK_SIZE_M + 1
    num_pid_n = (N - 1) // BLOCK_SIZE_N + 1
    pid_m, pid_n = grouped_tile(tl.program_id(0), num_pid_m, num_pid_n, GROUP_SIZE_M)

    # 64 bits from here on: an index times a stride passes 2**31 elements in real batches.
    offs_m = pid_m.to(tl.int64) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    mask_m = offs_m[:, None] < M
    mask_n = offs_n[None, :] < N
    k_step = tl.full((), BLOCK_SIZE_K, tl.int64)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + offs_k[:, None].to(tl.int64) * stride_bk + offs_n[None, :] * stride_bn

    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, (K - 1) // BLOCK_SIZE_K + 1):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=mask_m, other=0.0)
            b = tl.load(b_ptrs, mask=mask_n, other=0.0)
        else:
            # Both sides: what lies behind the last k of one may be NaN, and 0 * NaN is NaN.
            a = tl.load(a_ptrs, mask=mask_m & (offs_k[None, :] < K - k * BLOCK_SIZE_K), other=0.0)
            b = tl.load(b_ptrs, mask=mask_n & (offs_k[:, None] < K - k * BLOCK_SIZE_K), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += k_step * stride_ak
        b_ptrs += k_step * stride_bk

    if bias_ptr is not None:
        acc += load_bias(bias_ptr, offs_n, N)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_n[None, :] * stride_on
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m & mask_n)


def config_problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    if block_m * block_n > 256 * 32 * config["num_warps"]:
        return f"a {block_m}x{block_n} tile needs more than the registers of {config['num_warps']} warps"
    # Hopper's wgmma and Blackwell's tcgen05, of 64 rows and more, keep every stage in shared memory, mma one
    # less: count the lesser elsewhere.
    has_wide = properties is not None and (properties.capability or (0,))[0] in (9, 10)
    keeps_all = has_wide and block_m >= 64 and config["num_warps"] >= 4
    stages = config["num_stages"] if keeps_all else max(config["num_stages"] - 1, 1)
    return shared_memory_problem(stages * (block_m + block_n) * block_k * 2, properties)


def operand_problem(
    config: Mapping[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> str | None:
    return None


def prepare(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: Mapping[str, Any]
) -> Launch:
    M, K = a.shape
    N = b.shape[1]
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    # M is not specialised, so that a new batch size is not a new compile. Only where rows are contiguous
    # does a vector of them cross M, and the compiler must know that it cannot.
    m_multiple_of_16 = M % 16 == 0 and 1 in (a.stride(0), out.stride(0))
    return Launch(
        kernel=_tiled_kernel,
        grid=(cdiv(M, block_m) * cdiv(N, block_n), 1, 1),
        operands=("a", "b", "out", "bias"),
        values=(M, N, K, *a.stride(), *b.stride(), *out.stride())
        + (block_m, block_n, block_k, config["GROUP_SIZE_M"], K % block_k == 0, m_multiple_of_16),
    )
