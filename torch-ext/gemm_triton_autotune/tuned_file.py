"""Tuned files: reading one so that nothing in it can break a launch, and writing one so that
nothing in it is lost.

    N=4096,K=4096,device_name=NVIDIA_L4.json

    {
        "1":    {"BLOCK_SIZE_M": 16,  "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8,
                 "num_warps": 4, "num_stages": 3},
        "1024": {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8,
                 "num_warps": 4, "num_stages": 3}
    }

A top-level key is a value of M in plain decimal digits; its object is a configuration
(`config.py`). Other top-level keys are the notes of other tools: kept, and not read.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable

from .config import Config
from .device import DeviceProperties
from .kernels import config_problem

try:
    import fcntl
except ImportError:  # Windows: writers are not serialised there, each write is still atomic
    fcntl = None

_M_KEY = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
# Several hundred entries; more is no tuned file, and is not read into a serving process.
_MAX_BYTES = 1 << 20


class TunedConfigs(dict[int, Config]):
    """The entries of one tuned file that can run on one device: M -> configuration, ascending."""

    def __init__(self, path: Path, entries: Mapping[int, Config]) -> None:
        super().__init__(sorted(entries.items()))
        self.path = path
        self._index()

    def _index(self) -> None:
        Ms = list(self)
        # Nearest in log space: below the geometric mean of two neighbours the smaller one, and at it.
        # Squares keep that in exact integers.
        self._nearest = (Ms, [low * high for low, high in zip(Ms, Ms[1:])])

    def nearest(self, M: int, accepts: Callable[[Config], bool] | None = None) -> int | None:
        """The tuned M nearest to ``M`` in log space, at a tie the smaller, whose entry ``accepts`` takes."""
        Ms, squared_boundaries = self._nearest
        if not Ms:
            return None
        nearest = Ms[bisect.bisect_left(squared_boundaries, M * M)]
        if accepts is None or accepts(self[nearest]):
            return nearest
        others = [other for other in Ms if accepts(self[other])]
        return min(others, key=lambda other: abs(math.log(M / other)), default=None)

    def discard(self, config: Mapping[str, Any]) -> list[int]:
        """Drop every entry that has this configuration; the Ms dropped."""
        dropped = [M for M, entry in list(self.items()) if entry == config]
        for M in dropped:
            self.pop(M, None)
        self._index()
        return dropped


def read_tuned_file(
    path: Path, properties: DeviceProperties
) -> tuple[TunedConfigs, dict[str, str]] | None:
    """The usable entries of ``path`` on such a device, and for each other one the reason.

    Returns: None if there is no such file. A file that cannot be read as a whole has no entries and
    one reason, under the empty key. Nothing is raised for what a file is or holds.
    """
    try:
        content = _read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        return TunedConfigs(path, {}), {"": str(error) or type(error).__name__}
    entries: dict[int, Config] = {}
    problems: dict[str, str] = {}
    for key, value in content.items():
        if not _M_KEY.fullmatch(key):
            # A note of another tool ("triton_version") is a plain value; an object was meant as an entry.
            if isinstance(value, dict):
                problems[key] = "M must be a positive number in plain digits"
            continue
        problem = config_problem(value, properties)
        if problem:
            problems[key] = problem
        else:
            entries[int(key)] = value
    if not entries and not problems:
        problems[""] = "it has no entry for any M"
    return TunedConfigs(path, entries), problems


def _read_json(path: Path) -> dict[str, Any]:
    # Opened without blocking and looked at before it is read: a pipe would wait for ever.
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > _MAX_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, more than {_MAX_BYTES}")
        text = file.read().decode("utf-8-sig")
    content = json.loads(text, object_pairs_hook=_object_without_duplicates)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    return content


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {max(keys, key=keys.count)!r:.40} occurs more than once")
    return content


def save_tuned_configs(path: Path, entries: Mapping[int, Config]) -> None:
    """Merge ``entries`` into the file at ``path``: other Ms and notes stay, the Ms are sorted.

    The file is replaced in one step, under a lock of its directory, so that it is valid at every moment
    and several writers lose nothing of each other.
    Raises: ValueError if there is a file that is no tuned file; OSError if it cannot be written.
    """
    path = path.resolve()  # a link stays a link: what it points to is replaced
    with _locked(path.parent):
        content = read_mergeable(path)
        content.update({str(M): config for M, config in entries.items()})
        tuned = sorted((key for key in content if _M_KEY.fullmatch(key)), key=int)
        notes = [key for key in content if not _M_KEY.fullmatch(key)]
        text = json.dumps({key: content[key] for key in tuned + notes}, indent=4) + "\n"
        _replace(path, text.encode())


def read_mergeable(path: Path) -> dict[str, Any]:
    """What ``path`` holds, to be kept; ValueError if that cannot be known."""
    try:
        return _read_json(path)
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a tuned file ({error}); nothing was changed, move it away to tune anew"
        ) from None


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    # The directory itself is locked, so that no lock file is left behind; the system lets go of the
    # lock of a process that dies.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    if fcntl is not None:
        # Under the lock nobody else is writing: what is there was left by a process that died.
        for stale in path.parent.glob(f".{_escape_glob(path.name)}.*.tmp"):
            stale.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _escape_glob(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
