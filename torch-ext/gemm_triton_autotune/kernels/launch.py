"""What a family says about one launch, and what all families need to say it."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
import triton

from ..device import DeviceProperties


class Launch(NamedTuple):
    """One launch as data: it holds for all operands of the same shapes, strides, dtype and alignment.

    The kernel is called with ``operands(a, b, out)`` followed by ``values``, all by position, in the order
    of its signature; compile-time values are among them.
    """

    kernel: Any
    grid: tuple[int, int, int]
    operands: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple]
    values: tuple


def pointers(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple:
    """The operands of a kernel that takes three pointers."""
    return a, b, out


def cdiv(x: int, y: int) -> int:
    """x / y rounded up; triton.cdiv costs two microseconds on the host."""
    return -(-x // y)


def shared_memory_problem(needed: int, properties: DeviceProperties | None) -> str | None:
    """Why a kernel that keeps ``needed`` bytes in shared memory cannot run on this device, or None."""
    limit = properties.shared_memory if properties else None
    if limit is None or needed <= limit:
        return None
    return f"needs {needed} bytes of shared memory, the device has {limit}"


@triton.jit
def _probe():
    pass


# With TRITON_INTERPRET=1 the decorator returns an interpreted function, which runs on the CPU.
INTERPRETED = not isinstance(_probe, triton.runtime.jit.JITFunction)
