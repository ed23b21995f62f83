"""What is asked about a device, always about the device of the tensors and only when it is used."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from typing import Any, NamedTuple

import torch


def current_device() -> torch.device:
    """The device that a call without a device means: the current GPU, else the CPU."""
    for backend in ("xpu", "cuda"):
        module = getattr(torch, backend, None)
        if module is not None and module.is_available():
            return torch.device(backend, module.current_device())
    return torch.device("cpu")


def resolve_device(device: torch.device | None) -> torch.device:
    """`device` with its index filled in; None is the current device."""
    if device is None:
        return current_device()
    device = torch.device(device)
    if device.index is None and device.type != "cpu":
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def device_name(device: torch.device | None = None) -> str:
    """The name of `device` as it stands in a file name, for example `NVIDIA_L4`.

    It is the name that torch gives, with `_` for blanks and for every character that is not safe in
    a file name on every system. The CPU, where kernels run in Triton's interpreter, is `CPU`.
    """
    device = resolve_device(device)
    if device.type == "cpu":
        return "CPU"
    name = torch.get_device_module(device).get_device_name(device)
    return re.sub(r"[^0-9A-Za-z._+()-]", "_", name)


class DeviceProperties(NamedTuple):
    """What decides which kernels run on a device. None stands for what torch does not tell."""

    backend: str  # "cuda", "rocm" or "xpu"; "cpu" is Triton's interpreter
    capability: tuple[int, int] | None = None  # compute capability, CUDA only
    multiprocessors: int | None = None
    shared_memory: int | None = None  # bytes that one block may use
    architecture: str | None = None  # ROCm only, for example "gfx942"
    warp_size: int | None = None  # threads in a warp: 64 on AMD's CDNA, 32 on RDNA
    driver: tuple[int, int] | None = None  # the newest CUDA that the driver implements


@functools.cache
def device_properties(device: torch.device) -> DeviceProperties:
    """The properties of ``device``, asked once: they do not change while a process lives."""
    if device.type == "cpu":
        return DeviceProperties("cpu")
    properties = torch.get_device_module(device).get_device_properties(device)

    def first(*names: str) -> int | None:
        return next((value for name in names if (value := getattr(properties, name, 0))), None)

    is_rocm = device.type == "cuda" and torch.version.hip is not None
    is_cuda = device.type == "cuda" and not is_rocm
    return DeviceProperties(
        backend="rocm" if is_rocm else device.type,
        capability=(properties.major, properties.minor) if is_cuda else None,
        multiprocessors=first("multi_processor_count", "gpu_subslice_count"),
        shared_memory=first(
            "shared_memory_per_block_optin", "shared_memory_per_block", "local_mem_size"
        ),
        # With features behind it: "gfx942:sramecc+:xnack-"
        architecture=properties.gcnArchName.split(":")[0] if is_rocm else None,
        warp_size=first("warp_size"),
        driver=_cuda_driver() if is_cuda else None,
    )


def _cuda_driver() -> tuple[int, int] | None:
    # Torch tells the CUDA that it was built with, not this one.
    query = cuda_driver_function("cuDriverGetVersion")
    version = ctypes.c_int()
    if query is None or query(ctypes.byref(version)) or not version.value:
        return None
    return version.value // 1000, version.value % 1000 // 10


def cuda_driver_function(name: str) -> Any:
    """A function of CUDA's driver, for what torch does not tell; None where it is not there."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


def device_guard(device: torch.device) -> contextlib.AbstractContextManager:
    """Make `device` the current one: Triton launches on the current device, not on the tensors'."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    module = torch.get_device_module(device)
    if module.current_device() == device.index:
        return contextlib.nullcontext()
    return module.device(device)
