"""The `swap` family: few rows of a, with the sides of the product swapped, and K split where tiles are few.

Up to some 64 rows of a the product is bound by reading b. Hopper's wgmma takes 64 rows at least on
its first side, but as few as 16 columns on its second: the columns of b go first, the rows of a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ..config import IntRange, Parameter
from ..device import DeviceProperties
from . import dependent_launch, split_k
from .bias import load_bias
from .dependent_launch import (
    dependent_launch_problem,
    inputs_are_read,
    prefetch,
    prefetch_offsets,
    wait_for_inputs,
)
from .launch import Launch, cdiv, shared_memory_problem
from .split_k import block_range, count_in, store_partial, sum_partials

NAME = "swap"

PARAMETERS = {
    "BLOCK_SIZE_M": Parameter(IntRange(16, 64, power_of_two=True)),
    "BLOCK_SIZE_N": Parameter(IntRange(64, 128, power_of_two=True)),
    "BLOCK_SIZE_K": Parameter(IntRange(32, 256, power_of_two=True)),
    # Of no effect: the few tiles that share columns of b always run side by side.
    "GROUP_SIZE_M": Parameter(IntRange(1, 1 << 20)),
    "SPLIT_K": split_k.PARAMETER,
    **dependent_launch.PARAMETERS,
}


@triton.jit(do_not_specialize=["M"])
def _swap_kernel(
    # pointers
    a_ptr,
    b_ptr,
    out_ptr,
    bias_ptr,
    partials_ptr,
    counters_ptr,
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
    SPLIT_K: tl.constexpr,
    SHARES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    """out = a @ b + bias, computed as out.T = b.T @ a.T; a (M, K), b (K, N), bias (N,) or None, out (M, N).

    A program computes one of the SPLIT_K parts along K of a BLOCK_SIZE_N x BLOCK_SIZE_M tile of out.T.
    The swap is that of DeepGEMM in vLLM (https://github.com/vllm-project/vllm/pull/29213).
    """
    pid = tl.program_id(0)
    split = pid % SPLIT_K
    tile = pid // SPLIT_K
    # (x - 1) // y + 1 rounds up without the overflow that x + y - 1 has near 2**31.
    num_pid_m = (M - 1) // BLOCK_SIZE_M + 1
    pid_m = tile % num_pid_m
    pid_n = tile // num_pid_m
    first_block, last_block = block_range(K, split, BLOCK_SIZE_K, SPLIT_K)

    # 64 bits from here on: an index times a stride passes 2**31 elements in real batches.
    offs_m = pid_m.to(tl.int64) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    first_offs_k = first_block.to(tl.int64) * BLOCK_SIZE_K + offs_k
    mask_m = offs_m[None, :] < M
    mask_n = offs_n[:, None] < N
    k_step = tl.full((), BLOCK_SIZE_K, tl.int64)
    a_ptrs = a_ptr + first_offs_k[:, None] * stride_ak + offs_m[None, :] * stride_am
    b_ptrs = b_ptr + offs_n[:, None] * stride_bn + first_offs_k[None, :] * stride_bk

    if PREFETCH > 0:
        offs = prefetch_offsets(
            pid_n.to(tl.int64) * BLOCK_SIZE_N,
            first_block.to(tl.int64) * BLOCK_SIZE_K,
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
    acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M), dtype=tl.float32)
    for k in range(first_block, last_block):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=mask_m, other=0.0)
            b = tl.load(b_ptrs, mask=mask_n, other=0.0)
        else:
            # Both sides: what lies behind the last k of one may be NaN, and 0 * NaN is NaN.
            a = tl.load(a_ptrs, mask=mask_m & (offs_k[:, None] < K - k * BLOCK_SIZE_K), other=0.0)
            b = tl.load(b_ptrs, mask=mask_n & (offs_k[None, :] < K - k * BLOCK_SIZE_K), other=0.0)
        acc = tl.dot(b, a, acc)
        a_ptrs += k_step * stride_ak
        b_ptrs += k_step * stride_bk
    inputs_are_read(PDL)

    strides = (stride_om, stride_on)
    if SPLIT_K == 1:
        _store(out_ptr, bias_ptr, acc, offs_m, offs_n, M, N, strides)
    else:
        rows = tl.arange(0, BLOCK_SIZE_M)[None, :] * BLOCK_SIZE_N
        # Neighbours along N, as in out.
        offs = rows + tl.arange(0, BLOCK_SIZE_N)[:, None]
        store_partial(acc, offs, partials_ptr, tile, split, SPLIT_K)
        shares = count_in(counters_ptr, tile, split, SPLIT_K, SHARES)
        SHARE_N: tl.constexpr = BLOCK_SIZE_N // SHARES
        for share in range(SHARES):
            if (shares >> share) & 1:
                columns = share * SHARE_N + tl.arange(0, SHARE_N)
                total = sum_partials(
                    rows + columns[:, None],
                    partials_ptr,
                    tile,
                    BLOCK_SIZE_N * BLOCK_SIZE_M,
                    SPLIT_K,
                )
                share_offs_n = pid_n.to(tl.int64) * BLOCK_SIZE_N + columns
                _store(out_ptr, bias_ptr, total, offs_m, share_offs_n, M, N, strides)


@triton.jit
def _store(out_ptr, bias_ptr, acc, offs_m, offs_n, M, N, strides):
    if bias_ptr is not None:
        acc += load_bias(bias_ptr, offs_n, N)[:, None]
    out_ptrs = out_ptr + offs_m[None, :] * strides[0] + offs_n[:, None] * strides[1]
    mask = (offs_m[None, :] < M) & (offs_n[:, None] < N)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def config_problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    if config["num_warps"] not in (4, 8):
        # One or two groups of the four warps that a wgmma takes; more have nothing to do.
        return f"num_warps must be 4 or 8, got {config['num_warps']}"
    # Hopper's wgmma and Blackwell's tcgen05 keep every stage in shared memory, mma one less: count the lesser
    # elsewhere.
    keeps_all = properties is not None and (properties.capability or (0,))[0] in (9, 10)
    stages = config["num_stages"] if keeps_all else max(config["num_stages"] - 1, 1)
    return dependent_launch_problem(config, properties) or shared_memory_problem(
        stages * (block_m + block_n) * block_k * 2, properties
    )


def operand_problem(
    config: Mapping[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> str | None:
    return split_k.operand_problem(*_split(config, a, b))


def _split(config: Mapping[str, Any], a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    """SPLIT_K, the tiles, the elements of a tile."""
    block_m, block_n = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]
    tiles = cdiv(a.shape[0], block_m) * cdiv(b.shape[1], block_n)
    return config.get("SPLIT_K", 1), tiles, block_m * block_n


def prepare(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: Mapping[str, Any]
) -> Launch:
    M, K = a.shape
    block_m, block_n, block_k = (config[f"BLOCK_SIZE_{side}"] for side in "MNK")
    SPLIT_K, tiles, tile_size = _split(config, a, b)
    return Launch(
        kernel=_swap_kernel,
        grid=(tiles * SPLIT_K, 1, 1),
        operands=("a", "b", "out", "bias", *split_k.operands(SPLIT_K)),
        values=(M, b.shape[1], K, *a.stride(), *b.stride(), *out.stride())
        + (block_m, block_n, block_k, SPLIT_K, split_k.shares(SPLIT_K, tile_size))
        + (K % block_k == 0, config.get("PDL", 0), config.get("PREFETCH", 0), b.stride(0) == 1),
        scratch=split_k.scratch(SPLIT_K, tiles, tile_size),
        options=dependent_launch.options(config),
    )
