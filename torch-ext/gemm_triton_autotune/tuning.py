"""Tuned configurations: which one a call gets, from which file, and `tune_gemm`, which makes them.

A file is looked for in `$GEMM_TUNED_CONFIG_DIR` (a path list), in the user's cache, where `tune_gemm`
writes, and in the package's `configs/`. It is named after the weight's shape and the GPU, so that
what was tuned on one GPU is never used on another.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Callable

import torch

from . import kernels, measure, search
from .candidates import candidate_configs
from .config import Config, default_config
from .device import device_guard, device_name, device_properties, resolve_device
from .tuned_file import TunedConfigs, read_mergeable, read_tuned_file, save_tuned_configs

logger = logging.getLogger("gemm_triton_autotune")

_CONFIGS_DIR = Path(__file__).parent / "configs"

LAYOUTS = ("NN", "NT")
DTYPES = (torch.float16, torch.bfloat16)

# fmt: off
TUNED_MS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
# fmt: on


def config_file_name(N: int, K: int, device: torch.device | None = None, layout: str = "NN") -> str:
    """The name of the tuned file for a weight: "NN" is b (K, N) row-major, "NT" the transpose of (N, K)."""
    suffix = "" if layout == "NN" else f",layout={layout}"
    return f"N={N},K={K},device_name={device_name(device)}{suffix}.json"


def search_path() -> list[Path]:
    """The directories that are searched for a tuned file, in order."""
    listed = os.environ.get("GEMM_TUNED_CONFIG_DIR", "").split(os.pathsep)
    return [*(Path(directory) for directory in listed if directory), user_cache_dir(), _CONFIGS_DIR]


def user_cache_dir() -> Path:
    """The user's own tuned files: the installed package may be read-only."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "gemm-triton-autotune" / "configs"


class _TunedConfigsCache:
    """Reads each tuned file once; clearing it forgets the files and what was chosen from them."""

    def __init__(self, load: Callable[..., TunedConfigs | None]) -> None:
        self._load = functools.lru_cache(maxsize=4096)(load)
        functools.update_wrapper(self, load)

    def __call__(
        self, N: int, K: int, device: torch.device | None = None, layout: str = "NN"
    ) -> TunedConfigs | None:
        return self._load(N, K, device, layout)

    def cache_clear(self) -> None:
        self._load.cache_clear()
        call_plans.clear()


# What calls with the same kind of operands do, by that kind: filled by `op`, and forgotten with the files.
call_plans: dict[tuple, Any] = {}


@_TunedConfigsCache
def _load_tuned_configs(
    N: int, K: int, device: torch.device | None, layout: str
) -> TunedConfigs | None:
    """The usable entries of the first tuned file for these operands; None, and a warning, without one."""
    # A file tuned for the other layout is still better than none; NN files need no layout in their name.
    layouts = ("NT", "NN") if layout == "NT" else ("NN",)
    for name in (config_file_name(N, K, device, layout) for layout in layouts):
        for directory in search_path():
            found = read_tuned_file(directory / name, device_properties(resolve_device(device)))
            if found is not None:
                tuned, problems = found
                _report(tuned, problems)
                return tuned
    logger.warning(
        "No tuned GEMM configuration for this weight on this device: there is no %s in %s. The default "
        "is used, which may be slower. To make the file, run `python tune.py --n %d --k %d --layout %s` "
        "in the kernel's repository, or call `tune_gemm(N=%d, K=%d, layout=%r)`.",
        config_file_name(N, K, device, layout),
        ", ".join(map(str, search_path())),
        N,
        K,
        layout.lower(),
        N,
        K,
        layout,
    )
    return None


def _report(tuned: TunedConfigs, problems: dict[str, str]) -> None:
    if not problems:
        logger.info("Using tuned GEMM configurations from %s.", tuned.path)
        return
    shown = [f"M={key}: {reason}" if key else reason for key, reason in list(problems.items())[:3]]
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    logger.warning(
        "Tuned GEMM file %s cannot be used as it is: %s%s. %s.",
        tuned.path,
        "; ".join(shown),
        more,
        f"Its other {len(tuned)} entries are used" if tuned else "The default is used instead",
    )


def get_config(
    M: int,
    N: int,
    K: int,
    device: torch.device | None = None,
    layout: str = "NN",
    accepts: Callable[[Config], bool] | None = None,
) -> Config:
    """The configuration that a (M, K) @ (K, N) on ``device`` runs with; None is the current device.

    It is the entry whose M is nearest in log space (at a tie the smaller M) among those of the tuned
    file that can run on the device and that ``accepts`` takes, or the default.
    """
    tuned = _load_tuned_configs(N, K, resolve_device(device), layout)
    nearest_m = tuned.nearest(M, accepts) if tuned else None
    return default_config(M, N, K) if nearest_m is None else tuned[nearest_m]


def reject_config(
    config: Mapping[str, Any], error: Exception, N: int, K: int, device: torch.device, layout: str
) -> bool:
    """Forget the entries with a ``config`` that failed to launch; False if none has it.

    A file's entry can be in range and yet need more than the device has, which only compiling shows.
    """
    tuned = _load_tuned_configs(N, K, device, layout)
    dropped = tuned.discard(config) if tuned else []
    if dropped:
        call_plans.clear()
        logger.warning(
            "Tuned GEMM file %s: the entry for M=%s cannot be launched here (%s: %s). It is not used "
            "any more in this process.",
            tuned.path,
            ", ".join(map(str, dropped)),
            type(error).__name__,
            str(error)[:200],
        )
    return bool(dropped)


def explain(M: int, N: int, K: int, device: torch.device | None = None, layout: str = "NN") -> str:
    """Say in words which configuration a (M, K) @ (K, N) on ``device`` gets, from where, and why."""
    device = resolve_device(device)
    _check_problem([M], N, K, layout)
    config = get_config(M, N, K, device, layout)
    problem = f"(M={M}, K={K}) @ (K={K}, N={N}), {layout}, on {device_name(device)}"
    tuned = _load_tuned_configs(N, K, device, layout)
    if tuned:
        nearest_m = tuned.nearest(M)
        why = (
            f"tuned, from {tuned.path}, entry M={nearest_m}: "
            + ("this very M" if nearest_m == M else "the nearest in log space")
            + f" of M={', '.join(map(str, tuned))}"
        )
    elif tuned is not None:
        why = f"the default, because no entry of {tuned.path} can be used"
    else:
        names = [config_file_name(N, K, device, name) for name in dict.fromkeys((layout, "NN"))]
        why = (
            f"the default, because there is no {' or '.join(names)} in "
            f"{', '.join(map(str, search_path()))}"
        )
    return f"{problem}: {config}, {why}."


def warmup(
    N: int,
    K: int,
    device: torch.device | None = None,
    layout: str = "NN",
    dtype: torch.dtype = torch.bfloat16,
) -> list[Config]:
    """Compile every configuration that calls with a weight of this shape can get, before they come.

    Runs one product for each, of as many rows as its M. Returns: the configurations, in order of M.
    """
    device = resolve_device(device)
    _check_problem([1], N, K, layout)
    b = measure.make_weight(N, K, dtype, layout, device)
    tuned = _load_tuned_configs(N, K, device, layout)
    # Without a file the default depends on M: powers of two see all of its steps.
    Ms = list(tuned) if tuned else [1 << exponent for exponent in range(14)]
    launched: list[Config] = []
    for M in Ms:
        config = get_config(M, N, K, device, layout)
        if config not in launched:
            a = torch.zeros(M, K, dtype=dtype, device=device)
            kernels.launch_gemm_kernel(a, b, a.new_empty(M, N), config)
            launched.append(config)
    return launched


def tune_gemm(
    N: int,
    K: int,
    Ms: Iterable[int] = TUNED_MS,
    dtype: torch.dtype | None = None,
    save_dir: str | os.PathLike[str] | None = None,
    candidates: Iterable[Config] | None = None,
    layout: str = "NN",
    device: torch.device | None = None,
    timer: measure.Timer | None = None,
    on_progress: Callable[[int, int, int, float], None] | None = None,
    on_result: Callable[[search.Result], None] | None = None,
) -> Path:
    """Measure candidates for (M, K) @ (K, N) at each M of ``Ms`` and write the fastest into a tuned file.

    Ms: values of M; each is saved as soon as it is measured, beside what the file already has.
    dtype: float16 or bfloat16, which share a file; by default bfloat16 where the device computes it.
    save_dir: by default the user's cache, which every process of this user searches.
    candidates: by default `candidate_configs`; `default_config` is always measured, and first.
    timer: ``timer(fn)`` gives the milliseconds of ``fn()``; by default CUDA graphs with cold weights.
    on_progress: called with (M, candidates done, candidates, best milliseconds) after each candidate.
    on_result: called with a `search.Result` after each M.
    Returns: the path of the file.
    Raises: ValueError for arguments out of range or a file there that is no tuned file; OSError if
    ``save_dir`` cannot be written; RuntimeError if for no M any candidate ran.
    """
    Ms = list(dict.fromkeys(Ms))
    _check_problem(Ms, N, K, layout)
    device = resolve_device(device)
    if device.type == "cpu" and not kernels.INTERPRETED:
        raise ValueError(
            "tune_gemm needs a GPU, and torch sees none; set TRITON_INTERPRET=1 before importing the "
            "kernel to try it on the CPU, where times mean nothing"
        )
    if dtype is None:
        dtype = _default_dtype(device)
    if dtype not in DTYPES:
        raise ValueError(f"tune_gemm expects dtype float16 or bfloat16, got {dtype}")
    directory = user_cache_dir() if save_dir is None else Path(save_dir)
    path = _writable(directory) / config_file_name(N, K, device, layout)
    read_mergeable(path)
    if timer is None and device.type != "cuda":
        timer = measure.cpu_timer if device.type == "cpu" else measure.do_bench_timer
    given = None if candidates is None else list(candidates)

    failures: list[str] = []
    with device_guard(device):
        weights = measure.make_weights(N, K, dtype, layout, device)
        for M in Ms:
            if given is None:
                tried = candidate_configs(M, N, K, device_properties(device), layout)
            else:
                default = default_config(M, N, K)
                tried = [default, *(config for config in given if config != default)]
            try:
                result = search.search(M, weights, tried, timer, on_progress)
            except (RuntimeError, MemoryError) as error:  # torch's out-of-memory is a RuntimeError
                failures.append(str(error).splitlines()[0])
                logger.warning("M=%d was not tuned: %s", M, failures[-1])
                continue
            save_tuned_configs(path, {M: result.config})
            _load_tuned_configs.cache_clear()
            if on_result is not None:
                on_result(result)
    if len(failures) == len(Ms):
        raise RuntimeError(failures[0])
    outranking = outranked_by(path)
    if outranking is not None:
        logger.warning("%s is searched before %s and hides it.", outranking, path)
    return path


def outranked_by(path: Path) -> Path | None:
    """The file of the same name that look-up finds before ``path``, or None."""
    for directory in search_path():
        if directory.resolve() == path.parent.resolve():
            return None
        # The package's own files come last: what is tuned into a source tree replaces them.
        if directory != _CONFIGS_DIR and (directory / path.name).is_file():
            return directory / path.name
    return None


def _check_problem(Ms: list[int], N: int, K: int, layout: str) -> None:
    if not Ms:
        raise ValueError("tune_gemm expects at least one M")
    for name, value in (("N", N), ("K", K), *(("M", M) for M in Ms)):
        try:
            valid = not isinstance(value, bool) and 0 < operator.index(value) < 1 << 40
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")


def _default_dtype(device: torch.device) -> torch.dtype:
    # sm_75 has float16 tensor cores and no bfloat16.
    is_cuda = device.type == "cuda" and torch.version.hip is None
    if is_cuda and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def _writable(directory: Path) -> Path:
    """``directory``, made if it is not there, and proved to take a file before anything is measured."""
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
