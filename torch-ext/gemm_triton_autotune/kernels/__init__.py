"""The kernel families and `launch_gemm_kernel`, the only way to run any of them.

A family is one file, listed below and nowhere else (device code that not every Triton can import is in a
second one, which only the family imports). It has

    NAME                               the `kernel` key of its entries
    PARAMETERS                         its upper-case keys and their ranges
    config_problem(config, properties) why a config in range cannot run on such a device (None: on any), or None
    operand_problem(config, a, b, out) why it cannot take these operands, or None
    prepare(a, b, out, config)         the `Launch`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..config import family_of, launch_options, validate_config
from ..device import DeviceProperties, device_guard, device_properties
from . import dependent_launch, gemv, gluon, swap, tiled, tma
from .kept_launch import KeptLaunch, keep_launch
from .launch import INTERPRETED, Launch, is_aligned

FAMILIES = {family.NAME: family for family in (tiled, swap, gemv, tma, gluon)}


def _family(config: Mapping[str, Any]) -> Any:
    return FAMILIES[family_of(config)]


def config_problem(config: Any, properties: DeviceProperties | None = None) -> str | None:
    """Why ``config`` may not be launched on such a device (None: on any device), or None if it may.

    This is the gate between a file and Triton: what passes has only known keys with values in range.
    """
    if not isinstance(config, dict):
        return f"must be an object, got {type(config).__name__}"
    name = family_of(config)
    if not isinstance(name, str) or name not in FAMILIES:
        return f"kernel must be one of {sorted(FAMILIES)}, got {name!r:.40}"
    try:
        validate_config(config, FAMILIES[name].PARAMETERS)
    except ValueError as error:
        return str(error)
    return FAMILIES[name].config_problem(config, properties) or _warps_problem(config, properties)


def as_launched(config: Any, properties: DeviceProperties | None) -> tuple[Any, str | None]:
    """``config`` as such a device can launch it, and `config_problem` of that.

    Where the device, its driver or this Triton cannot launch early, it is the same without an early launch.
    """
    problem = config_problem(config, properties)
    if problem is not None and config_problem(config) is None:
        late = dependent_launch.without_early_launch(config)
        if config_problem(late, properties) is None:
            return late, None
    return config, problem


def _warps_problem(config: Mapping[str, Any], properties: DeviceProperties | None) -> str | None:
    # Everywhere a block has 1024 threads at most; a warp of AMD's CDNA has 64, so that half as many are left.
    warp_size = properties.warp_size if properties else None
    if warp_size is None or config["num_warps"] * warp_size <= 1024:
        return None
    return (
        f"num_warps must be at most {1024 // warp_size} on this device, got {config['num_warps']}"
    )


def operand_problem(
    config: Mapping[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> str | None:
    """Why a valid ``config`` cannot multiply these operands (their layout or alignment), or None."""
    return _family(config).operand_problem(config, a, b, out)


def launch_gemm_kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    config: Mapping[str, Any],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write ``a @ b + bias`` into ``out`` with the kernel and tile that ``config`` names.

    Shapes: a (M, K), b (K, N), out (M, N), none of them empty; any strides, one dtype, one device.
    bias (N,), contiguous.
    Operands and configuration are taken as checked (`operands.py`, `config_problem`, `operand_problem`).
    Returns: ``out``.
    """
    if INTERPRETED and out.dtype == torch.bfloat16:
        # The interpreter multiplies the bit patterns of bfloat16 and cuts where it should round
        # (triton issue 11584); in float32 it is right, and torch rounds.
        exact = torch.empty_like(out, dtype=torch.float32)
        bias = None if bias is None else bias.float()
        return out.copy_(launch_gemm_kernel(a.float(), b.float(), exact, config, bias))
    with device_guard(a.device):
        launch, arguments, options = _prepare(a, b, out, config, bias)
        launch.kernel[launch.grid](*arguments, **options)
    return out


def compile_kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    config: Mapping[str, Any],
    bias: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[Launch, Any]:
    """Compile what `launch_gemm_kernel` launches for these operands, unless that is done; launch nothing.

    backend: the one to compile for, by default that of the operands' device.
    """
    with device_guard(a.device):
        launch, arguments, options = _prepare(a, b, out, config, bias, backend)
        return launch, launch.kernel.warmup(*arguments, grid=launch.grid, **options)


def _prepare(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    config: Mapping[str, Any],
    bias: torch.Tensor | None,
    backend: str | None = None,
) -> tuple[Launch, tuple, dict[str, Any]]:
    """The launch, all arguments of its kernel in order, and its options."""
    launch = _family(config).prepare(a, b, out, config)
    options = launch_options(config, backend or device_properties(a.device).backend)
    return launch, launch.arguments(a, b, out, bias), {**options, **launch.options}


def repeatable_launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    config: Mapping[str, Any],
    bias: torch.Tensor | None = None,
) -> KeptLaunch | None:
    """What `launch_gemm_kernel` launches for these operands, to be repeated for others of the same kind.

    Returns: None where that cannot be: in the interpreter, for operands off alignment, and on other
    backends than CUDA (ROCm compiles by the size of a storage, too, which is no property of a tensor).
    """
    is_cuda = not INTERPRETED and device_properties(a.device).backend == "cuda"
    pointers = (a, b, out) if bias is None else (a, b, out, bias)
    if not is_cuda or not all(map(is_aligned, pointers)):
        return None
    launch, compiled = compile_kernel(a, b, out, config, bias)
    with device_guard(a.device):
        return keep_launch(launch, compiled, a, b, out, bias)
