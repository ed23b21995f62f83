"""Write the README beside the tuned files from what `measurements/` keeps of them.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python -m tools.configs_readme --write

Without `--write`: exit status 1 if the README is not what this would write.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kernels
from tabulate import tabulate

from . import lint

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "torch-ext" / "gemm_triton_autotune" / "configs"
MEASUREMENTS = ROOT / "measurements"

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

_HEAD = """\
# Where each tuned file comes from

Made by `python -m tools.configs_readme --write` from the files of the same names in `measurements/`; not to be edited. Each
file is what `python tune.py --n N --k K` makes on that GPU. It is named `N=…,K=…,device_name=….json`, with `,layout=NT` for
weights that are passed as the transpose of an (N, K) matrix; its format is described in `tuned_file.py`. "M" counts the entries,
"measured" those whose measurement is kept; "under" is the number of the conditions above the table. The two ratios are geometric
means over the measured M, above 1 where tuned is faster; their times are the tuner's own, and `benchmarks/RESULTS.md` has a
comparison of its own. What was tried, and what came out, is in `benchmarks/NOTES.md`."""
_HEADERS = ("file", "M", "measured", "default / tuned", "torch.mm / tuned", "dtype", "under")


def configs_readme(configs: Path, measurements: Path) -> str:
    """The README for the tuned files in ``configs``, a section for each device."""
    by_device: dict[str, list[Path]] = {}
    for path in sorted(configs.glob("*.json"), key=_order):
        name = lint.NAME.fullmatch(path.name)
        by_device.setdefault(name["device"] if name else "", []).append(path)
    sections = [_section(device, paths, measurements) for device, paths in by_device.items()]
    return "\n\n".join([_HEAD, *sections]) + "\n"


def _order(path: Path) -> tuple:
    name = lint.NAME.fullmatch(path.name)
    if name is None:
        return ("", 0, 0, path.name)
    return (name["device"], int(name["N"]), int(name["K"]), path.name)


def _section(device: str, paths: Sequence[Path], measurements: Path) -> str:
    environments: list[Mapping[str, Any]] = []
    table = []
    for path in paths:
        entries = gemm_kernel.tuned_file.read_json(path)
        measured = {
            M: found
            for M, found in gemm_kernel.measurements.read_measurements(
                measurements / path.name
            ).items()
            # A measurement of what the entry was before says nothing of it.
            if found.top[0][1] == entries.get(str(M))
        }
        # Beside its entries a file may have notes.
        count = len([key for key in entries if gemm_kernel.tuned_file.M_KEY.fullmatch(key)])
        table.append((f"`{path.name}`", count, *_cells(path, measured, environments)))
    parts = [f"## {device.replace('_', ' ') or 'Files whose name no look-up asks for'}"]
    parts += [f"{number}. {_in_words(one)}" for number, one in enumerate(environments, start=1)]
    parts.append(tabulate(table, _HEADERS, tablefmt="github", disable_numparse=True))
    return "\n\n".join(parts)


def _cells(path: Path, measured: Mapping[int, Any], environments: list[Mapping[str, Any]]) -> tuple:
    """What is known of a file, and the numbers of the environments it was measured under."""
    if not measured:
        given = ": came to this project as it is" if path.name in lint.AS_GIVEN else ""
        return (f"no measurements kept{given}", "", "", "", "")
    used = []
    for found in measured.values():
        if found.environment not in environments:
            environments.append(found.environment)
        used.append(environments.index(found.environment) + 1)
    return (
        len(measured),
        _mean(
            found.default_us and found.default_us / found.tuned_us for found in measured.values()
        ),
        _mean(found.torch_us and found.torch_us / found.tuned_us for found in measured.values()),
        ", ".join(sorted({found.dtype for found in measured.values()})),
        ", ".join(map(str, sorted(set(used)))),
    )


def _mean(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    return f"{statistics.geometric_mean(known):.3f}" if known else ""


def _in_words(environment: Mapping[str, Any]) -> str:
    names = (("torch", "torch"), ("triton", "Triton"), ("driver", "driver"))
    versions = [f"{name} {environment[key]}" for key, name in names if environment.get(key)]
    return ", ".join([str(environment.get("date")), *versions, str(environment.get("protocol"))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write it")
    arguments = parser.parse_args()
    path, text = CONFIGS / "README.md", configs_readme(CONFIGS, MEASUREMENTS)
    if arguments.write:
        path.write_text(text)
    elif not path.exists() or path.read_text() != text:
        print(f"{path} is not what {__doc__.splitlines()[2].strip()} writes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
