"""`make` finds the machine's torch, whichever Python it runs with."""

import shutil
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_an_environment_with_torch_is_kept_though_it_is_one_itself(tmp_path):
    own = tmp_path / "own"
    venv.create(own, with_pip=False)
    (packages,) = own.glob("lib/python*/site-packages")
    for name in ("torch", "triton"):
        (packages / f"{name}.py").write_text("where = 'the machine'\n")
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "make_environment.py", tmp_path / "tools")
    (tmp_path / "requirements-dev.txt").write_text("torch==0.0.0\ntriton==0.0.0\n")
    command = [own / "bin" / "python", tmp_path / "tools" / "make_environment.py"]
    subprocess.run(command, check=True)
    made = tmp_path / ".venv" / "bin" / "python"
    code = "import torch, triton; assert torch.where == triton.where == 'the machine'"
    subprocess.run([made, "-c", code], check=True)
    # What is installed here goes before what is there.
    (own_packages,) = tmp_path.glob(".venv/lib/python*/site-packages")
    (own_packages / "torch.py").write_text("where = 'here'\n")
    subprocess.run([made, "-c", "import torch; assert torch.where == 'here'"], check=True)
