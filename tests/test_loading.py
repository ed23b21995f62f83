"""Loading as it is deployed: from the Hub's cache without a network, two versions at once, and from a lock file."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kernels
from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion

REPO_ID = "kernels-test/gemm-triton-autotune"
gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

VARIANT = Path(gemm_kernel.__file__).parent


def fill_cache(cache, version):
    """What a download of this build as ``version`` leaves behind; the commit that it came from."""
    folder = cache / f"kernels--{REPO_ID.replace('/', '--')}"
    commit = str(version) * 40
    variant = folder / "snapshots" / commit / "build" / VARIANT.name
    shutil.copytree(VARIANT, variant, ignore=shutil.ignore_patterns("__pycache__"))
    identifier = json.loads((variant / "metadata.json").read_text())["id"]
    unique = identifier.rsplit(f"_{VARIANT.name[len('torch-') :]}_", 1)[1]
    for name in ("metadata.json", "_ops.py"):
        text = (variant / name).read_text()
        (variant / name).write_text(text.replace(unique, f"version{version}"))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / f"v{version}").write_text(commit)
    return commit


USE = """
import sys
from pathlib import Path
import kernels, torch

repo_id, lockfile = sys.argv[1], Path(sys.argv[2])
loaded = [kernels.get_kernel(repo_id, version=version) for version in (1, 2)]
loaded.append(kernels.load_kernel(repo_id, lockfile=lockfile))
repositories = (
    kernels.LayerRepository(repo_id, layer_name="Linear", version=2),
    kernels.LockedLayerRepository(repo_id, lockfile=lockfile, layer_name="Linear"),
)
layers = [repository.load() for repository in repositories]
assert layers == [loaded[1].layers.Linear, loaded[0].layers.Linear]
assert loaded[2] is loaded[0]
assert str(loaded[0].op.ops.gemm) != str(loaded[1].op.ops.gemm), "one namespace"

device = loaded[0].tuning.resolve_device(None)
a = torch.randn(5, 24, device=device).half().requires_grad_()
results = []
for kernel in loaded[:2]:
    out = torch.compile(lambda a: kernel.gemm(a, a.t()), fullgraph=True, backend="aot_eager")(a)
    results.append((out, *torch.autograd.grad(out.sum(), a)))
assert all(map(torch.equal, *results))
print("both versions, and the locked one")
"""


def test_versions_and_locks_load_from_the_cache_without_a_network(tmp_path):
    commits = {version: fill_cache(tmp_path / "cache", version) for version in (1, 2)}
    dependency = KernelDependency(repo_id=REPO_ID, version=KernelVersion.Version(1))
    lockfile = tmp_path / "kernels.lock"
    lockfile.write_text(KernelLocks({dependency: KernelLock(commits[1])}).to_json())
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"}
    environment.update(KERNELS_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    result = subprocess.run(
        [sys.executable, "-c", USE, REPO_ID, str(lockfile)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("both versions, and the locked one")
