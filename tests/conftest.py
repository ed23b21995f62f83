"""What every test shares: a machine state that no developer's own files or environment decide."""

import os
import tempfile

# The interpreter's products are small: threads of BLAS only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

ON_GPU = torch.cuda.is_available() or torch.xpu.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when the kernel is loaded, so before any test module
    )

# Nobody's own tuned files decide a test, and no test waits for a network.
os.environ.pop("GEMM_TUNED_CONFIG_DIR", None)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="gemm-triton-autotune-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"

if not os.environ.get("LOCAL_KERNELS"):
    raise pytest.UsageError(
        "LOCAL_KERNELS is not set, so the tests would ask the Hub for a released kernel. Run `make test`, "
        "or `make build` and set LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD."
    )


def pytest_collection_modifyitems(config, items):
    gpus = torch.cuda.device_count() or torch.xpu.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none"))
        elif item.get_closest_marker("two_gpus") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two GPUs, and torch sees {gpus}"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.xpu.is_available():
        return torch.device("xpu", torch.xpu.current_device())
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def tuned_dir(tmp_path, monkeypatch):
    """A directory that is searched first; what was read before is forgotten, and afterwards again."""
    import kernels

    tuning = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1).tuning
    directory = tmp_path / "tuned"
    directory.mkdir()
    monkeypatch.setenv("GEMM_TUNED_CONFIG_DIR", str(directory))
    tuning._load_tuned_configs.cache_clear()
    yield directory
    tuning._load_tuned_configs.cache_clear()


@pytest.fixture
def nn_linear():
    """`torch.nn.Linear`, which afterwards has forgotten that its forward may come from the Hub."""
    yield torch.nn.Linear
    for name in ("kernel_layer_name", "kernel_condition"):
        if name in vars(torch.nn.Linear):
            delattr(torch.nn.Linear, name)


@pytest.fixture(params=["as here", "Hopper with Gluon"])
def families(request, monkeypatch):
    """The interpreter refuses Gluon; what a GPU would get is to be looked at, too."""
    from .cases import forget_defaults, gemm_kernel

    gluon = gemm_kernel.kernels.gluon
    if request.param != "as here":
        monkeypatch.setattr(gluon, "INTERPRETED", False)
        monkeypatch.setattr(gluon, "IMPORT_PROBLEM", None)
    forget_defaults()
    yield request.param
    monkeypatch.undo()
    forget_defaults()
