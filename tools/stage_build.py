"""Stage `build/` as kernel-builder would, for development: one directory for each backend.

kernel-builder needs Nix; this needs the pip packages of requirements-dev.txt. What differs: on a
machine where torch sees no GPU a `torch-cpu` variant is added, in which the same kernels run in
Triton's interpreter. Rules and numbers: kernel-builder's documentation, "Kernel requirements".
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import tomlkit
import torch
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

ROOT = Path(__file__).resolve().parent.parent

OPS_TEMPLATE = '''import torch


def _backend() -> str:
    if torch.version.cuda is not None:
        return "cuda"
    if torch.version.hip is not None:
        return "rocm"
    if torch.backends.mps.is_available():
        return "metal"
    if torch.version.xpu is not None:
        return "xpu"
    return "cpu"


_NAMESPACE = f"_{module}_{{_backend()}}_{unique_id}"

ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """Prefix an op's name with the namespace of this build."""
    return f"{{_NAMESPACE}}::{{op_name}}"
'''


def stage(root: Path = ROOT) -> list[Path]:
    """Write `build/torch-<backend>/` under `root`; the variants written, each one verified."""
    Build.open(str(root))  # the builder's own parser: raises for what it would refuse
    config = tomlkit.parse((root / "build.toml").read_text()).unwrap()
    general = config["general"]
    suffixes = {f".{extension}" for extension in config["torch-noarch"].get("pyext", ["py", "pyi"])}
    module = general["name"].replace("-", "_")
    backends = list(general["backends"])
    if not (torch.cuda.is_available() or torch.xpu.is_available()):
        backends.append("cpu")

    unique_id = _unique_id(root)
    shutil.rmtree(root / "build", ignore_errors=True)
    variants = []
    for backend in backends:
        variant = root / "build" / f"torch-{backend}"
        source = root / "torch-ext" / module
        for file in _source_files(root, source):
            if file.suffix in suffixes:
                target = variant / file.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        (variant / "_ops.py").write_text(OPS_TEMPLATE.format(module=module, unique_id=unique_id))
        _write_metadata(variant, general, f"_{module}_{backend}_{unique_id}", backend)
        variants.append(variant)
    return variants


def _write_metadata(variant: Path, general: dict, identifier: str, backend: str) -> None:
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    # No provenance: that would claim that kernel-builder made this.
    metadata = {
        "name": general["name"],
        "id": identifier,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))},
    }
    path = variant / "metadata.json"
    path.write_text(json.dumps(metadata, indent=2))
    written = Metadata.read_from_file(path)
    written.digest.validate(Digest.hash_variant(written.digest.algorithm, variant))


def _unique_id(root: Path) -> str:
    """The first digits of HEAD's tree, `_dirty` if tracked files differ from it; `local` without git."""
    try:
        tree = _git(root, "rev-parse", "--short=7", "HEAD^{tree}")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "local"
    return f"{tree}_dirty" if changed else tree


def _source_files(root: Path, source: Path) -> list[Path]:
    """The files below ``source`` that git does not ignore; without git, all but bytecode."""
    try:
        names = _git(
            root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", str(source)
        )
    except (OSError, subprocess.CalledProcessError):
        return [path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return [root / name for name in sorted(names.split("\0")) if name and (root / name).is_file()]


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    for staged in stage():
        print(f"staged {staged.relative_to(ROOT)}", file=sys.stderr)
