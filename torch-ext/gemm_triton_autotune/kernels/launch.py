"""What a family says about one launch, and what all families need to say it."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
import triton

from ..device import DeviceProperties
from .scratch import get_scratch

try:
    from triton import knobs
except ImportError:  # before Triton 3.4
    knobs = None


class Described(NamedTuple):
    """An operand that is the TMA descriptor of a tensor (a, b or out), made by ``describe``."""

    tensor: str
    describe: Callable[[torch.Tensor], Any]


class ScratchSize(NamedTuple):
    """What a launch needs beside its operands: float32 partial sums, and counters (`scratch`)."""

    partials: int
    counters: int


class Launch(NamedTuple):
    """One launch as data: it holds for all operands of the same shapes, strides, dtype and alignment.

    The kernel is called with ``operands`` followed by ``values``, all by position, in the order of its
    signature; compile-time values are among them.
    """

    kernel: Any
    grid: tuple[int, int, int]
    # A name is a pointer: to a, b, out or bias, or to the partials or counters of the scratch memory.
    operands: tuple[str | Described | None, ...]
    values: tuple
    scratch: ScratchSize | None = None
    # Launch options of Triton that the family decides, beside those of the configuration.
    options: dict[str, Any] = {}

    def arguments(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple:
        """All arguments of the kernel, in order; a bias that is None is a compile-time value."""
        tensors = {"a": a, "b": b, "out": out, "bias": bias, None: None}
        if self.scratch is not None:
            scratch = get_scratch(a.device, *self.scratch)
            tensors.update(partials=scratch.partials, counters=scratch.counters)
        operands = (
            operand.describe(tensors[operand.tensor])
            if isinstance(operand, Described)
            else tensors[operand]
            for operand in self.operands
        )
        return (*operands, *self.values)


if hasattr(getattr(knobs, "runtime", None), "launch_enter_hook") and hasattr(
    knobs.runtime.launch_enter_hook, "calls"
):

    def launch_hooks_installed() -> bool:
        """Is a profiler listening to launches? Then they go through the JIT, which calls its hooks."""
        runtime = knobs.runtime
        try:
            return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
        except AttributeError:
            # A hook stands in the place of the chain of hooks, which Triton takes.
            return True

else:  # before Triton 3.5 a hook is there or it is not

    def launch_hooks_installed() -> bool:
        """Is a profiler listening to launches? Then they go through the JIT, which calls its hooks."""
        owner = triton.compiler.CompiledKernel if knobs is None else knobs.runtime
        return bool(owner.launch_enter_hook or owner.launch_exit_hook)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Does ``tensor`` start at a multiple of 16 bytes, as Triton compiles for where it can?"""
    return tensor.data_ptr() % 16 == 0


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
