"""What a family says about one launch, and what all families need to say it."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
import triton

from ..device import DeviceProperties

try:
    from triton import knobs
except ImportError:  # before Triton 3.4
    knobs = None


class Launch(NamedTuple):
    """One launch as data: it holds for all operands of the same shapes, strides, dtype and alignment.

    The kernel is called with ``operands(a, b, out)`` followed by ``values``, all by position, in the order
    of its signature; compile-time values are among them.
    """

    kernel: Any
    grid: tuple[int, int, int]
    operands: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple]
    values: tuple
    # Launch options of Triton that the family decides, beside those of the configuration.
    options: dict[str, Any] = {}


class CompiledLaunch:
    """A `Launch` whose kernel is compiled, for any operands of the same kind, without Triton's JIT.

    The JIT looks at every argument of every launch to find the kernel that it compiled before; that is most
    of what a launch costs. Only for operands that are all aligned to 16 bytes, as those compiled for.
    """

    __slots__ = (
        "_current_device",
        "_current_stream",
        "_device_index",
        "_fixed",
        "_grid",
        "_operands",
        "_run",
        "_values",
    )

    def __init__(self, launch: Launch, compiled: Any, device_index: int) -> None:
        driver = triton.runtime.driver.active
        # An integer is passed on as it is; a tensor is asked for its address, and the driver about that.
        self._operands = None if launch.operands is pointers else launch.operands
        self._values = launch.values
        self._device_index = device_index
        self._current_device = driver.get_current_device
        self._current_stream = driver.get_current_stream
        # `run` first: the handles are made when it is read, on the device that is current then.
        self._run = compiled.run
        self._grid = launch.grid
        # No launch metadata and no hooks: with hooks installed this path is not taken.
        self._fixed = (compiled.function, compiled.packed_metadata, None, None, None)

    def is_possible(self) -> bool:
        """Is the device that it was compiled on the current one, and no profiler listening to launches?"""
        return self._current_device() == self._device_index and not launch_hooks_installed()

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, addresses: tuple
    ) -> None:
        """Launch on the current stream; ``addresses`` are those of a, b and out, in bytes."""
        operands = addresses if self._operands is None else self._operands(a, b, out)
        stream = self._current_stream(self._device_index)
        self._run(*self._grid, stream, *self._fixed, *operands, *self._values)


if hasattr(getattr(knobs, "runtime", None), "launch_enter_hook") and hasattr(
    knobs.runtime.launch_enter_hook, "calls"
):

    def launch_hooks_installed() -> bool:
        """Is a profiler listening to launches? Then they go through the JIT, which calls its hooks."""
        runtime = knobs.runtime
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)

else:  # before Triton 3.5 a hook is there or it is not

    def launch_hooks_installed() -> bool:
        """Is a profiler listening to launches? Then they go through the JIT, which calls its hooks."""
        owner = triton.compiler.CompiledKernel if knobs is None else knobs.runtime
        return bool(owner.launch_enter_hook or owner.launch_exit_hook)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Does ``tensor`` start at a multiple of 16 bytes, as Triton compiles for where it can?"""
    return tensor.data_ptr() % 16 == 0


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
