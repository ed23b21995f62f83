"""What the entries of a tuned file were chosen by: a file of the same name in `measurements/`.

    N=4096,K=4096,device_name=NVIDIA_L4.json

    {
        "schema_version": 1,
        "environments": [{"date": "2026-11-29", "torch": "2.11.0", "triton": "3.6.0", ...}],
        "measurements": {
            "16": {
                "environment": 0, "dtype": "bfloat16", "space": "0123456789ab",
                "tuned_us": 10.2, "default_us": 18.3, "torch_us": 12.7, "noise": 0.004,
                "top": [
                    {"time_us": 10.2, "config": {"BLOCK_SIZE_M": 16, ...}}
                ]
            }
        }
    }

`environment` counts from 0 in `environments`; `noise` is the standard error of tuned against default, as a
part of the time; `space` says which candidates of which kernels were compared. A time that was not
measured is null. No look-up reads these files, so they cannot break a launch.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from .config import Config
from .device import device_properties
from .tuned_file import M_KEY, read_json, replace_file

SCHEMA_VERSION = 1
TOP = 5

# Where a driver says its version: NVIDIA's and AMD's on Linux.
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


class Measurement(NamedTuple):
    """How the entry for one M was chosen. Times in microseconds, None where there is none."""

    environment: Mapping[str, Any]
    dtype: str
    space: str
    tuned_us: float
    default_us: float | None
    torch_us: float | None
    noise: float | None
    # The best configurations, the chosen one first.
    top: tuple[tuple[float, Config], ...]


def measurements_dir(configs_dir: Path) -> Path | None:
    """Where the measurements of the tuned files in ``configs_dir`` are; None for a folder of another name."""
    return configs_dir.parent / "measurements" if configs_dir.name == "configs" else None


def describe_environment(device: torch.device, protocol: str) -> dict[str, Any]:
    """Date, versions and device, as far as they are known here."""
    properties = device_properties(device)
    runtime = torch.version.hip or torch.version.cuda or getattr(torch.version, "xpu", None)
    return {
        "date": datetime.date.today().isoformat(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "driver": _driver_version(),
        "runtime": runtime,
        "device": {
            "backend": properties.backend,
            "capability": properties.capability and list(properties.capability),
            "multiprocessors": properties.multiprocessors,
            "shared_memory": properties.shared_memory,
        },
        "protocol": protocol,
    }


def _driver_version() -> str | None:
    for name in _DRIVER_FILES:
        try:
            text = Path(name).read_text(errors="replace")
        except OSError:
            continue
        version = re.search(r"\b\d+\.\d+(\.\d+)*\b", text)
        if version:
            return version[0]
    return None


def is_same_environment(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Can times of both be compared: the same device, versions and protocol, on any date?"""
    return {**one, "date": None} == {**other, "date": None}


def read_measurements(path: Path) -> dict[int, Measurement]:
    """What ``path`` holds, by M, ascending. Nothing is raised for what a file is or holds."""
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError):
        return {}
    environments, found = content.get("environments"), content.get("measurements")
    if content.get("schema_version") != SCHEMA_VERSION or not isinstance(environments, list):
        return {}
    measured = {}
    for M, record in found.items() if isinstance(found, dict) else ():
        try:
            if M_KEY.fullmatch(M):
                measured[int(M)] = _measurement(record, environments)
        except (KeyError, TypeError, ValueError, IndexError):
            continue
    return dict(sorted(measured.items()))


def _measurement(record: Mapping[str, Any], environments: list[Any]) -> Measurement:
    top = tuple((_time_us(entry["time_us"]), dict(entry["config"])) for entry in record["top"])
    if not top:
        raise ValueError("no configuration")
    return Measurement(
        environment=dict(environments[record["environment"]]),
        dtype=str(record["dtype"]),
        space=str(record["space"]),
        tuned_us=_time_us(record["tuned_us"]),
        default_us=_time_us(record["default_us"], optional=True),
        torch_us=_time_us(record["torch_us"], optional=True),
        noise=_number(record["noise"]),
        top=top,
    )


def _time_us(value: Any, optional: bool = False) -> Any:
    if value is None and optional:
        return None
    if _number(value) is None or not value > 0:
        raise ValueError("not a time")
    return value


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def to_record(measurement: Measurement) -> dict[str, Any]:
    """``measurement`` as JSON takes it; `from_record` gives it back."""
    top = [{"time_us": time_us, "config": config} for time_us, config in measurement.top]
    return {**measurement._asdict(), "environment": dict(measurement.environment), "top": top}


def from_record(record: Mapping[str, Any]) -> Measurement:
    return _measurement({**record, "environment": 0}, [record["environment"]])


def save_measurements(path: Path, measured: Mapping[int, Measurement]) -> None:
    """Merge ``measured`` into the file at ``path``, as `save_tuned_configs` does.

    A file that is none, or of another schema version, is replaced. Raises: OSError if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda path: _encode({**read_measurements(path), **measured}))


def _encode(measured: Mapping[int, Measurement]) -> bytes:
    """One line for each environment and each configuration, so that a change reads well."""
    environments: list[Mapping[str, Any]] = []
    for measurement in measured.values():
        if measurement.environment not in environments:
            environments.append(measurement.environment)
    records = []
    for M, measurement in sorted(measured.items()):
        values = to_record(measurement)
        values["environment"] = environments.index(measurement.environment)
        top = values.pop("top")
        head = json.dumps(values)[:-1]
        records.append(f'        "{M}": {head}, "top": [\n{_lines(top, 12)}\n        ]}}')
    body = ",\n".join(records)
    text = (
        f'{{\n    "schema_version": {SCHEMA_VERSION},\n'
        f'    "environments": [\n{_lines(environments, 8)}\n    ],\n'
        f'    "measurements": {{\n{body}\n    }}\n}}\n'
    )
    return text.encode()


def _lines(values: Iterable[Any], indent: int) -> str:
    return ",\n".join(" " * indent + json.dumps(value) for value in values)
