"""`torch.compile` and `torch.export`: no graph break, one compile for every M, and the op stays an op."""

import io
import json
import warnings

import kernels
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
gemm, linear = gemm_kernel.gemm, gemm_kernel.op.linear
tuning = gemm_kernel.tuning

N, K = 24, 40


@pytest.fixture(autouse=True)
def _no_earlier_compile():
    torch._dynamo.reset()


def half(*shape, device):
    return torch.randn(shape, dtype=torch.float16, device=device)


class Linear(torch.nn.Module):
    """As `kernels.kernelize` leaves it."""

    def __init__(self, device, bias=True):
        super().__init__()
        self.weight = torch.nn.Parameter(half(N, K, device=device))
        self.bias = torch.nn.Parameter(half(N, device=device)) if bias else None

    forward = gemm_kernel.layers.Linear.forward


@pytest.mark.kernels_ci
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("has_file", [False, True])
def test_one_compile_serves_every_m_and_each_gets_its_own_configuration(
    device, tuned_dir, monkeypatch, has_file, grad
):
    # pytorch/pytorch 146598: the look-up is traced, and what it gave is frozen into the graph
    stages = {2: 2, 16: 3, 64: 4}
    if has_file:
        configs = {
            str(M): tuning.default_config(16, N, K) | {"num_stages": count}
            for M, count in stages.items()
        }
        path = tuned_dir / tuning.config_file_name(N, K, device, "NT")
        path.write_text(json.dumps(configs))
    chosen = []
    launch = gemm_kernel.kernels.launch_gemm_kernel

    def spy(a, b, out, config, *bias):
        chosen.append(config["num_stages"])
        return launch(a, b, out, config, *bias)

    monkeypatch.setattr(gemm_kernel.kernels, "launch_gemm_kernel", spy)
    model = Linear(device).requires_grad_(grad)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for M, count in stages.items():
            input = half(M, K, device=device)
            chosen.clear()
            out = compiled(input)
            default = tuning.default_config(M, N, K, device, "NT")
            assert chosen == [count if has_file else default["num_stages"]]
            assert torch.equal(out, model(input))
            assert out.requires_grad == grad
    assert counter.frame_count == 1


def test_every_form_of_a_call_compiles(device):
    bias = half(N, device=device)
    out = half(5, N, device=device)

    def everything(a, b, bias, out):
        gemm(a, b, out=out, bias=bias)
        return gemm(a, b) + gemm(a, b, bias=bias) + linear(a.view(1, 5, K), b.t(), None), out * 2

    a, b = half(5, K, device=device), half(N, K, device=device).t()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for own, expected in zip(compiled(a, b, bias, out), everything(a, b, bias, out.clone())):
        assert torch.equal(own, expected)
    with torch.autocast(device.type, torch.bfloat16):
        for own, expected in zip(
            torch.compile(linear, fullgraph=True, backend="aot_eager")(
                a.float(), b.t().float(), bias
            ),
            linear(a.float(), b.t().float(), bias),
        ):
            assert own.dtype == torch.bfloat16
            assert torch.equal(own, expected)


def test_inductor_calls_the_op(device):
    # Nothing but our ops: what is fused around them on a CPU is half a minute of C++.
    model = Linear(device, bias=False)
    compiled = torch.compile(model, fullgraph=True)
    input, grad = half(3, 5, K, device=device), half(3, 5, N, device=device)
    results = []
    for function in (model, compiled):
        out = function(input)
        results.append((out, *torch.autograd.grad(out, model.weight, grad)))
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
def test_inductor_keeps_gradients_and_may_change_strides(device):
    # pytorch/pytorch 130243: a compiler that re-orders or pads the strides of what an op is given
    model = Linear(device)

    def step(input, weight):
        hidden = model(input.transpose(0, 1).contiguous().transpose(0, 1) * 2)
        return gemm(hidden.sin().view(-1, N), (weight @ weight.t())[:N, :7]).float().square().sum()

    input, weight = half(3, 5, K, device=device), half(N + 1, 7, device=device)
    input.requires_grad_()
    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        loss = function(input, weight)
        gradients = torch.autograd.grad(loss, [input, *model.parameters()])
        results.append((loss, *gradients))
    for expected, own in zip(*results):
        assert (own - expected).abs().max() <= 1e-2 * expected.abs().max()


def test_an_exported_program_keeps_the_op_and_every_m(device):
    model = Linear(device).requires_grad_(False)
    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(
        model, (half(4, 3, K, device=device),), dynamic_shapes=({0: rows},)
    )
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file)
    called = [node.target for node in loaded.graph.nodes if node.op == "call_function"]
    assert called == [gemm_kernel.op.ops.linear_forward.default]
    for M in (2, 50):
        input = half(M, 3, K, device=device)
        assert torch.equal(loaded.module()(input), model(input))


@pytest.mark.gpu
def test_compiled_to_cuda_graphs_it_is_the_same(device):
    model = torch.nn.Sequential(Linear(device), torch.nn.GELU(), torch.nn.Linear(N, K)).to(device)
    model = model.half().requires_grad_(False)
    model[2].forward = gemm_kernel.layers.Linear.forward.__get__(model[2])
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for M in (1, 16, 64):
        for _ in range(4):  # warm-up, record, replay, replay with new data
            input = half(M, K, device=device)
            expected = model(input)
            assert (compiled(input) - expected).abs().max() <= 1e-2 * expected.abs().max()
