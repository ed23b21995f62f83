"""What is suspicious in tuned files, found without a GPU: for review, pre-commit and `make quality`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Memory that one block may use, by compute capability: CUDA C++ programming guide, table of technical
# specifications.
_SHARED_MEMORY = {
    (7, 0): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 9): 101376,
    (9, 0): 232448, (10, 0): 232448, (10, 3): 232448, (12, 0): 101376,
}  # fmt: skip
# The first of these that the name has a word of.
_CAPABILITIES = {
    (12, 0): r"RTX_50[5-9]0|RTX_PRO",
    (10, 3): r"B300|GB300",
    (10, 0): r"B200|GB200|B100",
    (9, 0): r"H100|H200|H800|H20|GH200",
    (8, 9): r"L4|L40|L40S|L20|RTX_40[5-9]0|RTX_\d+(_SFF)?_Ada",
    (8, 0): r"A100|A800|A30",
    (8, 6): r"A10|A10G|A2|A16|A40|RTX_30[5-9]0|RTX_A\d+",
    (7, 5): r"T4|RTX_20[5-8]0|Quadro_RTX_\d+|TITAN_RTX|GTX_16\d\d",
    (7, 0): r"V100",
}
NAME = re.compile(
    r"N=(?P<N>[1-9]\d*),K=(?P<K>[1-9]\d*),device_name=(?P<device>[0-9A-Za-z._+()-]+?)"
    r"(?:,layout=NT)?\.json"
)

# A grid that reaches from few rows to many, without a gap that most of a bucket would fall into.
_SMALLEST_M, _LARGEST_M, _LARGEST_STEP = 16, 1024, 16
# Files whose grid came to this project as it is, unmeasured here.
AS_GIVEN = {"N=4096,K=4096,device_name=NVIDIA_L4.json"}


def check_files(kernel: Any, files: Sequence[Path]) -> list[str]:
    """A line for each finding in ``files``; they are compared with all others in their folders.

    kernel: the loaded kernel package.
    """
    findings = []
    contents: dict[Path, dict] = {}
    others = {other for path in files for other in path.parent.glob("*.json")}
    for path in sorted({*files, *others}):
        try:
            contents[path] = kernel.tuned_file.read_json(path)
        except (OSError, ValueError, RecursionError) as error:
            if path in files:
                findings.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    for path in files:
        if path in contents:
            findings += [f"{path}: {text}" for text in _check(kernel, path, contents)]
    return findings


def _check(kernel: Any, path: Path, contents: dict[Path, dict]) -> Iterator[str]:
    content = contents[path]
    name = NAME.fullmatch(path.name)
    if name is None:
        yield "no look-up asks for this name; expects N=…,K=…,device_name=….json, or with ,layout=NT"
    elif name["device"] == "CPU":
        yield "is from the interpreter, whose times mean nothing"
    measured = _measured(kernel, path)
    properties = _properties(kernel, name and name["device"], measured.values())
    Ms = []
    problems: dict[str, list[str]] = {}
    for key, entry in content.items():
        if not kernel.tuned_file.M_KEY.fullmatch(key):
            if isinstance(entry, dict):
                problems.setdefault("M must be a positive number in plain digits", []).append(key)
            continue
        Ms.append(int(key))
        problem = _problem(kernel, entry, properties)
        if problem:
            problems.setdefault(problem, []).append(key)
        elif name is not None:
            yield from _check_gain(kernel, int(key), entry, measured)
    for problem, keys in problems.items():
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        yield f"M={', '.join(keys[:3])}{more}: {problem}"
    if path.name not in AS_GIVEN:
        yield from _check_grid(Ms)
    for other, theirs in contents.items():
        if other < path and theirs == content and name and _is_other_device(name, other.name):
            yield f"is a copy of {other.name}, which is for another device"


def _problem(kernel: Any, entry: Any, properties: Any) -> str | None:
    problem = kernel.kernels.config_problem(entry)
    if problem or properties is None:
        return problem
    problem = kernel.kernels.config_problem(entry, properties)
    # What this process lacks (it interprets, or has an older Triton) is no mistake of the file's.
    return None if problem and "Triton" in problem else problem


def _check_grid(Ms: Sequence[int]) -> Iterator[str]:
    if not Ms:
        yield "has no entry for any M"
        return
    if list(Ms) != sorted(Ms):
        yield "its Ms are not in order"
    Ms = sorted(Ms)
    if Ms[0] > _SMALLEST_M:
        yield f"its smallest M is {Ms[0]}: what is measured for many rows serves few badly"
    if Ms[-1] < _LARGEST_M:
        yield f"its largest M is {Ms[-1]}: cut short?"
    for low, high in zip(Ms, Ms[1:]):
        if high > low * _LARGEST_STEP:
            yield f"has nothing between M={low} and M={high}"


def _check_gain(kernel: Any, M: int, entry: dict, measured: dict) -> Iterator[str]:
    """As fast as the default is what `tune_gemm` would not have chosen."""
    found = measured.get(M)
    if found is None or found.top[0][1] != entry or not found.default_us:
        return
    # One time for both: the entry is the default. And half a percent less, since the tuner compares round by round.
    is_default = found.tuned_us == found.default_us
    least = kernel.search.least_gain(found.default_us, found.torch_us or math.nan)
    if not is_default and found.tuned_us > found.default_us * (1 - least + 0.005):
        times = f"{found.tuned_us} µs, the default {found.default_us} µs"
        yield f"M={M}: is measured as no faster than the default ({times})"


def _is_other_device(name: re.Match, other: str) -> bool:
    match = NAME.fullmatch(other)
    return match is not None and match["device"] != name["device"]


def _measured(kernel: Any, path: Path) -> dict:
    folder = kernel.measurements.measurements_dir(path.parent)
    folders = [folder] if folder else []
    # A source tree's stand at its top.
    folders += [parent / "measurements" for parent in path.resolve().parents[2:4]]
    for folder in folders:
        measured = kernel.measurements.read_measurements(folder / path.name)
        if measured:
            return measured
    return {}


def _properties(kernel: Any, device: str | None, measured: Iterable[Any]) -> Any:
    """What is known of the device: by the measurements, or else by its name; None if nothing is."""
    make = kernel.device.DeviceProperties
    for measurement in measured:
        told = measurement.environment.get("device")
        if isinstance(told, dict) and isinstance(told.get("backend"), str):
            capability = told.get("capability")
            return make(
                told["backend"],
                tuple(capability) if isinstance(capability, list) else None,
                told.get("multiprocessors"),
                told.get("shared_memory"),
            )
    for capability, words in _CAPABILITIES.items():
        if device and re.search(rf"(?<![0-9A-Za-z])({words})(?![0-9A-Za-z])", device):
            return make("cuda", capability, None, _SHARED_MEMORY[capability])
    return None


def summary(findings: Sequence[str], count: int) -> str:
    """The findings and one line that sums them up."""
    verdict = _counted(len(findings), "finding") if findings else "nothing to object to"
    return "\n".join([*findings, f"{_counted(count, 'tuned file')}: {verdict}"])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
