"""Make `.venv` with what requirements-dev.txt names, keeping a torch and triton that are there already.

Run by `make` with the machine's own Python, so it uses nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("torch", "triton")


def show_packages_of_this_one(environment: Path) -> None:
    """Python's own option shows those of the Python that this environment was made with, not those in it."""
    base = {"base": str(environment), "platbase": str(environment)}
    folder = Path(sysconfig.get_path("purelib", "posix_prefix", base))
    own = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (folder / "this_one.pth").write_text("".join(f"{path}\n" for path in own))


def main() -> None:
    if sys.version_info < (3, 10):
        raise SystemExit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}")
    keep = all(importlib.util.find_spec(name) for name in KEPT)
    environment = ROOT / ".venv"
    venv.create(environment, with_pip=True, clear=True, system_site_packages=keep)
    if keep and sys.prefix != sys.base_prefix:
        show_packages_of_this_one(environment)
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
