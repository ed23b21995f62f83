"""What a family says about one launch, and what all families need to say it."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import torch
import triton

from ..device import DeviceProperties

try:
    from triton import knobs
except ImportError:  # before Triton 3.4
    knobs = None


# Of a, b, out and the bias, which may be None: the first arguments of a kernel.
Operands = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Optional[torch.Tensor]], tuple]


class Launch(NamedTuple):
    """One launch as data: it holds for all operands of the same shapes, strides, dtype and alignment.

    The kernel is called with ``operands(a, b, out, bias)`` followed by ``values``, all by position, in the
    order of its signature; compile-time values are among them, and so is a bias that is None.
    """

    kernel: Any
    grid: tuple[int, int, int]
    operands: Operands
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
        "_launcher",
        "_operands",
        "_packed",
        "_values",
    )

    def __init__(self, launch: Launch, compiled: Any, device_index: int) -> None:
        driver = triton.runtime.driver.active
        # An integer is passed on as it is; a tensor is asked for its address, and the driver about that.
        self._operands = None if launch.operands is pointers else launch.operands
        self._values = launch.values
        self._grid = launch.grid
        self._device_index = device_index
        self._current_stream = driver.get_current_stream
        # One device is always the current one.
        self._current_device = driver.get_current_device if torch.cuda.device_count() > 1 else None
        # `run` first: the handles are made when it is read, on the device that is current then.
        run = compiled.run
        # No launch metadata and no hooks: with hooks installed this path is not taken.
        fixed = (compiled.function, compiled.packed_metadata, None, None, None)
        self._launcher, self._fixed, self._packed = _below(run, fixed) or (run, fixed, False)

    def is_possible(self) -> bool:
        """Is the device that it was compiled on the current one, and no profiler listening to launches?"""
        current = self._current_device
        return (current is None or current() == self._device_index) and not launch_hooks_installed()

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        addresses: tuple,
    ) -> None:
        """Launch on the current stream; ``addresses`` are those of the operands in bytes, None for no bias."""
        operands = addresses if self._operands is None else self._operands(a, b, out, bias)
        stream = self._current_stream(self._device_index)
        if self._packed:
            arguments = (*operands, *self._values)
            self._launcher(*self._grid, stream, *self._fixed, arguments)
        else:
            self._launcher(*self._grid, stream, *self._fixed, *operands, *self._values)


class _Listener:
    """Stands in for a launcher of Triton's and keeps what would have gone to its compiled function."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.heard: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def launch(self, *arguments: Any) -> None:
        self.heard.append(arguments)


def _below(run: Any, fixed: tuple) -> tuple[Callable, tuple, bool] | None:
    """What ``run(*grid, stream, *fixed, *arguments)`` calls in its turn, so that a launch need not ask again.

    Returns: the function, what it takes between the stream and the arguments of the kernel, and whether it
    takes those as one tuple. Each release of Triton orders them in its own way, so a call is listened to;
    None if what is heard is not of that form, or if there is more to do at each launch.
    """
    if not (hasattr(run, "launch") and _needs_no_scratch(run)):
        return None
    listener = _Listener(run)
    grid, stream, first, second = (object(), object(), object()), object(), object(), object()
    try:
        type(run).__call__(listener, *grid, stream, *fixed, first, second)
        (heard,) = listener.heard
    except Exception:  # not the launcher that this was written for
        return None
    if heard[:4] != (*grid, stream):
        return None
    if heard[-2:] == (first, second):
        return run.launch, heard[4:-2], False
    return (run.launch, heard[4:-1], True) if heard[-1] == (first, second) else None


def _needs_no_scratch(run: Any) -> bool:
    return getattr(run, "global_scratch_size", 1) == getattr(run, "profile_scratch_size", 1) == 0


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


def pointers(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> tuple:
    """The operands of a kernel that takes a pointer for each."""
    return a, b, out, bias


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
