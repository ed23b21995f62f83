"""Make `.venv` with what requirements-dev.txt names, keeping a torch and triton that are there already.

Run by `make` with the machine's own Python, so it uses nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("torch", "triton")


def main() -> None:
    if sys.version_info < (3, 10):
        raise SystemExit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}")
    keep = all(importlib.util.find_spec(name) for name in KEPT)
    environment = ROOT / ".venv"
    venv.create(environment, with_pip=True, clear=True, system_site_packages=keep)
    requirements = (ROOT / "requirements-dev.txt").read_text().splitlines()
    if keep:
        print("Keeping the torch and triton of this machine.", file=sys.stderr)
        requirements = [line for line in requirements if line.split("==")[0] not in KEPT]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        python = environment / "bin" / "python"
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "--requirement", file.name], check=True)


if __name__ == "__main__":
    main()
