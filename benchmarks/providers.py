"""What is compared: ways to compute a @ b, each one prepared for a point before it is timed.

gemm                this package, with the files that it finds
default             this package's configuration for a call without a file
torch               torch.mm
compile             torch.compile(mode="max-autotune-no-cudagraphs") of a product
autotune            the `tiled` kernel under @triton.autotune, with what `candidate_configs` has of it for M rows
upstream            the same kernel, with the best that the upstream example's tuner could choose for this very M
upstream-default    the same kernel, with the upstream example's configuration for a call without a file
configs:DIR         the entry of a tuned file in DIR for exactly this weight, layout and M
gemm:KEY=VALUE,…    the configuration of gemm with other values, which are numbers, or nothing for a key that is to be absent;
default:KEY=VALUE,… likewise
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kernels
import torch
import triton

from autotuned import Autotuned, autotune_configs
from machine import timed

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning, measure = gemm_kernel.tuning, gemm_kernel.measure


class Unavailable(Exception):
    """A provider has nothing for a point; the text says why."""


class Operands(NamedTuple):
    """A point: a (M, K), several equal weights b (K, N) in a layout, out (M, N) for results."""

    a: torch.Tensor
    weights: Sequence[torch.Tensor]
    out: torch.Tensor
    layout: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)"""
        return (*self.out.shape, self.a.shape[1])


class Prepared(NamedTuple):
    """``call(b)`` gives a @ b; config is what it runs with, where that is known."""

    call: Callable[[torch.Tensor], torch.Tensor]
    config: dict[str, Any] | None = None


Provider = Callable[[Operands], Prepared]


# By the keys that are different: another value, or None where the key is absent.
Changes = dict[str, int | None]


def _changed(config: dict[str, Any], changes: Changes) -> dict[str, Any]:
    return {key: value for key, value in {**config, **changes}.items() if value is not None}


def _variant(base: str, changes: Changes, operands: Operands) -> Prepared:
    config = _CHOICES[base](*operands.shape, operands.a.device, operands.layout)
    return _launched(operands, _changed(config, changes))


def _gemm(operands: Operands) -> Prepared:
    a, weights, out, layout = operands
    # As the call itself does at its first time: the configuration is the one that ran.
    config = tuning.launch_tuned(a, weights[0], out, layout)
    return Prepared(lambda b: gemm_kernel.gemm(a, b, out=out), config)


def _torch(operands: Operands) -> Prepared:
    return Prepared(lambda b: torch.mm(operands.a, b, out=operands.out))


def _launched(operands: Operands, config: dict[str, Any]) -> Prepared:
    a, weights, out, _ = operands
    properties = gemm_kernel.device.device_properties(a.device)
    problem = gemm_kernel.kernels.config_problem(config, properties)
    problem = problem or gemm_kernel.kernels.operand_problem(config, a, weights[0], out)
    if problem:
        raise Unavailable(problem)
    launch = gemm_kernel.kernels.launch_gemm_kernel
    return Prepared(lambda b: launch(a, b, out, config), config)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def compiled_product() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """a @ b as torch.compile makes it when it may measure, for one M: nothing of an earlier one is left."""
    torch._dynamo.reset()  # or its limit of recompiles would end in eager mode
    return torch.compile(_product, mode="max-autotune-no-cudagraphs", dynamic=False)


def _compile(operands: Operands) -> Prepared:
    product = compiled_product()
    return Prepared(lambda b: product(operands.a, b))


def _autotune(operands: Operands) -> Prepared:
    a, weights, out, _ = operands
    kernel = Autotuned(operands.shape[0], a.device)
    kernel(a, weights[0], out)
    return Prepared(lambda b: kernel(a, b, out), kernel.best)


# The example gemm-triton-autotune of github.com/huggingface/kernels at commit 18c4d686: its search grid, and what it
# uses without a file. Eight warps are only in it for tiles of 8192 elements and more.
def upstream_grid() -> list[dict[str, Any]]:
    tiles = itertools.product((16, 32, 64, 128), (32, 64, 128), (32, 64), (4, 8), (2, 3, 4))
    return [
        gemm_kernel.config.plain_config(*tile)
        for tile in tiles
        if tile[3] == 4 or tile[0] * tile[1] >= 8192
    ]


def upstream_default(M: int) -> dict[str, Any]:
    return gemm_kernel.config.plain_config(16 if M <= 16 else 64, 64, 32, 4, 2)


def _upstream(operands: Operands) -> Prepared:
    times_ms = []
    for config in upstream_grid():
        try:
            prepared = _launched(operands, config)
            call = timed(measure.Rotation(prepared.call, operands.weights), operands.a.device)
        # As its tuner does.
        except (Unavailable, triton.runtime.errors.OutOfResources):
            continue
        times_ms.append((min(call.time_ms() for _ in range(3)), len(times_ms), prepared))
    if not times_ms:
        raise Unavailable("none of its candidates runs")
    return min(times_ms)[2]


def _upstream_default(operands: Operands) -> Prepared:
    return _launched(operands, upstream_default(operands.shape[0]))


def _configs(folder: Path, operands: Operands) -> Prepared:
    M, N, K = operands.shape
    device = operands.a.device
    path = folder / tuning.config_file_name(N, K, device, operands.layout)
    properties = gemm_kernel.device.device_properties(device)
    found = gemm_kernel.tuned_file.read_tuned_file(path, properties)
    if found is None:
        raise Unavailable(f"there is no {path.name}")
    if M not in found[0]:
        raise Unavailable(f"{path.name} has no usable entry for M={M}")
    return _launched(operands, dict(found[0][M]))


# What a variant is one of: how its configuration is chosen, by the arguments of `tuning.get_config`.
_CHOICES: dict[str, Callable[..., dict[str, Any]]] = {
    "gemm": tuning.get_config,
    "default": tuning.default_config,
}

PROVIDERS: dict[str, Provider] = {
    "gemm": _gemm,
    "default": functools.partial(_variant, "default", {}),
    "torch": _torch,
    "compile": _compile,
    "autotune": _autotune,
    "upstream": _upstream,
    "upstream-default": _upstream_default,
}


def named_providers(names: Iterable[str]) -> dict[str, Provider]:
    """Those that ``names`` ask for; of a folder with configs, its last part is the name.

    Raises: ValueError for a name that there is not, or that is there twice.
    """
    found: dict[str, Provider] = {}
    for name in names:
        kind, _, folder = name.partition(":")
        if kind == "configs" and Path(folder).is_dir():
            own, provider = (
                f"configs:{Path(folder).resolve().name}",
                functools.partial(_configs, Path(folder)),
            )
        elif name in PROVIDERS:
            own, provider = name, PROVIDERS[name]
        elif kind in _CHOICES:
            own, provider = name, functools.partial(_variant, kind, _changes(name))
        else:
            known = ", ".join(PROVIDERS)
            raise ValueError(f"expects {known}, or configs: and a folder, got {name!r}")
        if own in found:
            raise ValueError(f"expects each provider once, got {own!r} twice")
        found[own] = provider
    return found


def _changes(name: str) -> Changes:
    """What ``name``, of the form base:KEY=VALUE,…, changes; a base alone changes nothing."""
    changes: Changes = {}
    _, colon, text = name.partition(":")
    for change in text.split(",") if colon else ():
        key, equals, value = change.partition("=")
        if not (key and equals and (value.isdecimal() or not value)):
            raise ValueError(f"expects KEY=VALUE with a number or nothing, got {change!r}")
        changes[key] = int(value) if value else None
    return changes


def compile_ahead(
    names: Iterable[str], weights: Sequence[Any], Ms: Sequence[int], device: torch.device
) -> None:
    """Compile what those of ``names`` that launch a kernel of this package will ask for, in several processes.

    weights: `bench.Problem` of each. Triton's cache on disk hands the kernels over.
    """
    names = set(names)
    wanted = [
        (problem, M, configs_ahead(names, problem, M, device)) for problem in weights for M in Ms
    ]
    if not any(configs for *_, configs in wanted):
        return
    with gemm_kernel.workers.Workers(device) as workers:
        if not workers.can_compile:
            return
        futures = [
            future
            for problem, M, configs in wanted
            for future in workers.compile(problem, M, configs, priority=0)
        ]
        for future in futures:
            future.result()  # a Skip: the provider meets it again, and says so


def configs_ahead(
    names: set[str], problem: Any, M: int, device: torch.device
) -> list[dict[str, Any]]:
    """What those of ``names`` launch or try for ``M`` rows of a `bench.Problem`."""
    N, K, layout, _ = problem
    configs = []
    for name in sorted(names):
        base = name.partition(":")[0]
        if base in _CHOICES:
            configs.append(_changed(_CHOICES[base](M, N, K, device, layout), _changes(name)))
    if "autotune" in names:
        configs += autotune_configs(M, device)
    if "upstream" in names:
        configs += upstream_grid()
    return configs


def is_right(prepared: Prepared, operands: Operands, exact: measure.ExactProduct) -> bool:
    """Is what the call gives the product? NaN in every element before: nothing earlier covers for it."""
    operands.out.fill_(math.nan)
    return exact.is_right(prepared.call(operands.weights[0]))
