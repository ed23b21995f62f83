"""Files of results: an environment and tables of rows, one row a line, so that a change reads well."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_results(
    path: Path, environment: Mapping[str, Any], **tables: Sequence[Mapping[str, Any]]
) -> None:
    parts = [f'"environment": {json.dumps(environment)}']
    for name, rows in tables.items():
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def read_results(path: Path) -> dict[str, Any] | None:
    """What `write_results` wrote; None where there is no file."""
    return json.loads(path.read_text()) if path.exists() else None


def conditions(environment: Mapping[str, Any]) -> str:
    """The card, versions and date of a result, in a line."""
    driver = environment.get("driver")
    parts = [
        environment["device"],
        f"driver {driver}" if driver else "",
        f"torch {environment['torch']}",
        f"Triton {environment['triton']}",
        environment["date"],
        environment.get("dtype", ""),
    ]
    return ", ".join(filter(None, parts))
