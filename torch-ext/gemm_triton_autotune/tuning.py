"""Tuned configurations: which one a call gets, from which file, and `tune_gemm`, which makes them.

A file is looked for in `$GEMM_TUNED_CONFIG_DIR` (a path list), in the user's cache, where `tune_gemm`
writes, and in the package's `configs/`. It is named after the weight's shape and the GPU, so that
what was tuned on one GPU is never used on another.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch

from . import kernels, measure, search
from .arguments import check_device, check_dtype, check_problem, default_dtype, writable
from .bench import Problem
from .candidates import candidate_configs as candidate_configs
from .config import Config
from .defaults import default_configs, speed_in_words
from .device import device_name, device_properties, resolve_device
from .measurements import Measurement, measurements_dir, read_measurements, save_measurements
from .selection import entry_for
from .tuned_file import TunedConfigs, read_mergeable, read_tuned_file, save_tuned_configs
from .tuner import TUNED_MS, Candidates, default_candidates, tune_problem
from .workers import Workers

logger = logging.getLogger("gemm_triton_autotune")

_CONFIGS_DIR = Path(__file__).parent / "configs"


def config_file_name(N: int, K: int, device: torch.device | None = None, layout: str = "NN") -> str:
    """The name of the tuned file for a weight: "NN" is b (K, N) row-major, "NT" the transpose of (N, K)."""
    suffix = "" if layout == "NN" else f",layout={layout}"
    return f"N={N},K={K},device_name={device_name(device)}{suffix}.json"


def search_path() -> list[Path]:
    """The directories that are searched for a tuned file, in order."""
    listed = os.environ.get("GEMM_TUNED_CONFIG_DIR", "").split(os.pathsep)
    directories = [Path(directory) for directory in listed if directory]
    return [*directories, *filter(None, [user_cache_dir()]), _CONFIGS_DIR]


def user_cache_dir() -> Path | None:
    """The user's own tuned files: the installed package may be read-only. None for a user without a home."""
    home_cache = os.path.join(os.path.expanduser("~"), ".cache")
    # A relative path would be another one in each working directory; XDG's rule is to ignore it.
    for cache in (os.environ.get("XDG_CACHE_HOME", ""), home_cache):
        if os.path.isabs(cache):
            return Path(cache) / "gemm-triton-autotune" / "configs"
    return None


class _Loaded(NamedTuple):
    """What was found for some operands, and the line that says so."""

    tuned: TunedConfigs | None
    level: int
    message: str


# Either would grow for ever in a process that meets ever new weights.
_MAX_LOADED = 4096
_MAX_LOGGED = 1000


class _TunedConfigsCache:
    """Reads each tuned file once; clearing it forgets the files and what was chosen from them.

    It has no lock, which a fork could leave closed for ever: threads that come at once all read the file,
    and the first to have done so decides for all of them and reports it. What was read before a clearing
    is not found after it.
    """

    def __init__(self, load: Callable[..., _Loaded]) -> None:
        self._load = load
        self._loaded: dict[tuple, _Loaded] = {}
        functools.update_wrapper(self, load)

    def __call__(
        self, N: int, K: int, device: torch.device | None = None, layout: str = "NN"
    ) -> TunedConfigs | None:
        loaded = self._loaded
        key = N, K, resolve_device(device), layout
        found = loaded.get(key)
        if found is None:
            read = self._load(*key)
            if len(loaded) >= _MAX_LOADED:
                loaded.clear()
            found = loaded.setdefault(key, read)
            if found is read:
                _log_once(read.level, read.message)
        return found.tuned

    def discard(
        self, config: Mapping[str, Any], N: int, K: int, device: torch.device, layout: str
    ) -> tuple[Path, list[int]] | None:
        """Forget the entries with this configuration; the file and its Ms, or None if it has none."""
        loaded = self._loaded
        found = loaded.get((N, K, device, layout))
        if found is None or found.tuned is None:
            return None
        rest = found.tuned.without(config)
        loaded[N, K, device, layout] = found._replace(tuned=rest)
        dropped = [M for M in found.tuned if M not in rest]
        return (rest.path, dropped) if dropped else None

    def forget(self) -> None:
        """Read all files anew when they are asked for; what was reported of them stays reported."""
        self._loaded = {}
        forget_call_plans()

    def cache_clear(self) -> None:
        _logged.clear()
        _failed_defaults.clear()
        self.forget()


# What calls with the same kind of operands do, by that kind: filled by `calls`, and forgotten with the files.
call_plans: dict[tuple, Any] = {}


def forget_call_plans() -> None:
    """Start with new plans: a call that is under way puts its own with those that were there before."""
    global call_plans
    call_plans = {}


_logged: dict[str, object] = {}


def _log_once(level: int, message: str) -> None:
    """One line for each cause, and an end to them all."""
    if len(_logged) > _MAX_LOGGED:
        return
    mine = object()
    if _logged.setdefault(message, mine) is not mine:
        return
    if len(_logged) > _MAX_LOGGED:
        message = f"{_MAX_LOGGED} causes were reported: no more are in this process."
    logger.log(level, "%s", printable(message))


def printable(message: str) -> str:
    """``message`` for a log or a terminal: the name of a folder need not be text in any encoding."""
    return message.encode("utf-8", "backslashreplace").decode("utf-8")


@_TunedConfigsCache
def _load_tuned_configs(N: int, K: int, device: torch.device, layout: str) -> _Loaded:
    """The usable entries of the first tuned file for these operands; None, and a warning, without one."""
    # A file tuned for the other layout is still better than none; NN files need no layout in their name.
    layouts = ("NT", "NN") if layout == "NT" else ("NN",)
    for name in (config_file_name(N, K, device, layout) for layout in layouts):
        for directory in search_path():
            found = read_tuned_file(directory / name, device_properties(device))
            if found is not None:
                return _Loaded(found[0], *_report(*found))
    message = (
        "No tuned GEMM configuration for this weight on this device: there is no "
        f"{config_file_name(N, K, device, layout)} in {', '.join(map(str, search_path()))}. The default is "
        f"used, {speed_in_words(device_properties(device))}. To make the file, run `python tune.py --n {N} --k {K} --layout "
        f"{layout.lower()}` in the kernel's repository, or call `tune_gemm(N={N}, K={K}, layout={layout!r})`."
    )
    return _Loaded(None, logging.WARNING, message)


def _report(tuned: TunedConfigs, problems: dict[str, str]) -> tuple[int, str]:
    if not problems:
        return logging.INFO, f"Using tuned GEMM configurations from {tuned.path}."
    shown = [f"M={key}: {reason}" if key else reason for key, reason in list(problems.items())[:3]]
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    entries = "entry is" if len(tuned) == 1 else f"{len(tuned)} entries are"
    rest = f"Its other {entries} used" if tuned else "The default is used instead"
    return (
        logging.WARNING,
        f"Tuned GEMM file {tuned.path} cannot be used as it is: {'; '.join(shown)}{more}. {rest}.",
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

    It is an entry of the tuned file that can run on the device and that ``accepts`` takes: that of this very M, or the
    nearer one in log space of the two around it that suits M rows (`selection.entry_for`). It is the default if there
    is none, if M is more than `REACH` times outside of theirs, or if it suits M rows better.

    accepts: by default, what multiplies operands without gaps.
    """
    accepts = accepts or takes_contiguous(M, N, K, layout)
    return choose(M, N, K, resolve_device(device), layout, accepts)[0]


def choose(
    M: int,
    N: int,
    K: int,
    device: torch.device,
    layout: str,
    accepts: Callable[[Config], bool],
) -> tuple[Config, TunedConfigs | None, int | None]:
    """What `get_config` returns, the entries it could be of, and the M of the one that it is, None for the default."""
    tuned = _load_tuned_configs(N, K, device, layout)
    as_default = _without_failed(device, accepts)
    if tuned is not None:
        properties = device_properties(device)
        entry_m = entry_for(M, N, K, tuned, properties, layout, accepts, as_default)
        if entry_m is not None:
            # A copy: the entry is what every later call gets.
            return dict(tuned[entry_m]), tuned, entry_m
    return _default(M, N, K, device, layout, as_default), tuned, None


def takes_contiguous(M: int, N: int, K: int, layout: str) -> Callable[[Config], bool]:
    """Whether a configuration multiplies such operands without gaps: what is asked where there are none yet."""
    try:
        a, b, out = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in ((M, K), (N, K) if layout == "NT" else (K, N), (M, N))
        )
    except RuntimeError:  # their bytes are no number of 64 bits, so no call has them
        return lambda config: True
    b = b.t() if layout == "NT" else b
    return lambda config: kernels.operand_problem(config, a, b, out) is None


def default_config(
    M: int, N: int, K: int, device: torch.device | None = None, layout: str = "NN"
) -> Config:
    """The configuration of a (M, K) @ (K, N) on ``device`` for which nothing was tuned."""
    device = resolve_device(device)
    return _default(M, N, K, device, layout, _without_failed(device, lambda config: True))


# Defaults that failed to launch where another one did, with the device.
_failed_defaults: list[tuple[torch.device, Config]] = []


def _without_failed(
    device: torch.device, accepts: Callable[[Config], bool]
) -> Callable[[Config], bool]:
    """``accepts``, but for the defaults that failed: no call gets them, and no entry is compared with them."""
    if not _failed_defaults:
        return accepts
    return lambda config: (device, config) not in _failed_defaults and accepts(config)


def _default(
    M: int,
    N: int,
    K: int,
    device: torch.device,
    layout: str,
    accepts: Callable[[Config], bool],
) -> Config:
    """The first default that ``accepts`` takes; the last one whatever it says."""
    *better, last = default_configs(M, N, K, device_properties(device), layout)
    return dict(next(filter(accepts, better), last))


def launch_tuned(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    layout: str,
    M: int | None = None,
    bias: torch.Tensor | None = None,
) -> Config:
    """Write ``a @ b + bias``, none of them empty, into ``out`` as a call with ``M`` rows (by default a's).

    Returns: the configuration that did.
    """
    K, N = b.shape
    M = a.shape[0] if M is None else M
    biases = () if bias is None else (bias,)
    failed: list[tuple[Config, Exception]] = []

    def failure_of(config: Config) -> Exception | None:
        return next((error for other, error in failed if config == other), None)

    def accepts(config: Config) -> bool:
        return kernels.operand_problem(config, a, b, out) is None and failure_of(config) is None

    while True:
        config = get_config(M, N, K, a.device, layout, accepts)
        # The last default comes back although it failed: then it was no entry's fault, the call fails, and
        # none is given up.
        failure = failure_of(config)
        if failure is not None:
            raise failure
        try:
            kernels.launch_gemm_kernel(a, b, out, config, *biases)
        # No entry's fault either: it is raised as by any op, and may be gone at the next call.
        except torch.OutOfMemoryError:
            raise
        # Whatever went wrong (shared memory, registers, a fault of the compiler), an entry of a file is
        # not worth a failed call: the next nearest takes over, and in the end the defaults.
        except Exception as error:
            # Nor is it what a capture forbids, of this or another thread: to allocate, or to load a kernel.
            if "captur" in str(error):
                raise
            failed.append((config, error))
        else:
            defaults = default_configs(M, N, K, device_properties(a.device), layout)
            for other, error in failed:
                _reject(other, error, N, K, a.device, layout, is_default=other in defaults)
            return config


def _reject(
    config: Config,
    error: Exception,
    N: int,
    K: int,
    device: torch.device,
    layout: str,
    is_default: bool,
) -> None:
    """Give up the entries with ``config``, or the default, that failed to launch where another one did not.

    What is in range may yet need more than the device has, which only compiling shows.
    """
    dropped = _load_tuned_configs.discard(config, N, K, device, layout)
    is_new = is_default and (device, config) not in _failed_defaults
    if is_new:
        # Of an entry, too, which most are the default of their M: else the next call would compile it in vain again.
        _failed_defaults.append((device, config))
    if dropped is not None:
        path, Ms = dropped
        also = ", also a default," if is_new else ""
        what = f"Tuned GEMM file {path}: the entry for M={', '.join(map(str, Ms))}{also}"
    elif is_new:
        what = f"The default GEMM configuration {config}"
    else:
        return  # another thread has met it before
    forget_call_plans()
    # A compiler's message can be pages long; its first line names the fault.
    reason = (str(error).strip() or "no message").splitlines()[0][:200]
    _log_once(
        logging.WARNING,
        f"{what} cannot be launched here ({type(error).__name__}: {reason}). It is not used any more in "
        "this process.",
    )


def tune_gemm(
    N: int,
    K: int,
    Ms: Iterable[int] = TUNED_MS,
    dtype: torch.dtype | None = None,
    save_dir: str | os.PathLike[str] | None = None,
    candidates: Iterable[Config] | Candidates | None = None,
    layout: str = "NN",
    device: torch.device | None = None,
    timer: measure.Timer | None = None,
    on_progress: Callable[[int, int, int, float], None] | None = None,
    on_result: Callable[[search.Result], None] | None = None,
    measurements: str | os.PathLike[str] | None = None,
    resume: bool = False,
    workers: Workers | None = None,
) -> Path:
    """Measure candidates for (M, K) @ (K, N) at each M of ``Ms`` and write the fastest into a tuned file.

    On a GPU they run in processes of their own, so that one that hangs, crashes or breaks the device costs
    itself alone.

    Ms: values of M; each is saved as soon as it is measured, beside what the file already has. In the end
    those that another M's configuration serves as well, to within 1 %, are given that.
    dtype: float16 or bfloat16, which share a file: for an M measured in both, the later one stays. By
    default bfloat16 where the device computes it.
    save_dir: by default the user's cache, which every process of this user searches.
    layout: "NT" where b is the transpose of an (N, K) weight, as in ``gemm(x, weight.t())`` and nn.Linear; "NN" for a
    row-major b (K, N).
    device: None is the current one.
    candidates: configurations, or a function of M that gives them; by default `candidate_configs`. Always
    measured besides: `default_config`, first, and last what the file has for this M and those beside it.
    timer: ``timer(fn)`` gives the milliseconds of ``fn()``, which then runs in this process; by default
    CUDA graphs with cold weights.
    on_progress: called with (M, candidates done, candidates, best milliseconds) after each candidate.
    on_result: called with a `search.Result` after each M.
    measurements: folder for how each entry was found; by default `measurements` beside a ``save_dir``
    that is called `configs`, and none beside another.
    resume: leave out each M of which the measurements say that the same was done here before.
    workers: processes to run in, to be used for several weights; by default new ones.
    Returns: the path of the file.
    Raises: ValueError for arguments out of range or a file there that is no tuned file; OSError if
    ``save_dir`` cannot be written; RuntimeError if for no M any candidate ran.
    """
    Ms = list(dict.fromkeys(Ms))
    target = tuning_target(N, K, Ms, dtype, save_dir, layout, device, measurements)
    tune_problem(
        target.problem,
        Ms,
        target.device,
        _as_function(candidates, target.problem, target.device),
        *target.read(),
        target.save,
        timer,
        workers,
        resume,
        on_progress,
        on_result,
    )
    outranking = outranked_by(target.path)
    if outranking is not None:
        hides = f"{outranking} is searched before {target.path} and hides it."
        logger.warning("%s", printable(hides))
    elif not is_searched(target.path):
        unseen = f"No call searches {target.path.parent}; add it to GEMM_TUNED_CONFIG_DIR."
        logger.warning("%s", printable(unseen))
    return target.path


class TuningTarget(NamedTuple):
    """What is tuned, on which device, and the files that take the result."""

    problem: Problem
    device: torch.device
    path: Path
    measurements: Path | None

    def read(self) -> tuple[dict[int, Config], dict[int, Measurement]]:
        """The entries that are there and can be used, and what they are from."""
        found = read_tuned_file(self.path, device_properties(self.device))
        return (
            {} if found is None else dict(found[0]),
            {} if self.measurements is None else read_measurements(self.measurements),
        )

    def save(self, entries: Mapping[int, Config], measured: Mapping[int, Measurement]) -> None:
        """Add to both files. Raises: as `save_tuned_configs`.

        Measurements that cannot be written are reported, and no reason to stop.
        """
        save_tuned_configs(self.path, entries)
        _load_tuned_configs.forget()
        if self.measurements is not None:
            try:
                save_measurements(self.measurements, measured)
            except OSError as error:
                _log_once(logging.WARNING, f"Measurements cannot be written: {error}.")


def tuning_target(
    N: int,
    K: int,
    Ms: Sequence[int] = TUNED_MS,
    dtype: torch.dtype | None = None,
    save_dir: str | os.PathLike[str] | None = None,
    layout: str = "NN",
    device: torch.device | None = None,
    measurements: str | os.PathLike[str] | None = None,
) -> TuningTarget:
    """Check the arguments of `tune_gemm` and that its files can be written; raises as it does."""
    if not Ms:
        raise ValueError("tune_gemm expects at least one M, got none")
    check_problem(Ms, N, K, layout)
    device = resolve_device(device)
    check_device("tune_gemm", device)
    dtype = default_dtype(device) if dtype is None else dtype
    check_dtype("tune_gemm", dtype)
    path = _default_save_dir() if save_dir is None else Path(save_dir)
    path = writable(path) / config_file_name(N, K, device, layout)
    read_mergeable(path)
    writable(Path(os.path.realpath(path)).parent)  # where a link leads
    folder = measurements_dir(path.parent) if measurements is None else Path(measurements)
    problem = Problem(N, K, layout, str(dtype).rpartition(".")[2])
    return TuningTarget(problem, device, path, folder and folder / path.name)


def _as_function(
    candidates: Iterable[Config] | Candidates | None, problem: Problem, device: torch.device
) -> Candidates:
    if candidates is None:
        return default_candidates(problem, device)
    if callable(candidates):
        return candidates
    given = list(candidates)
    return lambda M: given


def outranked_by(path: Path) -> Path | None:
    """The file of the same name that look-up finds before ``path``, or None."""
    for directory in search_path():
        if os.path.realpath(directory) == os.path.realpath(path.parent):
            return None
        # The package's own files come last: what is tuned into a source tree replaces them.
        if directory != _CONFIGS_DIR and os.path.isfile(directory / path.name):
            return directory / path.name
    return None


def is_searched(path: Path) -> bool:
    """Does look-up search the folder of ``path``?"""
    folder = os.path.realpath(path.parent)
    return any(os.path.realpath(directory) == folder for directory in search_path())


def _default_save_dir() -> Path:
    directory = user_cache_dir()
    if directory is None:
        raise ValueError(
            "tune_gemm expects a folder to write to: this user has no home folder; pass save_dir, or set "
            "XDG_CACHE_HOME"
        )
    return directory
