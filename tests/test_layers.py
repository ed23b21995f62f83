"""`layers.Linear` by the Hub's layer rules, and in a model through `kernels.kernelize`."""

import os
import re
from pathlib import Path

import kernels
import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from kernels.layer.layer import _validate_layer

from .exact import assert_product

REPO_ID = "kernels-test/gemm-triton-autotune"
gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

# Spelled as the loader has it: another spelling would be another module.
BUILD = Path(dict(entry.split("=") for entry in os.environ["LOCAL_KERNELS"].split(":"))[REPO_ID])
MODES = [mode | extra for mode in (Mode.INFERENCE, Mode.TRAINING) for extra in (mode, Mode.TORCH_COMPILE)]  # fmt: skip


@kernels.use_kernel_forward_from_hub("Linear")
class Projection(torch.nn.Linear):
    """A linear layer that takes its forward from the Hub; nn.Linear itself stays as it is."""


class Block(torch.nn.Module):
    def __init__(self, dtype, device):
        super().__init__()
        self.up = Projection(24, 40, dtype=dtype, device=device)
        self.down = Projection(40, 24, bias=False, dtype=dtype, device=device)

    def forward(self, input):
        return self.down(torch.nn.functional.gelu(self.up(input)))


def kernelized(model, mode):
    backend = gemm_kernel.device.device_properties(next(model.parameters()).device).backend
    mapping = {"Linear": {backend: LocalLayerRepository(BUILD, layer_name="Linear")}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(model, mode=mode, use_fallback=False)


@pytest.fixture
def launches(monkeypatch):
    seen = []
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def spy(a, *call):
        if a.dtype != torch.float32:  # the interpreter computes bfloat16 in it
            seen.append(a.shape)
        return launch(a, *call)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
    return seen


def test_every_layer_is_one_that_the_hub_takes():
    layers = gemm_kernel.layers
    found = [value for value in vars(layers).values() if isinstance(value, type)]
    assert found == [layers.Linear]
    for layer in found:
        _validate_layer(check_cls=torch.nn.Linear, cls=layer, repo="this")
        assert layer.has_backward
        assert layer.can_torch_compile


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_model_is_kernelized_in_every_mode(device, launches, mode):
    for dtype in (torch.float16, torch.bfloat16):
        torch._dynamo.reset()
        model = Block(dtype, device).requires_grad_(Mode.TRAINING in mode)
        exact = Block(torch.float64, device)
        exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        model = kernelized(model, mode)
        if Mode.TORCH_COMPILE in mode:
            model = torch.compile(model, fullgraph=True, backend="aot_eager")
        input = torch.randn(2, 3, 24, dtype=dtype, device=device)
        launches.clear()
        out = model(input)
        assert len(launches) == 2
        expected = exact(input.double())
        # Two roundings to the dtype and that of gelu, each of an eps of what it rounds.
        bound = 4 * torch.finfo(dtype).eps * expected.abs().max()
        assert (out - expected).abs().max() <= bound
        if Mode.TRAINING in mode:
            out.sum().backward()
            assert len(launches) == 5
            expected.sum().backward()
            pairs = zip(model.parameters(), exact.parameters())
            for own, other in pairs:
                bound = 8 * torch.finfo(dtype).eps * other.grad.abs().max()
                assert (own.grad - other.grad).abs().max() <= bound


def test_nn_linear_itself_can_be_replaced(device, launches, nn_linear):
    # by the library's own way for layers of a third party, and here only for those of half precision
    kernels.replace_kernel_forward_from_hub(
        nn_linear, "Linear", lambda module: module.weight.dtype == torch.float16
    )
    model = torch.nn.Sequential(nn_linear(24, 40, device=device), nn_linear(40, 8, device=device))
    model[1].half()
    kernelized(model, Mode.INFERENCE)
    full = model[0](torch.randn(5, 24, device=device))
    assert launches == []
    input = full.half()
    with torch.no_grad():
        assert_product(model[1](input), input, model[1].weight.t(), bias=model[1].bias)
    assert len(launches) == 1


def test_the_readme_replaces_the_layers_of_a_model(device, launches, nn_linear):
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (snippet,) = [block for block in blocks if "LayerRepository" in block]
    backend = gemm_kernel.device.device_properties(device).backend
    model = nn_linear(24, 40, dtype=torch.float16, device=device)
    exec(snippet.replace('"cuda"', repr(backend)), {"torch": torch, "model": model})
    model(torch.randn(5, 24, dtype=torch.float16, device=device))
    assert len(launches) == 1


def test_state_and_names_of_a_kernelized_model_stay(device):
    model = Block(torch.float16, device)
    before = list(model.state_dict()), repr(model)
    kernelized(model, Mode.TRAINING)
    assert (list(model.state_dict()), repr(model)) == before


@pytest.mark.kernels_ci
def test_what_a_layer_cannot_take_is_said_in_its_own_words(device):
    linear = kernelized(Projection(8, 6, dtype=torch.float16, device=device), Mode.INFERENCE)
    half = torch.randn(3, 8, dtype=torch.float16, device=device)
    for message, input in {
        r"input \(\.\.\., K\) .* shape \(3, 7\)": half[:, :7],
        "input and weight of one dtype": half.float(),
        "input on meta, weight on": half.to("meta"),
    }.items():
        with pytest.raises(ValueError, match=message):
            linear(input)
