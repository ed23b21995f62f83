"""The `gemv` family: one row of a, on the ordinary cores.

A matrix times a vector is one multiply-add for each element of b, so tensor cores have nothing to give;
what counts is how early and how many loads of b are in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ..config import IntRange, Parameter
from ..device import DeviceProperties
from . import dependent_launch
from .bias import load_bias
from .dependent_launch import (
    dependent_launch_problem,
    inputs_are_read,
    prefetch,
    prefetch_offsets,
    wait_for_inputs,
)
from .launch import Launch, cdiv, shared_memory_problem

NAME = "gemv"

PARAMETERS = {
    "BLOCK_SIZE_M": Parameter(IntRange(1, 1)),
    "BLOCK_SIZE_N": Parameter(IntRange(1, 512, power_of_two=True)),
    "BLOCK_SIZE_K": Parameter(IntRange(8, 4096, power_of_two=True)),
    # Of no effect: there is one row of tiles.
    "GROUP_SIZE_M": Parameter(IntRange(1, 1 << 20)),
    **dependent_launch.PARAMETERS,
}


@triton.jit
def _gemv_kernel(
    # pointers
    a_ptr,
    b_ptr,
    out_ptr,
    bias_ptr,
    # shape
    N,
    K,
    # strides in elements
    stride_ak,
    stride_bk,
    stride_bn,
    stride_on,
    # tile
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    """out = a @ b + bias; a (1, K), b (K, N), bias (N,) or None, out (1, N).

    A program computes BLOCK_SIZE_N elements of out. Each place of its BLOCK_SIZE_N x BLOCK_SIZE_K tile of b
    has a sum of its own, and these are added up at the end.
    """
    pid = tl.program_id(0)
    # 64 bits from here on: an index times a stride passes 2**31 elements in large weights.
    offs_n = pid.to(tl.int64) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    mask_n = offs_n < N
    k_step = tl.full((), BLOCK_SIZE_K, tl.int64)
    a_ptrs = a_ptr + offs_k.to(tl.int64) * stride_ak
    b_ptrs = b_ptr + offs_n[:, None] * stride_bn + offs_k.to(tl.int64)[None, :] * stride_bk

    if PREFETCH > 0:
        offs = prefetch_offsets(
            pid.to(tl.int64) * BLOCK_SIZE_N,
            0,
            N,
            K,
            stride_bk,
            stride_bn,
            BLOCK_SIZE_N,
            PREFETCH * BLOCK_SIZE_K,
            B_TRANSPOSED,
        )
        prefetch(b_ptr + offs)
    wait_for_inputs(PDL)
    acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_K), dtype=tl.float32)
    # Without a dot in it, a loop is pipelined only where it says so itself.
    for k in tl.range(0, (K - 1) // BLOCK_SIZE_K + 1, num_stages=NUM_STAGES):
        mask_b = mask_n[:, None]
        if EVEN_K:
            a = tl.load(a_ptrs)
        else:
            mask_k = offs_k < K - k * BLOCK_SIZE_K
            a = tl.load(a_ptrs, mask=mask_k, other=0.0)
            mask_b = mask_b & mask_k[None, :]
        # b is read once, a by every program: evict_first keeps a in the caches.
        b = tl.load(b_ptrs, mask=mask_b, other=0.0, eviction_policy="evict_first")
        acc += b.to(tl.float32) * a.to(tl.float32)[None, :]
        a_ptrs += k_step * stride_ak
        b_ptrs += k_step * stride_bk
    inputs_are_read(PDL)
    row = tl.sum(acc, axis=1)

    if bias_ptr is not None:
        row += load_bias(bias_ptr, offs_n, N)
    tl.store(out_ptr + offs_n * stride_on, row.to(out_ptr.dtype.element_ty), mask=mask_n)


def config_problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    block_n, block_k, num_warps = (
        config[key] for key in ("BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")
    )
    if block_n * block_k > 128 * 32 * num_warps:
        return f"a {block_n}x{block_k} tile needs more than the registers of {num_warps} warps"
    # One stage goes straight to registers, each further one waits in shared memory.
    needed = (config["num_stages"] - 1) * (block_n + 1) * block_k * 2
    return dependent_launch_problem(config, properties) or shared_memory_problem(needed, properties)


def operand_problem(
    config: Mapping[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> str | None:
    if a.shape[0] != 1:
        return f"multiplies one row of a, got {a.shape[0]}"
    block_n, block_k = config["BLOCK_SIZE_N"], config["BLOCK_SIZE_K"]
    # Right all the same, but every element would be a load of its own.
    if block_k > block_n and b.stride(0) != 1:
        return f"its tile is long in K, where b has stride {b.stride(0)}"
    if block_n > block_k and b.stride(1) != 1:
        return f"its tile is long in N, where b has stride {b.stride(1)}"
    return None


def prepare(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: Mapping[str, Any]
) -> Launch:
    K, N = b.shape
    block_n, block_k = config["BLOCK_SIZE_N"], config["BLOCK_SIZE_K"]
    return Launch(
        kernel=_gemv_kernel,
        grid=(cdiv(N, block_n), 1, 1),
        operands=("a", "b", "out", "bias"),
        values=(N, K, a.stride(1), *b.stride(), out.stride(1))
        + (block_n, block_k, K % block_k == 0, config["num_stages"], config.get("PDL", 0))
        + (config.get("PREFETCH", 0), b.stride(0) == 1),
        options=dependent_launch.options(config),
    )
