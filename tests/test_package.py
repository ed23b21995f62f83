"""The package as the Hub wants it: layout, metadata, ops, imports, public API, flake, card.

The rules are kernel-builder's; where its own code is in the `kernels` package, that code judges.
"""

import ast
import base64
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kernels
import minijinja
import pytest
import tomlkit
from kernels._rust import Build, Digest, Metadata

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "torch-ext" / "gemm_triton_autotune"
BUILD = ROOT / "build"
PYTHON_FILES = sorted(SOURCE.rglob("*.py"))
VARIANTS = sorted(BUILD.glob("torch-*"))
# What ships, not what lies in the source tree: a file tuned in the interpreter is never staged.
CONFIG_FILES = sorted((VARIANTS[0] / "configs").glob("*.json"))
GENERAL = tomlkit.parse((ROOT / "build.toml").read_text()).unwrap()["general"]


def run_python(code, **environment):
    """Run ``code`` in a process of its own; its last line of output."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


LOAD = (
    "import kernels; k = kernels.get_kernel('kernels-test/gemm-triton-autotune', version=1);"
    "print(k.__file__)"
)


def test_build_toml_is_what_the_builder_takes(capfd):
    Build.open(str(ROOT))
    assert "legacy" not in capfd.readouterr().err
    assert GENERAL["backends"] == ["cuda", "rocm", "xpu"]
    assert GENERAL["edition"] == 5


def test_repo_id_and_version_are_the_same_everywhere():
    repo_id, version = GENERAL["hub"]["repo-id"], GENERAL["version"]
    call = re.compile(r"get_kernel\(\s*\"([^\"]+)\",\s*version=(\d+)")
    files = [ROOT / "README.md", ROOT / "CARD.md", *ROOT.glob("*/*.py")]
    found = [match for file in files for match in call.findall(file.read_text())]
    assert len(found) >= 5
    assert set(found) == {(repo_id, str(version))}


def test_every_backend_has_a_variant_with_the_same_files():
    staged = {variant.name for variant in VARIANTS}
    assert {f"torch-{backend}" for backend in GENERAL["backends"]} <= staged
    expected = {
        str(path.relative_to(SOURCE)): path.read_bytes()
        for path in [*PYTHON_FILES, *SOURCE.rglob("*.json")]
        if "device_name=CPU" not in path.name
    }
    for variant in VARIANTS:
        files = {
            str(path.relative_to(variant)): path.read_bytes()
            for path in variant.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert files.pop("metadata.json")
        assert files.pop("_ops.py")
        assert files == expected


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda path: path.name)
def test_metadata_describes_the_variant(variant):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    raw = json.loads((variant / "metadata.json").read_text())
    assert raw["name"] == GENERAL["name"]
    assert raw["version"] == GENERAL["version"]
    assert raw["id"].isidentifier()
    assert raw["backend"] == {"type": variant.name[len("torch-") :]}
    # hashlib, not the library that wrote it
    name = "op.py"
    sha = hashlib.sha256((variant / name).read_bytes()).digest()
    assert raw["digest"]["files"][name] == base64.b64encode(sha).decode()


@pytest.mark.parametrize("backend", ["cuda", "rocm", "xpu"])
def test_the_loader_picks_the_variant_of_the_backend(backend):
    version = {
        "cuda": "torch.version.hip = None; torch.version.cuda = '13.0'",
        "rocm": "torch.version.cuda = None; torch.version.hip = '7.1.25424-x'",
        "xpu": "torch.version.cuda = torch.version.hip = None; torch.version.xpu = '20250302'",
    }[backend]
    # No device is asked: the file names what was loaded.
    path = run_python(f"import torch; {version}; {LOAD}", LOCAL_KERNELS=local_kernels(ROOT))
    assert Path(path).parent.name == f"torch-{backend}"


def local_kernels(path):
    return f"kernels-test/gemm-triton-autotune={path}"


def test_the_package_works_from_a_copy_elsewhere(tmp_path):
    # data files are found beside the code, never by the package's name
    variant = Path(gemm_kernel.__file__).parent
    shutil.copytree(variant, tmp_path / "build" / variant.name)
    code = f"{LOAD}; print(*sorted(path.name for path in k.tuning._CONFIGS_DIR.iterdir()))"
    names = run_python(code, LOCAL_KERNELS=local_kernels(tmp_path))
    assert names.split() == [path.name for path in CONFIG_FILES]


def test_two_spellings_of_one_path_both_work(tmp_path):
    code = f"""
import os, torch
from pathlib import Path
import kernels
os.chdir({str(ROOT)!r})
first, second = (kernels.get_local_kernel(Path(p)) for p in ({str(ROOT)!r}, "."))
a = torch.ones(2, 3, dtype=torch.float16)
a = a.to(first.tuning.resolve_device(None))
print(float(first.gemm(a, a.t()).sum()), float(second.gemm(a, a.t()).sum()))
"""
    assert run_python(code) == "12.0 12.0"


def test_a_second_load_has_the_modules_that_the_tools_use():
    text = "".join(path.read_text() for path in [ROOT / "tune.py", *(ROOT / "tools").glob("*.py")])
    names = sorted(set(re.findall(r"\b(?:gemm_)?kernel\.(\w+)\b", text)))
    assert "tuner" in names
    code = f"""
import os
from pathlib import Path
import kernels
os.chdir({str(ROOT)!r})
first, second = (kernels.get_local_kernel(Path(p)) for p in ({str(ROOT)!r}, "."))
assert first is not second
print([name for name in {names} if not hasattr(second, name)])
"""
    assert run_python(code) == "[]"


def test_two_builds_load_in_one_process(tmp_path):
    variant = Path(gemm_kernel.__file__).parent
    other = tmp_path / "build" / variant.name
    shutil.copytree(variant, other, ignore=shutil.ignore_patterns("__pycache__"))
    identifier = json.loads((variant / "metadata.json").read_text())["id"]
    unique = identifier.rsplit(f"_{variant.name[len('torch-') :]}_", 1)[1]
    for name in ("metadata.json", "_ops.py"):
        text = (other / name).read_text()
        (other / name).write_text(text.replace(unique, "0therid"))
    code = f"""
import torch
from pathlib import Path
import kernels
first, second = (kernels.get_local_kernel(Path(p)) for p in ({str(ROOT)!r}, {str(tmp_path)!r}))
assert str(first.op.ops.gemm) != str(second.op.ops.gemm), "one namespace"
a = torch.ones(2, 3, dtype=torch.float16)
a = a.to(first.tuning.resolve_device(None))
print(float(first.gemm(a, a.t()).sum()), float(second.gemm(a, a.t()).sum()))
"""
    assert run_python(code) == "12.0 12.0"


def test_importing_needs_no_gpu_and_makes_no_sound():
    # kernels-community PR 938: the build loads the kernel where there is no driver
    code = f"""
import logging, torch
def refuse(*_, **__): raise AssertionError("a device was asked at import")
for module in (torch.cuda, torch.xpu):
    for name in ("get_device_name", "get_device_properties", "current_device", "get_device_capability"):
        setattr(module, name, refuse)
{LOAD}
assert not logging.getLogger().handlers and not logging.getLogger("gemm_triton_autotune").handlers
print("quiet")
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        env={**environment, "LOCAL_KERNELS": local_kernels(ROOT / "build" / VARIANTS[0].name)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("quiet")


def test_without_interpreter_and_gpu_calls_say_what_to_do():
    code = f"""
import torch
{LOAD}
a = torch.ones(2, 2, dtype=torch.float16)
for call in (lambda: k.gemm(a, a), lambda: k.tune_gemm(16, 16), lambda: k.warmup(16, 16)):
    try:
        call()
    except ValueError as error:
        assert "TRITON_INTERPRET=1" in str(error), error
    else:
        raise SystemExit("no error")
print("said")
"""
    environment = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    assert run_python(code, **environment) == "said"


def test_generated_files_are_not_committed():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    generated = re.compile(
        r"(^|/)(_ops\.py|setup\.py|pyproject\.toml|metadata[^/]*\.json)$|^build/"
    )
    assert [name for name in tracked if generated.search(name)] == []
    for name in ("build/x", "result", "torch-ext/gemm_triton_autotune/_ops.py", "setup.py"):
        subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT, check=True)


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_package_imports_only_what_it_may(path):
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in {*sys.stdlib_module_names, "torch", "triton"}, name


OP_DECORATORS = {
    "custom_op",
    "triton_op",
    "register_kernel",
    "register_fake",
    "register_vmap",
    "register_torch_dispatch",
}


def op_name_problems(source):
    """What kernel-builder's hook refuses: ops that are named without the prefix of the build."""
    problems = []
    for node in ast.parse(source).body:
        for decorator in getattr(node, "decorator_list", []):
            if isinstance(decorator, ast.Call) and decorator.args:
                name = ast.unparse(decorator.func).split(".")[-1]
                first = ast.unparse(decorator.args[0])
                if name in OP_DECORATORS and not first.startswith("add_op_namespace_prefix("):
                    problems.append(f"{name}({first})")
    return problems


@pytest.mark.parametrize(
    "path", [*PYTHON_FILES, *sorted((ROOT / "tests").glob("*.py"))], ids=lambda path: path.name
)
def test_ops_take_the_namespace_of_the_build(path):
    assert op_name_problems(path.read_text()) == []
    if path.is_relative_to(SOURCE):
        # What the hook does not look for: a namespace in any other place.
        tree = ast.parse(path.read_text())
        literals = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert [
            text for text in literals if isinstance(text, str) and re.match(r"\w+::", text)
        ] == []


@pytest.mark.parametrize(
    ("decorator", "is_refused"),
    [
        ("@torch.library.custom_op('own::gemm', mutates_args=())", True),
        ("@custom_op(NAME, mutates_args=())", True),
        ("@op.register_kernel('cpu')", True),
        ("@torch.library.custom_op(add_op_namespace_prefix('gemm'), mutates_args=())", False),
        ("@triton.jit(do_not_specialize=['M'])", False),
    ],
)
def test_the_hook_for_op_names_refuses_what_the_builder_does(decorator, is_refused):
    assert bool(op_name_problems(f"{decorator}\ndef f(a): ...")) == is_refused


def test_the_layout_is_what_the_builder_checks():
    assert (SOURCE / "__init__.py").is_file()
    assert not (SOURCE / SOURCE.name).exists()
    assert SOURCE.name == GENERAL["name"].replace("-", "_")
    assert [path for path in (ROOT / "torch-ext").rglob("*") if path.is_symlink()] == []


# What users call. Changing a name or an argument here is a decision about the Hub version.
PUBLIC_API = {
    "gemm": "(a, b, out=None, bias=None)",
    "tune_gemm": "(N, K, Ms=…, dtype=None, save_dir=None, candidates=None, layout='NN', device=None, "
    "timer=None, on_progress=None, on_result=None, measurements=None, resume=False, workers=None)",
    "explain": "(M, N, K, device=None, layout='NN')",
    "warmup": "(N, K, device=None, layout='NN', dtype=torch.bfloat16, bias=False)",
}


def _signature(function):
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    text = str(inspect.Signature(parameters))
    return text.replace(str(gemm_kernel.tuning.TUNED_MS), "…")


@pytest.mark.kernels_ci
def test_the_public_api_is_as_announced():
    assert gemm_kernel.__all__ == [*PUBLIC_API, "layers"]
    assert {name: _signature(getattr(gemm_kernel, name)) for name in PUBLIC_API} == PUBLIC_API
    for name in PUBLIC_API:
        assert len(getattr(gemm_kernel, name).__doc__) > 60


def test_all_is_a_literal_that_the_card_can_read():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (value,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    assert ast.literal_eval(value) == [*PUBLIC_API, "layers"]


def test_modules_import_what_contributing_draws():
    drawn = {}
    for line in re.findall(r"^    (.+<-.+)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE):
        steps = [step.split(", ") for step in re.split(r"\s*<-\s*", line)]
        for left, right in zip(steps, steps[1:]):
            for name in right:
                drawn.setdefault(name, set()).update(left)
    real = {}
    for path in PYTHON_FILES:
        parts = path.relative_to(SOURCE).parts
        for node in ast.walk(ast.parse(path.read_text())):
            # One dot is the folder of the file: within kernels/ it leads nowhere else.
            if isinstance(node, ast.ImportFrom) and node.level == len(parts):
                names = [node.module] if node.module else [alias.name for alias in node.names]
                own = real.setdefault(parts[0].removesuffix(".py"), set())
                own.update(name.split(".")[0] for name in names if name != "_ops")

    def reached(name):
        return set().union(*({left} | reached(left) for left in drawn.get(name, ())))

    for name, imported in real.items():
        assert drawn.get(name, set()) <= imported, name
        assert imported <= reached(name), name


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.name)
def test_a_shipped_file_is_valid(path):
    name = re.fullmatch(
        r"N=([1-9]\d*),K=([1-9]\d*),device_name=([0-9A-Za-z._+()-]+?)(,layout=NT)?\.json", path.name
    )
    assert name, "the name is not one that look-up asks for"
    assert name[3] != "CPU"
    pairs = json.loads(path.read_text(), object_pairs_hook=lambda pairs: pairs)
    Ms = [key for key, _ in pairs]
    assert Ms == [str(M) for M in sorted(int(M) for M in Ms)]
    assert Ms
    for M, entry in pairs:
        assert gemm_kernel.kernels.config_problem(dict(entry)) is None, M


# What Windows takes for a device, with any extension
RESERVED_NAMES = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE)


def tracked_names():
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    return [name for name in names.decode().split("\0") if name]


def test_names_are_names_on_every_system():
    names = tracked_names()
    # Windows and macOS find one file by both spellings.
    assert len({name.casefold() for name in names}) == len(names)
    for part in {part for name in names for part in name.split("/")}:
        assert len(part.encode()) <= 255
        assert not set(part) & set('<>:"\\|?*'), part
        assert part.isprintable(), part
        assert part[-1] not in ". ", part
        assert not RESERVED_NAMES.fullmatch(part), part


def test_git_checks_out_every_name_on_windows_and_macos(tmp_path):
    protected = ["-c", "core.protectNTFS=true", "-c", "core.protectHFS=true"]
    subprocess.run(
        ["git", *protected, "read-tree", "HEAD"],
        cwd=ROOT,
        env={**os.environ, "GIT_INDEX_FILE": str(tmp_path / "index")},
        check=True,
    )


def test_shipped_names_travel(tmp_path):
    # hub cache, snapshot hash, variant and package, below what Windows takes
    prefix = 120 + len("/snapshots//build/torch-cuda/configs/") + 40
    for path in CONFIG_FILES:
        assert prefix + len(path.name) < 260
    # = and , and () through the archives that a source distribution, a wheel or a download is
    variant = VARIANTS[0]
    for kind in ("zip", "gztar"):
        archive = shutil.make_archive(str(tmp_path / "package"), kind, variant)
        shutil.unpack_archive(archive, tmp_path / kind)
        unpacked = sorted((tmp_path / kind / "configs").glob("*.json"))
        assert [path.name for path in unpacked] == [path.name for path in CONFIG_FILES]
        assert unpacked[0].read_bytes() == CONFIG_FILES[0].read_bytes()


def test_every_shipped_file_says_where_it_comes_from():
    listed = set(re.findall(r"`(N=[^`]+\.json)`", (SOURCE / "configs" / "README.md").read_text()))
    assert {path.name for path in CONFIG_FILES} == listed - {"N=…,K=…,device_name=….json"}


@pytest.fixture
def nix(tmp_path):
    """Evaluates an attribute of a copy of the flake, with a stub in the place of kernel-builder."""
    if shutil.which("nix") is None:
        pytest.skip("needs nix (Debian: nix-bin)")
    for name in ("flake.nix", "build.toml"):
        shutil.copy(ROOT / name, tmp_path)
    stub = ROOT / "tests" / "data" / "kernel-builder-stub"
    options = ["--offline", "--extra-experimental-features", "nix-command flakes"]
    options += ["--no-write-lock-file", "--override-input", "kernel-builder", f"path:{stub}"]

    def evaluate(attribute):
        result = subprocess.run(
            ["nix", "eval", *options, "--json", f"path:{tmp_path}#{attribute}"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        return json.loads(result.stdout) if result.returncode == 0 else result.stderr

    return evaluate


def test_the_flake_evaluates(nix):
    assert nix("backends") == GENERAL["backends"]
    # A kernel that the build cannot import is not compliant.
    assert nix("doGetKernelCheck") is True
    assert nix("checkInputs") == ["numpy"]


def test_the_flake_names_only_what_the_builder_takes(nix, tmp_path):
    flake = tmp_path / "flake.nix"
    flake.write_text(flake.read_text().replace("pythonCheckInputs", "pythonTestInputs"))
    assert "pythonTestInputs" in nix("backends")


def test_the_card_renders():
    environment = minijinja.Environment(trim_blocks=True, undefined_behavior="strict")
    card = environment.render_str(
        (ROOT / "CARD.md").read_text(),
        repo_id=GENERAL["hub"]["repo-id"],
        version=GENERAL["version"],
        functions=list(PUBLIC_API),
        layers=[],
        has_benchmark=True,
        upstream=None,
        source=None,
        license=GENERAL["license"].lower(),
    )
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    for name in PUBLIC_API:
        assert f"`{name}`" in card
    assert "{{" not in card
    assert "not available" not in card


def test_the_hub_benchmark_runs_and_verifies(tmp_path):
    output = tmp_path / "benchmark.json"
    command = [sys.executable, "-c", "from kernels.cli import main; main()", "benchmark", "."]
    options = ["--iterations", "3", "--warmup", "1", "--output", str(output)]
    result = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    workloads = re.findall(r'"verified": (\w+)', output.read_text())
    # Five values of M on three weights.
    assert workloads == ["true"] * 15


def test_the_workflow_runs_make_targets_on_every_python():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"run: make (\w+)", workflow))
    (listed,) = re.findall(r"target: \[(.*)\]", workflow)
    assert used == {"quality", "test"}
    assert used | set(listed.split(", ")) <= targets
    assert 'python: ["3.10", "3.11", "3.12", "3.13"]' in workflow
    # An action by its commit: a tag can be moved.
    actions = re.findall(r"uses: (\S+)", workflow)
    assert actions
    assert [action for action in actions if not re.search(r"@[0-9a-f]{40}$", action)] == []
