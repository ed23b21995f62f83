"""CUDA graphs: a capture holds what eager computes, also the first call of a process, and graphs may overlap."""

import os
import subprocess
import sys
from types import SimpleNamespace

import kernels
import pytest
import torch

from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
linear = gemm_kernel.op.linear

N, K = 4096, 4096  # a shape with shipped files: split sums, dependent launches, every family


def make(M, device):
    """input, weight and bias of a layer."""
    shapes = (M, K), (N, K), (N,)
    return [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]


def capture(call, stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


@pytest.mark.parametrize("M", [1, 8, 64, 300, 2048])
@pytest.mark.gpu
def test_a_replay_computes_what_is_there_by_then(device, M):
    # triton-lang/triton 10596: what happens once, in the first call, must not happen in a capture
    input, weight, bias = make(M, device)
    linear(input, weight, bias)
    graph, out = capture(lambda: linear(input, weight, bias))
    for _ in range(10):
        input.copy_(torch.randn_like(input))
        out.fill_(torch.nan)
        graph.replay()
        assert_product(out, input, weight.t(), bias=bias)


@pytest.mark.gpu
def test_graphs_of_one_stream_may_be_replayed_at_once(device):
    jobs = []
    for M in (1, 16, 64, 128):
        input, weight, bias = make(M, device)
        linear(input, weight, bias)
        graph, out = capture(lambda a=input, w=weight, b=bias: linear(a, w, b))
        jobs.append((input, weight, bias, graph, out, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(50):
        for *_, graph, _, stream in jobs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for input, weight, bias, _, out, _ in jobs:
        assert_product(out, input, weight.t(), bias=bias)


@pytest.mark.gpu
def test_eager_calls_on_several_streams_are_right(device):
    input, weight, bias = make(16, device)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(linear(input, weight, bias))
    torch.cuda.synchronize()
    for out in outs:
        assert torch.equal(out, outs[0])
    assert_product(outs[0], input, weight.t(), bias=bias)


@pytest.mark.gpu
def test_a_training_step_is_captured(device):
    input, weight, bias = make(64, device)
    weight.requires_grad_(), bias.requires_grad_()

    def step():
        return torch.autograd.grad(linear(input, weight, bias), (weight, bias), input)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph, gradients = capture(step)
    for gradient in gradients:
        gradient.fill_(torch.nan)
    graph.replay()
    assert_product(gradients[0], input.t(), input)


COLD = """
import sys, torch, kernels
k = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
M = int(sys.argv[1])
a, w = (torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda") for rows in (M, 4096))
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        out = k.gemm(a, w.t())
except Exception as error:
    said = [str(error), str(error.__context__), str(error.__cause__)]
    assert any(f"warmup(N=4096, K=4096, layout='NT')" in text for text in said), said
    print("said what to do")
else:
    out.fill_(float("nan"))
    graph.replay()
    assert (out - a @ w.t()).abs().max() < 2, "wrong"
    print("works")
eager = k.gemm(a, w.t())
assert (eager - a @ w.t()).abs().max() < 2, "eager is wrong afterwards"
"""


@pytest.mark.parametrize(
    ("M", "compiled_before"), [(1, False), (16, True), (64, False), (2048, False)]
)
@pytest.mark.gpu
def test_the_first_call_of_a_process_may_be_captured(tmp_path, M, compiled_before):
    environment = dict(os.environ)
    if not compiled_before:
        environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", COLD, str(M)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in ("works", "said what to do")


def test_a_capture_that_forbids_a_first_launch_is_told_what_to_do(monkeypatch):
    def forbidden(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gemm_kernel.tuning, "launch_tuned", forbidden)
    storage = torch.empty(4, 8).untyped_storage
    a = SimpleNamespace(shape=(4, 8), device=torch.device("cuda", 0), untyped_storage=storage)
    b, out = torch.empty(6, 8).t(), torch.empty(4, 6)
    bias = torch.empty(6)
    for capturing, message in (
        (True, r"warmup\(N=6, K=8, layout='NT'\)"),
        (False, "not permitted"),
    ):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda value=capturing: value
        )
        with pytest.raises(RuntimeError, match=message):
            gemm_kernel.calls._launch(a, b, out)
        with pytest.raises(RuntimeError, match="bias=True" if capturing else message):
            gemm_kernel.calls._launch(a, b, out, bias)
