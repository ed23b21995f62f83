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
import glob
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable

from .config import Config
from .device import DeviceProperties
from .kernels import as_launched

try:
    import fcntl
except ImportError:  # Windows: writers are not serialised there, each write is still atomic
    fcntl = None

# What a top-level key that stands for an M looks like.
M_KEY = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
# Several hundred entries; more is no tuned file, and is not read into a serving process.
_MAX_BYTES = 1 << 20
# How far outside the tuned Ms an entry still serves. One for a row would run a thousand of them at a
# fraction of the default's speed (vllm-project/vllm PR 52192).
REACH = 16
# From here on more rows are more of the same: no M is further away than this one.
MANY_ROWS = 8192


class TunedConfigs(dict[int, Config]):
    """The entries of one tuned file that can run on one device: M -> configuration, ascending.

    Never changed once it is made, so that threads can share it; but for ``chosen`` and ``corrections``, where `selection`
    keeps what follows from the entries.
    """

    def __init__(self, path: Path, entries: Mapping[int, Config]) -> None:
        super().__init__(sorted(entries.items()))
        self.path = path
        self.chosen: dict[tuple, int | None] = {}
        self.corrections: dict[int, float] = {}
        self._Ms = list(self)

    def neighbours(
        self, M: int, accepts: Callable[[Config], bool] | None = None
    ) -> tuple[int, ...]:
        """The tuned Ms next to ``M`` whose entries ``accepts`` takes: M itself, else the one below and the one above.

        Returns: the nearer one in log space first, at a tie the smaller; none if there is none, or if M is outside of all
        that are accepted by more than a factor of `REACH`.
        """

        def is_accepted(other: int) -> bool:
            return accepts is None or accepts(self[other])

        if M in self and is_accepted(M):
            return (M,)
        lower = self._Ms[: bisect.bisect_left(self._Ms, M)]
        higher = self._Ms[bisect.bisect_right(self._Ms, M) :]
        below = next(filter(is_accepted, reversed(lower)), None)
        above = next(filter(is_accepted, higher), None)
        if below is None:
            return () if above is None or above > M * REACH else (above,)
        if above is None:
            return () if min(M, MANY_ROWS) > below * REACH else (below,)
        # Nearest in log space: below the geometric mean of the two the smaller one, and at it. Squares keep that in
        # exact integers.
        return (below, above) if below * above >= M * M else (above, below)

    def without(self, config: Mapping[str, Any]) -> TunedConfigs:
        """The same, but for the entries that have this configuration."""
        return TunedConfigs(self.path, {M: entry for M, entry in self.items() if entry != config})


def read_tuned_file(
    path: Path, properties: DeviceProperties
) -> tuple[TunedConfigs, dict[str, str]] | None:
    """The usable entries of ``path`` on such a device, and for each other one the reason.

    Returns: None if there is no such file. A file that cannot be read as a whole has no entries and
    one reason, under the empty key. Nothing is raised for what a file is or holds.
    """
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, PermissionError) and not os.path.lexists(path):
            return None  # the directory is closed to us, as another user's cache is
        return TunedConfigs(path, {}), {"": _one_line(str(error) or type(error).__name__)}
    entries: dict[int, Config] = {}
    problems: dict[str, str] = {}
    for key, value in content.items():
        if not M_KEY.fullmatch(key):
            # A note of another tool ("triton_version") is a plain value; an object was meant as an entry.
            if isinstance(value, dict):
                problems[_one_line(key)] = "M must be a positive number in plain digits"
            continue
        config, problem = as_launched(value, properties)
        if problem:
            problems[key] = _one_line(problem)
        else:
            entries[int(key)] = config
    if not entries and not problems:
        problems[""] = "it has no entry for any M"
    return TunedConfigs(path, entries), problems


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; OSError, ValueError or RecursionError if it holds none."""
    # Opened without blocking and looked at before it is read: a pipe would wait for ever.
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > _MAX_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, more than {_MAX_BYTES}")
        with open(descriptor, "rb", closefd=False) as file:
            # Not more than that whatever its size is said to be; None where there is no answer yet.
            text = (file.read(_MAX_BYTES) or b"").decode("utf-8")
    finally:
        os.close(descriptor)
    # The byte order mark by hand: its codec is a module that Python looks for at the first use, which a process
    # that has given up its rights may not find.
    content = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object_without_duplicates)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    return content


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {key!r:.40} occurs more than once")
    return content


def _one_line(text: str) -> str:
    """``text`` as it may stand in a log: what a file holds makes no second line, and no long one."""
    short = text if len(text) <= 160 else f"{text[:157]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)


def save_tuned_configs(path: Path, entries: Mapping[int, Config]) -> None:
    """Merge ``entries`` into the file at ``path``: other Ms and notes stay, the Ms are sorted.

    The file is replaced in one step, under a lock of its directory, so that it is valid at every moment
    and several writers lose nothing of each other.
    Raises: ValueError if there is a file that is no tuned file; OSError if it cannot be written.
    """

    def merged(path: Path) -> bytes:
        content = read_mergeable(path)
        content.update({str(M): config for M, config in entries.items()})
        return _encode(content)

    replace_file(path, merged)


def replace_file(path: Path, make_content: Callable[[Path], bytes]) -> None:
    """Replace ``path`` in one step by what ``make_content`` of it returns, with other writers kept out."""
    path = Path(os.path.realpath(path))  # a link stays a link: what it points to is replaced
    with _locked(path.parent) as is_alone:
        if is_alone:
            _remove_leftovers(path)
        _replace(path, make_content(path))


def read_mergeable(path: Path) -> dict[str, Any]:
    """What ``path`` holds, to be kept; ValueError if that cannot be known."""
    try:
        content = read_json(path)
        _encode(content)  # what can only just be read can be too deep to be written
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a tuned file ({_one_line(str(error))}); nothing was changed, move it away to "
            "tune anew"
        ) from None
    return content


def _encode(content: Mapping[str, Any]) -> bytes:
    tuned = sorted((key for key in content if M_KEY.fullmatch(key)), key=int)
    notes = [key for key in content if not M_KEY.fullmatch(key)]
    return (json.dumps({key: content[key] for key in tuned + notes}, indent=4) + "\n").encode()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Keep other writers out of ``directory``; yields whether its file system can do that."""
    descriptor = _lock(directory)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            # Closing alone would leave the lock to a process that was forked meanwhile.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _lock(directory: Path) -> int | None:
    if fcntl is None:
        return None
    # The directory itself is locked, so that no lock file is left behind; the system lets go of the lock
    # of a process that dies. NFS locks only what is open for writing, which a directory never is.
    lock_file = directory / ".lock"
    for target, flags in ((directory, os.O_RDONLY), (lock_file, os.O_RDWR | os.O_CREAT)):
        with contextlib.suppress(OSError):
            descriptor = os.open(target, flags, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor
    return None


def _remove_leftovers(path: Path) -> None:
    # Nobody else is writing: what is there was left by a process that died.
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def _replace(path: Path, data: bytes) -> None:
    # Random, since two machines that share a directory can have one process id.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
