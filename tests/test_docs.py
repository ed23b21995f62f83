"""README and CONTRIBUTING name only what exists: paths, commands, functions, make targets."""

import re
from pathlib import Path

import kernels
import pytest

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "torch-ext" / "gemm_triton_autotune"
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CARD.md", "CHANGELOG.md"]
MAKE_TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def quoted(document):
    text = (ROOT / document).read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [*inline, *(line.strip() for block in blocks for line in block.splitlines())]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document):
    names = re.compile(
        r"(?<![\w/=$.-])((?:[\w.-]+/)*[\w.-]+\.(?:py|md|toml|nix|txt|ini)|(?:[\w.-]+/)+)(?![\w/*-])"
    )
    missing = []
    for text in quoted(document):
        for name in names.findall(text):
            bases = (ROOT, SOURCE, SOURCE / "kernels", ROOT / "build", ROOT / "tools")
            if not any((base / name).exists() for base in bases):
                missing.append(name)
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_exists(document):
    text = (ROOT / document).read_text()
    targets = set(re.findall(r"\bmake (\w+)`", text)) | set(
        re.findall(r"^make (\w+)", text, re.MULTILINE)
    )
    assert targets <= MAKE_TARGETS


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_function_and_option_exists(document):
    tuning, known = gemm_kernel.tuning, set(dir(gemm_kernel))
    options = set(re.findall(r'"(--[\w-]+)"', (ROOT / "tune.py").read_text())) | {"--help"}
    for text in quoted(document):
        for name in re.findall(r"(?:gemm_kernel|kernel)\.(\w+)\(", text):
            assert name in known, text
        if re.fullmatch(r"\w+", text) and text.endswith("_gemm"):
            assert hasattr(gemm_kernel, text) or hasattr(tuning, text), text
        if "tune.py" in text:
            own = text.partition("tune.py")[2]
            assert set(re.findall(r"--[\w-]+", own)) <= options, text


def test_the_readme_shows_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
