"""Programmatic dependent launch: a kernel that starts while the one before it on its stream still ends.

Its programs are set up early, and wait before they touch memory; what is saved is the time between two
kernels, about a microsecond, which a product of few rows takes ten of
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..config import IntRange, Parameter
from ..device import DeviceProperties

# 1: launch so. A kernel that is launched so must call `wait_for_inputs`, so only families that do take the key.
PARAMETER = Parameter(IntRange(0, 1), default=0)

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.4
    gdc_launch_dependents = gdc_wait = None


def dependent_launch_problem(PDL: int, properties: DeviceProperties | None) -> str | None:
    """Why a kernel cannot be launched so on such a device, or None."""
    if not PDL or properties is None:
        return None
    if gdc_wait is None:
        return "PDL 1 needs Triton 3.4 or newer"
    if properties.backend != "cuda" or (properties.capability or (0, 0)) < (9, 0):
        return "PDL 1 needs a CUDA device of compute capability 9.0 or newer"
    return None


def options(PDL: int) -> dict[str, Any]:
    """The launch options of a kernel that is launched so, or not."""
    return {"launch_pdl": True} if PDL else {}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Before the first access to memory: until all kernels before this one have ended and written."""
    if PDL:
        gdc_wait()
        # The kernel after this one may be set up as soon as all programs of this one are.
        gdc_launch_dependents()
