"""What a launch configuration is: its keys, their ranges, and the one for any device.

A configuration is a plain dict, the very JSON object of a tuned file. Upper-case keys are
compile-time values of a kernel and belong to its family (`kernels/`); the lower-case keys here are
Triton's launch options. Nothing in this module touches a GPU, a file or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Config = dict[str, Any]

# The family of an entry that names none: files of the upstream example run unchanged.
DEFAULT_KERNEL = "tiled"


def family_of(config: Mapping[str, Any]) -> str:
    """The name of the family that runs ``config``."""
    return config.get("kernel", DEFAULT_KERNEL)


class IntRange(NamedTuple):
    """The integers from `low` to `high`, both included; only powers of two if so marked."""

    low: int
    high: int
    power_of_two: bool = False

    def problem(self, value: Any) -> str | None:
        """Why `value` is not in the range, or None."""
        # bool is an int to Python, but `true` in a file is a mistake, not a 1.
        if not isinstance(value, int) or isinstance(value, bool):
            return f"must be an integer, got {value!r:.40}"
        if not self.low <= value <= self.high:
            return f"must be from {self.low} to {self.high}, got {value}"
        if self.power_of_two and value & (value - 1):
            return f"must be a power of two, got {value}"
        return None


class Parameter(NamedTuple):
    """One key of a configuration: the values it may take, and its value where an entry lacks it."""

    values: IntRange
    default: int | None = None

    @property
    def required(self) -> bool:
        return self.default is None


# 32 warps of 32 threads are the 1024 threads that a block may have.
LAUNCH_PARAMETERS = {
    "num_warps": Parameter(IntRange(1, 32, power_of_two=True)),
    "num_stages": Parameter(IntRange(1, 12)),
}

# Launch options that only one backend's compiler knows: absent means not passed, and on another
# backend they are dropped, because Triton refuses options that it does not know.
BACKEND_OPTIONS: dict[str, dict[str, IntRange]] = {
    "cuda": {"maxnreg": IntRange(24, 255)},
    "rocm": {
        "waves_per_eu": IntRange(0, 10),
        "matrix_instr_nonkdim": IntRange(0, 32),
        "kpack": IntRange(1, 2),
    },
    "xpu": {},
}
_STRING_OPTIONS = {"xpu": {"grf_mode": ("default", "auto", "128", "256", "large", "small")}}


def validate_config(config: Any, parameters: Mapping[str, Parameter]) -> None:
    """Check every key and value of `config` against a family's `parameters` and the options above.

    Raises: ValueError that names the first key that is missing, unknown or out of range.
    """
    known = {**parameters, **LAUNCH_PARAMETERS}
    for key, parameter in known.items():
        if parameter.required and key not in config:
            raise ValueError(f"lacks {key}")
    for key, value in config.items():
        problem = None
        if key in known:
            problem = known[key].values.problem(value)
        elif key != "kernel":
            problem = _option_problem(key, value)
        if problem:
            raise ValueError(f"{key} {problem}")


def _option_problem(key: str, value: Any) -> str | None:
    for options in BACKEND_OPTIONS.values():
        if key in options:
            return options[key].problem(value)
    for options in _STRING_OPTIONS.values():
        if key in options:
            return None if value in options[key] else f"must be one of {options[key]}"
    return "is not a key of this kernel"


def launch_options(config: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """The lower-case part of `config` that `backend` ("cuda", "rocm", "xpu", "cpu") understands."""
    names = [
        *LAUNCH_PARAMETERS,
        *BACKEND_OPTIONS.get(backend, ()),
        *_STRING_OPTIONS.get(backend, ()),
    ]
    return {name: config[name] for name in names if name in config}


def conservative_config(M: int) -> Config:
    """A configuration for M rows that launches everywhere.

    Its tile stays within 64 KiB of shared memory, the least that a supported device has (sm_75, gfx942).
    """
    if M <= 16:
        tile = (16, 64, 128, 4, 3)
    elif M <= 32:
        tile = (32, 64, 64, 4, 4)
    elif M <= 64:
        tile = (64, 64, 64, 4, 4)
    else:
        tile = (128, 128, 32, 8, 4)
    return plain_config(*tile)


def plain_config(
    block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int
) -> Config:
    """The six keys that every configuration has, in the order in which files have them."""
    return {
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "BLOCK_SIZE_K": block_k,
        "GROUP_SIZE_M": 8,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


# What a key means where it is absent: such a value is not written.
_ABSENT = {
    "kernel": DEFAULT_KERNEL,
    "SPLIT_K": 1,
    "PERSISTENT": 0,
    "EPILOGUE_SUBTILE": 1,
    "SWAP": 0,
}


def make_config(kernel: str, *tile: int, **more: int) -> Config:
    """`plain_config` of ``tile`` for a family, with what ``more`` says beyond the default of its keys."""
    first = {"kernel": kernel} if kernel != _ABSENT["kernel"] else {}
    others = {key: value for key, value in more.items() if value != _ABSENT[key]}
    return {**first, **plain_config(*tile), **others}
