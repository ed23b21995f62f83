"""A launch whose kernel is compiled, repeated for other operands without Triton's JIT.

The JIT looks at every argument of every launch to find the kernel that it compiled before, and encodes
every TMA descriptor anew: that is most of what a launch costs. Here the arguments of the compiled function
are kept as a list in which a launch fills in addresses, encoded descriptors are kept by address, and the
filled list by all addresses: a model multiplies by the same weights again and again, and torch's allocator
gives the rest the same places.
"""

from __future__ import annotations

import types
from typing import Any, Callable

import torch
import triton
from torch.cuda import is_current_stream_capturing

from .launch import Described, Launch, launch_hooks_installed
from .scratch import Scratch, get_scratch

# Where a launch finds the address of an operand.
_ADDRESSES = {"a": 0, "b": 1, "out": 2, "bias": 3, "partials": 4, "counters": 5}

# Encoded descriptors by what is described and its address. They are determined by that alone, so one that
# is kept also serves another tensor that comes to lie there. Some hundred bytes each.
_encoded: dict[tuple[object, int], Any] = {}
_MAX_ENCODED = 1 << 14
# Filled lists by launch, addresses and stream. They too are determined by that alone. Less than a KiB each.
_filled: dict[tuple[object, tuple, int], tuple] = {}
_MAX_FILLED = 1 << 13
# One for each M that a process meets.
_described: dict[tuple, object] = {}
_MAX_DESCRIBED = 1 << 14


def keep_launch(
    launch: Launch,
    compiled: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> KeptLaunch:
    """``launch``, whose kernel is ``compiled``, for operands that are like these and aligned to 16 bytes.

    The device of these operands is the current one.
    """
    # `run` first: the handles are made when it is read.
    run = compiled.run
    # No launch metadata and no hooks: with hooks installed this path is not taken.
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    try:
        return _DirectLaunch(launch, compiled, run, fixed, a, b, out, bias)
    except Exception:  # Triton launches in a way that `_DirectLaunch` was not written for
        return _RunLaunch(launch, compiled, run, fixed, a.device)


class KeptLaunch:
    """What `keep_launch` gives. Called with operands, it launches on the current stream."""

    __slots__ = (
        "_compiled",
        "_current_device",
        "_current_stream",
        "_device",
        "_device_index",
        "_launch",
    )

    def __init__(self, launch: Launch, compiled: Any, device: torch.device) -> None:
        driver = triton.runtime.driver.active
        self._launch = launch
        # From Triton 3.8 on a kernel is unloaded when this object of it ends.
        self._compiled = compiled
        self._device = device
        self._device_index = device.index
        self._current_stream = driver.get_current_stream
        # One device is always the current one.
        self._current_device = driver.get_current_device if torch.cuda.device_count() > 1 else None

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
        """Launch for these operands; ``addresses`` are theirs, None for no bias.

        What the tensors say beside their address does not count: they may be other views of the operands.
        """
        raise NotImplementedError


class _RunLaunch(KeptLaunch):
    """By the launcher that Triton made for the kernel."""

    __slots__ = ("_fixed", "_run")

    def __init__(
        self, launch: Launch, compiled: Any, run: Any, fixed: tuple, device: torch.device
    ) -> None:
        super().__init__(launch, compiled, device)
        self._run = run
        self._fixed = fixed

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        addresses: tuple,
    ) -> None:
        launch = self._launch
        stream = self._current_stream(self._device_index)
        self._run(*launch.grid, stream, *self._fixed, *launch.arguments(a, b, out, bias))


class _DirectLaunch(KeptLaunch):
    """By the compiled function that launches, below the launchers of Triton that are Python.

    Each release of Triton has another order of arguments, so none is written down here: one call is
    listened to, and stand-ins for the stream and the operands show where they go.
    """

    __slots__ = (
        "_arguments",
        "_before",
        "_descriptors",
        "_function",
        "_identity",
        "_packed_from",
        "_pass_on",
        "_pointers",
        "_scratch",
        "_stand_ins",
        "_stream",
    )

    def __init__(
        self,
        launch: Launch,
        compiled: Any,
        run: Any,
        fixed: tuple,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """Raises: any exception, if what is heard is not of a form that is known here."""
        super().__init__(launch, compiled, a.device)
        if run.global_scratch_size or run.profile_scratch_size:
            raise ValueError("it allocates memory at each launch")
        self._scratch = launch.scratch
        # Not this launch itself: it ends when nobody else has it.
        self._identity = object()
        self._stand_ins = {name: object() for name in _ADDRESSES}
        if bias is None:
            self._stand_ins["bias"] = None
        stream = object()
        arguments = self._kernel_arguments(a, b, out)
        listener = _Listener(run)
        type(run).__call__(listener, *launch.grid, stream, *fixed, *arguments)
        (heard,) = listener.heard
        # From Triton 3.7 on the kernel's arguments are passed as one.
        is_packed = _same(heard[-1], arguments)
        if not (is_packed or _same(heard[-len(arguments) :], arguments)):
            raise ValueError("it does not pass on the arguments as they are")
        self._before = heard[:-1] if is_packed else heard[: -len(arguments)]
        self._packed_from = len(self._before) if is_packed else None

        described = [operand for operand in launch.operands if isinstance(operand, Described)]
        places = []
        if described:
            self._function, self._pass_on = _below_encoder(run.launch)
            self._arguments, again = (self._encode(a, b, out) for _ in range(2))
            # What is made anew each time is an encoded descriptor.
            pairs = enumerate(zip(self._arguments, again))
            places = [place for place, (one, other) in pairs if one is not other and one != other]
        else:
            self._function, self._pass_on = run.launch, None
            self._arguments = [*self._before, *arguments]
        if len(places) != len(described):
            raise ValueError("it does not make one object of each descriptor")

        self._stream = _place(self._arguments, stream)
        self._pointers = [
            (_place(self._arguments, self._stand_ins[operand]), _ADDRESSES[operand])
            for operand in launch.operands
            if isinstance(operand, str) and self._stand_ins[operand] is not None
        ]
        self._descriptors = []
        for number, (place, operand) in enumerate(zip(places, described)):
            tensor = {"a": a, "b": b, "out": out}[operand.tensor]
            # The compiled kernel says all else of its n-th descriptor. What kind it is, is one object for
            # all launches, so that those of different M share what they know of a weight.
            key = compiled, number, tensor.shape, tensor.stride()
            if len(_described) >= _MAX_DESCRIBED:
                _described.clear()
            kind = _described.setdefault(key, object())
            self._descriptors.append((place, kind, _ADDRESSES[operand.tensor]))

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        addresses: tuple,
    ) -> None:
        stream = self._current_stream(self._device_index)
        arguments = _filled.get((self._identity, addresses, stream))
        # A launch in a capture has scratch memory of its own.
        if arguments is None or (self._scratch is not None and is_current_stream_capturing()):
            # Until the launch, so that the memory lives.
            scratch = None
            if self._scratch is not None:
                scratch = get_scratch(self._device, *self._scratch, stream)
            arguments = self._fill(a, b, out, addresses, stream, scratch)
        self._function(*arguments)

    def _fill(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        addresses: tuple,
        stream: int,
        scratch: Scratch | None,
    ) -> tuple:
        """The arguments of the compiled function for these operands, kept unless the scratch memory is not."""
        key = self._identity, addresses, stream
        if scratch is not None:
            addresses = addresses + scratch.addresses
        arguments = self._arguments.copy()
        arguments[self._stream] = stream
        for place, index in self._pointers:
            arguments[place] = addresses[index]
        for place, kind, index in self._descriptors:
            descriptor = _encoded.get((kind, addresses[index]))
            if descriptor is None:
                descriptor = self._keep_descriptors(a, b, out, addresses)[place]
            arguments[place] = descriptor
        if self._packed_from is not None:
            packed_from = self._packed_from
            arguments[packed_from:] = [tuple(arguments[packed_from:])]
        filled = tuple(arguments)
        if scratch is None or scratch.is_kept:
            if len(_filled) >= _MAX_FILLED:
                _filled.clear()
            _filled[key] = filled
        return filled

    def _kernel_arguments(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple:
        """The arguments of the kernel, with stand-ins for pointers."""
        tensors = {"a": a, "b": b, "out": out}
        operands = (
            operand.describe(tensors[operand.tensor])
            if isinstance(operand, Described)
            else self._stand_ins.get(operand)
            for operand in self._launch.operands
        )
        return (*operands, *self._launch.values)

    def _keep_descriptors(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, addresses: tuple
    ) -> list:
        arguments = self._encode(a, b, out)
        if len(_encoded) + len(self._descriptors) > _MAX_ENCODED:
            _encoded.clear()
        for place, kind, index in self._descriptors:
            _encoded[kind, addresses[index]] = arguments[place]
        return arguments

    def _encode(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list:
        """The arguments of the compiled function, descriptors encoded, with stand-ins for pointers."""
        arguments = self._kernel_arguments(a, b, out)
        if self._packed_from is None:
            return list(self._pass_on(*self._before, *arguments))
        *before, last = self._pass_on(*self._before, arguments)
        return [*before, *last]


class _Listener:
    """Stands in for a launcher of Triton's, and keeps what would have gone below it."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.heard: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def launch(self, *arguments: Any) -> None:
        self.heard.append(arguments)


def _below_encoder(encoder: Any) -> tuple[Callable, Callable]:
    """The function that Triton's ``encoder`` of descriptors calls, and the encoder that returns its arguments.

    The function is the one free variable of that name; a copy of the encoder has another in its place.
    """
    place = encoder.__code__.co_freevars.index("launcher")
    cells = list(encoder.__closure__)
    function = cells[place].cell_contents
    cells[place] = types.CellType(lambda *arguments: arguments)
    passing_on = types.FunctionType(
        encoder.__code__,
        encoder.__globals__,
        encoder.__name__,
        encoder.__defaults__,
        tuple(cells),
    )
    return function, passing_on


def _same(some: Any, others: tuple) -> bool:
    if not isinstance(some, (tuple, list)) or len(some) != len(others):
        return False
    return all(one is other for one, other in zip(some, others))


def _place(arguments: list, wanted: object) -> int:
    (place,) = (place for place, argument in enumerate(arguments) if argument is wanted)
    return place
