"""The machine that is measured on: what it is, what it reaches, and how a call is timed on it."""

from __future__ import annotations

import os
import re
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any, Protocol

import kernels
import torch

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
measure = gemm_kernel.measure

# Of three things, each comes after each of the others four times.
ROUNDS = 12
# What a user may have set that decides which files are found, and which copy of the kernel is measured.
_VARIABLES = ("GEMM_TUNED_CONFIG_DIR", "LOCAL_KERNELS")


class Timed(Protocol):
    """What `measure.interleaved_ms` asks of a call."""

    def time_ms(self) -> float: ...


class _Called:
    """What stands in for `measure.GraphedCalls` on a device without CUDA graphs."""

    def __init__(self, fn: measure.Rotation, timer: measure.Timer) -> None:
        self._fn = fn
        self._timer = timer

    def time_ms(self) -> float:
        return self._timer(self._fn)


def timed(fn: measure.Rotation, device: torch.device, rests: bool = True) -> Timed:
    """``fn`` as its time is taken on ``device``: in a CUDA graph where there are any, with or without rests."""
    timer = measure.own_timer(device)
    return measure.GraphedCalls(fn, rests) if timer is None else _Called(fn, timer)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per microsecond, read and written, of a copy on the device that is much larger than L2."""
    source = torch.randn(1 << (30 if device.type != "cpu" else 20), device=device)
    target = torch.empty_like(source)
    # Not in a graph: there the copy engine does it, at two thirds of this rate.
    timer = measure.own_timer(device) or measure.elapsed_ms
    times = [timer(lambda: target.copy_(source)) for _ in range(ROUNDS + 3)]
    return 2 * source.nbytes / (statistics.median(times[3:]) * 1e3)


def multiply_rate(dtype: torch.dtype, device: torch.device, rests: bool = True) -> float:
    """Floating-point operations per microsecond of a large torch.mm on random data."""
    size = 8192 if device.type != "cpu" else 256
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    call = timed(measure.Rotation(lambda b: torch.mm(a, b), [b]), device, rests)
    return 2 * size**3 / (statistics.median(measure.interleaved_ms([call], ROUNDS)[0]) * 1e3)


def environment(
    device: torch.device, script: str, rests: bool = True, **more: Any
) -> dict[str, Any]:
    """What a result must say beside its numbers; ``script`` is the one that made it."""
    protocol = measure.protocol(device, measure.own_timer(device), rests)
    described = gemm_kernel.measurements.describe_environment(device, protocol)
    name = torch.get_device_module(device).get_device_name() if device.type != "cpu" else "CPU"
    return {**described, "device": name, "command": _command(script), **more}


def _command(script: str) -> str:
    """The command line that repeats this run from the root of the repository."""
    values = {name: os.environ.get(name) for name in _VARIABLES}
    set_ = [f"{name}={_portable(value)}" for name, value in values.items() if value]
    arguments = map(shlex.quote, map(_portable, sys.argv[1:]))
    return " ".join([*set_, "python", script, *arguments])


def _portable(text: str) -> str:
    """``text`` without the paths of this machine, which say nothing elsewhere."""
    here = str(Path.cwd())
    text = text.replace(f"{here}{os.sep}", "").replace(here, "$PWD")
    return re.sub(r"(?<![\w.$~/])/(?:[^\s:=/]+/)*([^\s:=/]+)", r"\1", text)


def first_line(error: BaseException) -> str:
    """What ``error`` says, in one line; its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
