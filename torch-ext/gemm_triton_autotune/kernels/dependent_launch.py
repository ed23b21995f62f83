"""Programmatic dependent launch: a kernel that starts while the one before it on its stream still ends.

Its programs are set up early, and wait before they touch memory; what is saved is the time between two
kernels, about a microsecond, which a product of few rows takes ten of. While they wait they may already
bring the first blocks of b into L2: all reads and writes of the device meet there, so that whoever writes
b before the wait is over writes what the loads after it find
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization).

A wait is for the kernel before, and through its wait for those before that. So it rests on every kernel that is launched
like this, of others too, to wait: one that never does lets the next begin before the one before it has ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from ..config import IntRange, Parameter
from ..device import DeviceProperties

# PDL 1, 2 and 3: launch so, and let the next kernel be set up as soon as all programs of this one have begun (1), have
# read their part of a and b (2) or have ended (3). Its programs take the places that become free, in that order: begun
# early they have the longest start; begun late those that follow each other are neighbours on the chip, too, which
# read what both need once (`benchmarks/NOTES.md`, section 33). A kernel that is launched so must call
# `wait_for_inputs` and `inputs_are_read`, so only families that do take the key.
# PREFETCH: the blocks along K of its part of b that a program brings into L2 before it waits.
PARAMETERS = {
    "PDL": Parameter(IntRange(0, 3), default=0),
    "PREFETCH": Parameter(IntRange(0, 16, power_of_two=True), default=0),
}

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    # Triton 3.4 has them, but in a form that its own compiler cannot call.
    if "_semantic" not in inspect.signature(gdc_wait).parameters:
        raise ImportError("gdc_wait takes no _semantic")
except ImportError:
    gdc_launch_dependents = gdc_wait = None


def dependent_launch_problem(
    config: Mapping[str, Any], properties: DeviceProperties | None
) -> str | None:
    """Why a kernel cannot be launched as ``config`` says on such a device, or None."""
    if not config.get("PDL", 0):
        return "PREFETCH needs PDL 1, 2 or 3" if config.get("PREFETCH", 0) else None
    # A line of L2 has 128 bytes: blocks of half a line would be counted twice.
    if config.get("PREFETCH", 0) and config["BLOCK_SIZE_K"] < 64:
        return f"PREFETCH needs a BLOCK_SIZE_K of 64 or more, got {config['BLOCK_SIZE_K']}"
    if properties is None:
        return None
    if gdc_wait is None:
        return "PDL needs Triton 3.5 or newer"
    if properties.backend != "cuda" or (properties.capability or (0, 0)) < (9, 0):
        return "PDL needs a CUDA device of compute capability 9.0 or newer"
    # From 12.3 on CUDA graphs know such launches (its release notes); nothing is promised for a capture before.
    if properties.driver is not None and properties.driver < (12, 3):
        major, minor = properties.driver
        return f"PDL needs a driver for CUDA 12.3 or newer, this one is for {major}.{minor}"
    return None


def without_early_launch(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the keys above: the same kernel, launched when the one before it has ended."""
    return {key: value for key, value in config.items() if key not in PARAMETERS}


def options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The launch options of a kernel that is launched so, or not."""
    return {"launch_pdl": True} if config.get("PDL", 0) else {}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Before the first access to memory: until all kernels before this one have ended and written."""
    if PDL:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()


@triton.jit
def inputs_are_read(PDL: tl.constexpr):
    """After the last access to a and b."""
    if PDL == 2:
        gdc_launch_dependents()


@triton.jit
def prefetch(ptrs):
    """Bring the lines of these addresses into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptrs],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_offsets(
    first_n,
    first_k,
    N,
    K,
    stride_bk,
    stride_bn,
    BLOCK_SIZE_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    """What to `prefetch` of a BLOCK_SIZE_N x COLUMNS part of b.T: an element in each of its lines of 64, as distances
    from the first of b; all are inside its edges."""
    # 64 bits: an index times a stride passes 2**31 elements in large weights.
    if B_TRANSPOSED:
        offs_n = first_n + tl.arange(0, BLOCK_SIZE_N).to(tl.int64)
        offs_k = first_k + 64 * tl.arange(0, COLUMNS // 64).to(tl.int64)
    else:
        offs_n = first_n + 64 * tl.arange(0, (BLOCK_SIZE_N + 63) // 64).to(tl.int64)
        offs_k = first_k + tl.arange(0, COLUMNS).to(tl.int64)
    offs_n = tl.minimum(offs_n, N - 1)
    offs_k = tl.minimum(offs_k, K - 1)
    return offs_n[:, None] * stride_bn + offs_k[None, :] * stride_bk
