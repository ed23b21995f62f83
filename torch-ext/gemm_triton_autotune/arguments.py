"""What callers pass beside tensors, checked before anything is done with it. Each check raises ValueError."""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from .kernels import INTERPRETED

LAYOUTS = ("NN", "NT")
DTYPES = (torch.float16, torch.bfloat16)


def check_problem(Ms: Iterable[int], N: int, K: int, layout: str) -> None:
    """Are these sizes and a layout of a weight?"""
    for name, value in (("N", N), ("K", K), *(("M", M) for M in Ms)):
        try:
            valid = not isinstance(value, bool) and 0 < operator.index(value) < 1 << 40
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(f"{name} must be a positive integer below 2**40, got {value!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")


def check_dtype(caller: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        given = repr(dtype).replace("torch.", "", 1)
        raise ValueError(f"{caller} expects dtype float16 or bfloat16, got dtype {given}")


def check_device(caller: str, device: torch.device) -> None:
    """Can kernels run on it?"""
    if device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            f"{caller} needs a GPU, and torch sees none; set TRITON_INTERPRET=1 before importing the "
            "kernel to try it on the CPU, where times mean nothing"
        )


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device has it: sm_75 has tensor cores for float16 alone."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    if is_cuda and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def writable(directory: Path) -> Path:
    """``directory``, made if it is not there, and proved to take a file. Raises: OSError if it does not."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise type(error)(
            error.errno,
            f"cannot write tuned files here ({error.strerror}); pass another save_dir",
            str(directory),
        ) from None
    return directory
