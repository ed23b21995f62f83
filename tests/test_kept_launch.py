"""The path of a call whose operands were seen before: straight to the compiled kernel, and only when it may.

What is compiled is faked, so that the path is also walked where there is no GPU.
"""

from types import SimpleNamespace

import kernels
import pytest
import torch
import triton

from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning
launching = gemm_kernel.kernels.launch

M, N, K = 24, 40, 56


class FakeLaunch:
    """Stands for a compiled launch: counts, and does what the kernel would do."""

    possible = True

    def __init__(self):
        self.calls = []

    def is_possible(self):
        return self.possible

    def __call__(self, a, b, out, addresses):
        assert addresses == (a.data_ptr(), b.data_ptr(), out.data_ptr())
        self.calls.append(out)
        out.copy_(a.double() @ b.double())


@pytest.fixture
def kept(monkeypatch, tuned_dir):
    launch = FakeLaunch()
    monkeypatch.setattr(gemm_kernel.kernels, "repeatable_launch", lambda *_: launch)
    return launch


def operands(device):
    a = torch.randn(M, K, dtype=torch.float16, device=device)
    return a, torch.randn(N, K, dtype=torch.float16, device=device).t()


def test_the_second_call_takes_the_kept_launch(device, kept):
    for count in range(3):
        a, b = operands(device)
        assert_product(gemm_kernel.gemm(a, b), a, b)
        out = torch.full((M, N), torch.nan, dtype=torch.float16, device=device)
        assert gemm_kernel.gemm(a, b, out=out) is out
        assert_product(out, a, b)
        assert len(kept.calls) == 2 * count


def test_another_kind_of_operand_does_not(device, kept):
    a, b = operands(device)
    gemm_kernel.gemm(a, b)
    others = [
        (a[:5], b),
        (a, b.contiguous()),
        (a.bfloat16(), b.bfloat16()),
        (a.t().contiguous().t(), b),
        (torch.randn(M, 2 * K, device=device).half()[:, :K], b),
    ]
    for other_a, other_b in others:
        assert_product(gemm_kernel.gemm(other_a, other_b), other_a, other_b)
    assert kept.calls == []


def test_an_address_off_alignment_does_not(device, kept):
    # pytorch/torchdynamo PR 1338: compiled for 16 bytes, and used for a pointer that is not
    a, b = operands(device)
    shifted = torch.empty(M * K + 1, dtype=torch.float16, device=device)[1:].view(M, K).copy_(a)
    out = torch.empty(M * N + 1, dtype=torch.float16, device=device)[1:].view(M, N)
    aligned = torch.empty(M, N, dtype=torch.float16, device=device)
    gemm_kernel.gemm(a, b)
    gemm_kernel.gemm(a, b, out=aligned)
    assert_product(gemm_kernel.gemm(shifted, b), a, b)
    assert_product(gemm_kernel.gemm(a, b, out=out), a, b)
    assert_product(gemm_kernel.gemm(shifted, b, out=aligned), a, b)
    assert kept.calls == []
    gemm_kernel.gemm(a, b)
    assert len(kept.calls) == 1


def test_memory_is_still_compared(device, kept):
    square = [torch.randn(64, 64, dtype=torch.float16, device=device) for _ in range(3)]
    a, b, out = square
    gemm_kernel.gemm(a, b, out=out)
    gemm_kernel.gemm(a, b, out=out)
    for left, right in ((out, b), (a, out)):
        with pytest.raises(ValueError, match="share no memory"):
            gemm_kernel.gemm(left, right, out=out)
    assert len(kept.calls) == 1


def test_what_makes_it_impossible_is_asked_each_time(device, kept):
    a, b = operands(device)
    gemm_kernel.gemm(a, b)
    kept.possible = False
    assert_product(gemm_kernel.gemm(a, b), a, b)
    assert kept.calls == []
    kept.possible = True
    gemm_kernel.gemm(a, b)
    assert len(kept.calls) == 1


def test_a_new_file_takes_effect(device, kept):
    a, b = operands(device)
    gemm_kernel.gemm(a, b)
    tuning._load_tuned_configs.cache_clear()
    gemm_kernel.gemm(a, b)
    assert kept.calls == []


def test_a_replaced_launch_is_called(device, kept, monkeypatch):
    a, b = operands(device)
    gemm_kernel.gemm(a, b)
    seen = []
    launch = gemm_kernel.kernels.launch_gemm_kernel
    monkeypatch.setattr(
        gemm_kernel.kernels, "launch_gemm_kernel", lambda *call: seen.append(call) or launch(*call)
    )
    assert_product(gemm_kernel.gemm(a, b), a, b)
    assert len(seen) == 1
    assert kept.calls == []


def test_the_number_of_kept_launches_has_an_end(device, kept, monkeypatch):
    monkeypatch.setattr(gemm_kernel.op, "_MAX_PLANS", 5)
    b = operands(device)[1]
    for rows in range(1, 20):
        gemm_kernel.gemm(torch.randn(rows, K, dtype=torch.float16, device=device), b)
        assert len(tuning.call_plans) <= 5


def test_a_gradient_from_what_out_held_before_is_refused(device, kept):
    a, b = operands(device)
    scale = torch.ones(M, N, dtype=torch.float16, device=device, requires_grad=True)
    out = torch.ones(M, N, dtype=torch.float16, device=device)
    for count in range(2):
        loss = (scale * out).sum()
        gemm_kernel.gemm(a, b, out=out)
        assert len(kept.calls) == count
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        gemm_kernel.gemm(a, b, out=torch.empty_like(out))


def test_operands_that_need_a_gradient_get_one(device, kept):
    a, b = operands(device)
    gemm_kernel.gemm(a, b)
    a.requires_grad_()
    gemm_kernel.gemm(a, b).sum().backward()
    assert_product(a.grad, torch.ones(M, N, dtype=torch.float16, device=device), b.t())


@pytest.mark.parametrize("by_pointer", [True, False])
def test_the_kernel_gets_what_the_jit_would_give_it(monkeypatch, by_pointer):
    # CompiledKernel.run takes grid, stream, handles and hooks, then all arguments by position
    driver = SimpleNamespace(
        get_current_device=lambda: 3, get_current_stream=lambda index: 70 + index
    )
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    calls = []
    compiled = SimpleNamespace(
        run=lambda *arguments: calls.append(arguments), function="handle", packed_metadata="packed"
    )
    described = launching.pointers if by_pointer else lambda a, b, out: ("A", "B", None, "O")
    launch = launching.Launch("kernel", (5, 1, 1), described, (M, N, K, 64), {"launch_pdl": True})
    kept = launching.CompiledLaunch(launch, compiled, 3)
    assert kept.is_possible()
    kept("a", "b", "out", (16, 32, 48))
    operands = (16, 32, 48) if by_pointer else ("A", "B", None, "O")
    expected = (5, 1, 1, 73, "handle", "packed", None, None, None, *operands, M, N, K, 64)
    assert calls == [expected]
    driver.get_current_device = lambda: 0
    assert not launching.CompiledLaunch(launch, compiled, 3).is_possible()
    # A single device is always the current one.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launching.CompiledLaunch(launch, compiled, 3).is_possible()


class Launcher:
    """A launcher as Triton's: `launch` is its compiled function."""

    global_scratch_size = profile_scratch_size = 0
    launch_pdl = True

    def __init__(self):
        self.calls = []
        self.launch = lambda *arguments: self.calls.append(arguments)


class SpreadLauncher(Launcher):
    """The order of Triton 3.6."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, False, self.launch_pdl, None, None, *arguments)


class PackedLauncher(Launcher):
    """The order of Triton 3.7: the arguments of the kernel are one tuple, and what they are stands before it."""

    def __call__(self, x, y, z, stream, function, metadata, other, enter, leave, *arguments):
        before = (function, False, self.launch_pdl, metadata, other, enter, leave, None, None)
        self.launch(x, y, z, stream, *before, "signature", arguments)


class ScratchLauncher(SpreadLauncher):
    """One whose kernel needs memory that is new at each launch."""

    global_scratch_size = 128


class TwiceLauncher(SpreadLauncher):
    def __call__(self, *arguments):
        super().__call__(*arguments)
        super().__call__(*arguments)


class MovedLauncher(Launcher):
    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(stream, x, y, z, function, *arguments)


class RefusingLauncher(Launcher):
    def __call__(self, x, y, z, *arguments):
        if not isinstance(x, int):
            raise TypeError("an integer is required")
        self.launch(x, y, z, *arguments)


@pytest.mark.parametrize(
    ("launcher", "is_direct"),
    [
        (SpreadLauncher, True),
        (PackedLauncher, True),
        (ScratchLauncher, False),
        (TwiceLauncher, False),
        (MovedLauncher, False),
        (RefusingLauncher, False),
    ],
)
def test_the_compiled_function_gets_what_the_launcher_would_give_it(
    monkeypatch, launcher, is_direct
):
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda index: 70 + index
    )
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    run = launcher()
    run(5, 1, 1, 70, "handle", "packed", None, None, None, 16, 32, 48, M, N)
    expected, run.calls = run.calls, []
    compiled = SimpleNamespace(run=run, function="handle", packed_metadata="packed")
    kept = launching.CompiledLaunch(
        launching.Launch("kernel", (5, 1, 1), launching.pointers, (M, N)), compiled, 0
    )
    assert run.calls == []
    assert (kept._launcher is not run) == is_direct
    kept("a", "b", "out", (16, 32, 48))
    assert run.calls == expected


def test_a_profiler_that_listens_to_launches_is_seen():
    assert not launching.launch_hooks_installed()

    def listen(*_):
        pass

    # The last that has hooks here: CompiledKernel before Triton 3.4, and a chain of them from 3.5 on.
    owner = getattr(triton, "knobs", None)
    owner = triton.compiler.CompiledKernel if owner is None else owner.runtime
    hook = owner.launch_enter_hook
    try:
        if hasattr(hook, "add"):
            hook.add(listen)
        else:
            owner.launch_enter_hook = listen
        assert launching.launch_hooks_installed()
    finally:
        if hasattr(hook, "remove"):
            hook.remove(listen)
        else:
            owner.launch_enter_hook = hook
    assert not launching.launch_hooks_installed()


@pytest.mark.gpu
def test_kept_launches_are_right_on_a_gpu(device, tuned_dir):
    for rows in (1, 16, 300, 4096):
        a = torch.randn(rows, 512, dtype=torch.bfloat16, device=device)
        for b in (
            torch.randn(768, 512, dtype=torch.bfloat16, device=device).t(),
            torch.randn(512, 768, dtype=torch.bfloat16, device=device),
        ):
            first = gemm_kernel.gemm(a, b)
            assert tuning.call_plans
            assert_product(first, a, b)
            assert torch.equal(gemm_kernel.gemm(a, b), first)
            with torch.cuda.stream(torch.cuda.Stream()):
                assert torch.equal(gemm_kernel.gemm(a, b), first)
