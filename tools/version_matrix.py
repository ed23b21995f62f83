"""Run the kernels' tests with each supported Triton, torch and Python, each in an environment of its own.

    python tools/version_matrix.py [--only triton3.9] [--write benchmarks/VERSIONS.md]

`make versions` does that for all. The environments stay in `.versions/`, each with what came out last, so that the table is
whole when `--only` some run again. No GPU is needed or used. Exit status 1 if a test or a compile failed. A Python
that is not on the PATH is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".versions"

# What a version of Triton could break: every family's kernel in its interpreter, at sizes that no tile
# divides, where `gluon` finds its ring, the ops, the path of a launch, its own launcher. Not every test: there are as
# many runs as versions.
TESTS = [
    f"tests/test_{name}.py"
    for name in ("gemm", "kernel_swap", "kernel_gemv", "kernel_tma", "kernel_gluon")
    + ("kept_launch", "versions", "candidates", "other_backends")
]
SELECTED = (
    "kernels_ci or kept_launch or versions or candidates or other_backends "
    "or (awkward and float16 and not bfloat16 and NT) or dirty or padding or every_tile_compiles"
)
TARGETS = ("sm_80", "sm_90", "gfx942")
TARGETS_BEFORE_3_5 = ("sm_80", "sm_90")
# Odd, so that both layouts are in the sample
SAMPLE = 29

FEATURES = """
import kernels
k = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
lacks = {
    "tma": k.kernels.tma.TensorDescriptor is None,
    "gluon": k.kernels.gluon.IMPORT_PROBLEM is not None,
    "PDL": k.kernels.swap.dependent_launch.gdc_wait is None,
}
print("lacks:", ", ".join(name for name, missing in lacks.items() if missing) or "nothing")
"""


class Versions(NamedTuple):
    """One combination. Triton goes beside a torch that was made for another: only the compiler differs."""

    python: str
    torch: str
    triton: str
    numpy: str = "2.4.6"

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / f"python{self.python}-torch{self.torch}-triton{self.triton}"


# numpy: the interpreter of Triton 3.6 and older cannot convert as numpy 2.4 wants it.
VERSIONS = [
    Versions("3.11", "2.13.0", "3.3.1", "2.3.5"),
    Versions("3.11", "2.13.0", "3.4.0", "2.3.5"),
    Versions("3.11", "2.13.0", "3.5.1", "2.3.5"),
    Versions("3.11", "2.13.0", "3.6.0", "2.3.5"),
    Versions("3.11", "2.13.0", "3.7.1"),
    Versions("3.11", "2.13.0", "3.8.0"),
    Versions("3.11", "2.13.0", "3.9.0"),
    Versions("3.10", "2.13.0", "3.7.1", "2.2.6"),
    Versions("3.12", "2.13.0", "3.7.1"),
    Versions("3.13", "2.13.0", "3.7.1"),
    Versions("3.11", "2.7.1", "3.3.1", "2.3.5"),
]


class Row(NamedTuple):
    """What came out for a combination."""

    lacks: str = ""
    tests: str = "not run"
    compiled: str = "not run"
    is_good: bool = True


def make_environment(versions: Versions) -> Path:
    """An environment's Python; it is made unless it is there."""
    python = versions.environment / "bin" / "python"
    made = versions.environment / "made"
    if not made.exists():
        interpreter = shutil.which(f"python{versions.python}")
        if interpreter is None:
            raise FileNotFoundError(f"python{versions.python} is not on the PATH")
        subprocess.run([interpreter, "-m", "venv", "--clear", versions.environment], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # setuptools, because Triton 3.3 imports it
        exact = [f"torch=={versions.torch}", f"numpy=={versions.numpy}", "setuptools"]
        subprocess.run([*pip, *exact, *_tools()], check=True)
        # Without dependencies: torch names the one Triton that it was made for.
        subprocess.run([*pip, "--no-deps", f"triton=={versions.triton}"], check=True)
        made.touch()
    return python


def _tools() -> list[str]:
    """What the tests import beside torch, Triton and numpy, by the versions of requirements-dev.txt."""
    names = ("kernels", "hypothesis", "pytest", "tabulate", "tqdm")
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return [line for line in lines if line.split("==")[0] in names]


def check(versions: Versions) -> Row:
    try:
        python = make_environment(versions)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return Row(tests=f"not run: {error}")
    environment = {
        **os.environ,
        "LOCAL_KERNELS": f"kernels-test/gemm-triton-autotune={ROOT}",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(versions.environment / "cache"),
        "TRITON_CACHE_DIR": str(versions.environment / "triton"),
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
        )

    features = run("-c", FEATURES)
    lacks = re.search(r"lacks: (.*)", features.stdout)
    tests = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-k", SELECTED, *TESTS)
    is_old = versions.triton.startswith(("3.3.", "3.4."))
    targets = TARGETS_BEFORE_3_5 if is_old else TARGETS
    compiled = run("tools/compile_matrix.py", "--sample", str(SAMPLE), "--targets", *targets)
    kernels = re.search(r"(\d+) kernels, (\d+) without a pass", compiled.stdout)
    is_good = bool(lacks) and tests.returncode == compiled.returncode == 0
    if not is_good:
        print(features.stderr[-2000:], tests.stdout[-4000:], compiled.stdout[-4000:], sep="\n")
    return Row(
        lacks[1] if lacks else "does not load",
        tests.stdout.strip().splitlines()[-1].split(" in ")[0] if tests.stdout else "none ran",
        f"{int(kernels[1]) - int(kernels[2])} of {kernels[1]}" if kernels else "none",
        is_good,
    )


def last_row(versions: Versions) -> Row:
    path = versions.environment / "row.json"
    return Row(*json.loads(path.read_text())) if path.exists() else Row()


def keep_row(versions: Versions, row: Row) -> None:
    if versions.environment.exists():
        (versions.environment / "row.json").write_text(json.dumps(row))


def table(rows: dict[Versions, Row]) -> str:
    lines = [
        (
            *(versions.triton, versions.torch, versions.python, versions.numpy, row.lacks),
            *(re.sub(r", \d+ warnings?", "", row.tests), row.compiled),
        )
        for versions, row in rows.items()
    ]
    headers = ("Triton", "torch", "Python", "numpy", "lacks", "tests", "compiled")
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def document(rows: dict[Versions, Row]) -> str:
    return f"""# Which versions it was run with

Made by `make versions` on {datetime.date.today()}, without a GPU. Do not edit.

Tests, in Triton's interpreter (those for a GPU are skipped):

    pytest {" ".join(TESTS)}
        -k "{SELECTED}"

Compiled, down to machine code: every {SAMPLE}th of what `make matrix` compiles for {", ".join(TARGETS)} (before Triton 3.5, which has
no linker for AMD, for {", ".join(TARGETS_BEFORE_3_5)}). What a Triton lacks gives way to other entries of a file, and in the end to
`tiled`. A torch is made for one Triton; the others stand beside it for this run alone.

{table(rows)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of an environment's name, say triton3.9")
    parser.add_argument("--write", type=Path, help="write the table into this file, too")
    arguments = parser.parse_args()
    run = [versions for versions in VERSIONS if arguments.only in versions.environment.name]
    for versions in run:
        row = check(versions)
        keep_row(versions, row)
        print(table({versions: row}), flush=True)
    rows = {versions: last_row(versions) for versions in VERSIONS}
    if arguments.write:
        arguments.write.write_text(document(rows))
    return 0 if all(rows[versions].is_good for versions in run) else 1


if __name__ == "__main__":
    sys.exit(main())
