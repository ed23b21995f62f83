"""The path of a call whose operands were seen before: straight to the compiled kernel, and only when it may.

What is compiled is faked, so that the path is also walked where there is no GPU.
"""

import gc
import weakref
from types import SimpleNamespace

import kernels
import pytest
import torch
import triton

from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
tuning = gemm_kernel.tuning
launching = gemm_kernel.kernels.launch
kept_launch = gemm_kernel.kernels.kept_launch

M, N, K = 24, 40, 56


class FakeLaunch:
    """Stands for a compiled launch: counts, and does what the kernel would do."""

    possible = True

    def __init__(self):
        self.calls = []

    def is_possible(self):
        return self.possible

    def __call__(self, a, b, out, bias, addresses):
        operands = (a, b, out, bias)
        assert addresses == tuple(None if one is None else one.data_ptr() for one in operands)
        self.calls.append(out)
        # A layer hands its weight (N, K) over as it is, and an input of any rank.
        b = b.t() if b.shape[0] != a.shape[-1] else b
        out.copy_(a.double() @ b.double() + (0 if bias is None else bias.double()))


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


def test_a_layer_and_a_bias_take_the_kept_launch(device, kept):
    a, b = operands(device)
    input, weight = a.view(2, 3, 4, K), b.t()
    bias = torch.randn(N, dtype=torch.float16, device=device)
    # None is another kind than a bias, and off alignment it is no kept launch's.
    shifted = torch.empty(N + 1, dtype=torch.float16, device=device)[1:].copy_(bias)
    linear = gemm_kernel.op.linear
    for count in range(3):
        assert_product(linear(input, weight).view(M, N), a, b)
        assert_product(linear(input, weight, bias).view(M, N), a, b, bias=bias)
        assert_product(linear(input[0, 0, 0], weight, bias)[None], a[:1], b, bias=bias)
        out = torch.full((M, N), torch.nan, dtype=torch.float16, device=device)
        assert_product(gemm_kernel.gemm(a, b, out=out, bias=bias), a, b, bias=bias)
        assert len(kept.calls) == 4 * count
        assert_product(linear(input, weight, shifted).view(M, N), a, b, bias=bias)
        assert_product(gemm_kernel.gemm(a, b, out=out, bias=shifted), a, b, bias=bias)
        assert len(kept.calls) == 4 * count
        with pytest.raises(ValueError, match="share no memory"):
            gemm_kernel.gemm(a, b, out=out, bias=out.view(-1)[:N])


def test_an_input_that_has_to_be_copied_does_not(device, kept):
    a, b = operands(device)
    input = a.view(4, 6, K).movedim(0, 1)
    for _ in range(2):
        product = gemm_kernel.op.linear(input, b.t())
        assert_product(product.reshape(M, N), input.reshape(M, K), b)
    assert kept.calls == []


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


@pytest.mark.parametrize("name", ["a", "b", "bias", "out"])
def test_memory_that_was_freed_is_refused(device, kept, name):
    # FSDP frees a weight by resizing its storage; torch refuses to multiply by it.
    def call(free):
        a, b = operands(device)
        tensors = {
            "a": a,
            "b": b,
            "bias": a.new_ones(N),
            "out": a.new_empty(M, N),
        }
        if free:
            tensors[name].untyped_storage().resize_(0)
        if name == "out":
            return gemm_kernel.gemm(**tensors)
        bias, _ = tensors.pop("bias"), tensors.pop("out")
        return gemm_kernel.gemm(a, b, bias=bias) if name == "bias" else gemm_kernel.gemm(a, b)

    for seen in (True, False):
        if seen:
            call(free=False)
        else:
            tuning._load_tuned_configs.forget()
        with pytest.raises(RuntimeError, match="storage"):
            call(free=True)
        assert kept.calls == []


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
    monkeypatch.setattr(gemm_kernel.calls, "_MAX_PLANS", 5)
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


ARGUMENTS = (M, N, K, 64)


class Compiled:
    """A compiled kernel: what `run` is and the handles that it is called with."""

    function, packed_metadata = "handle", "packed"

    def __init__(self, run):
        self.run = run


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


class ProfiledLauncher(SpreadLauncher):
    profile_scratch_size = 128


class ShortLauncher(PackedLauncher):
    """One that leaves out an argument that its kernel does not need."""

    def __call__(self, *arguments):
        PackedLauncher.__call__(self, *arguments[:-1])


class TwiceLauncher(SpreadLauncher):
    def __call__(self, *arguments):
        # Not by `super`, which refuses who listens in its place.
        SpreadLauncher.__call__(self, *arguments)
        SpreadLauncher.__call__(self, *arguments)


class TurningLauncher(Launcher):
    def __call__(self, *arguments):
        self.launch(*reversed(arguments))


class RefusingLauncher(Launcher):
    def __call__(self, x, y, z, stream, *arguments):
        if not isinstance(stream, int):
            raise TypeError("an integer is required")
        self.launch(x, y, z, stream, *arguments)


# Before 3.5 launchers do not say whether they need memory for a profiler.
launches_directly = pytest.mark.skipif(
    not hasattr(triton.knobs.runtime.launch_enter_hook, "calls")
    if hasattr(triton, "knobs")
    else True,
    reason="Triton before 3.5 launches through its own launcher",
)


@pytest.fixture
def driver(monkeypatch):
    """What is asked of Triton's driver for each launch, with device 3 the current one of four."""
    driver = SimpleNamespace(
        get_current_device=lambda: 3, get_current_stream=lambda index: 70 + index
    )
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return driver


def keep(run, operands=("a", "b", "out", "bias"), scratch=None, bias=None):
    launch = launching.Launch("kernel", (5, 1, 1), operands, ARGUMENTS, scratch)
    return kept_launch.keep_launch(launch, Compiled(run), *on_device_3(0), bias)


def on_device_3(seed):
    """Operands that say they are on a device that is not here."""
    return tuple(SomeTensor(1000 * seed + 16 * i) for i in range(1, 4))


class SomeTensor:
    device = SimpleNamespace(index=3)
    shape = torch.Size((64, 128))

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address

    def stride(self):
        return 128, 1


@pytest.mark.parametrize(
    ("launcher", "is_direct"),
    [
        (SpreadLauncher, True),
        (PackedLauncher, True),
        (ScratchLauncher, False),
        (ProfiledLauncher, False),
        (TwiceLauncher, False),
        (TurningLauncher, False),
        (RefusingLauncher, False),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_compiled_function_gets_what_the_launcher_would_give_it(
    driver, launcher, is_direct, has_bias
):
    run = launcher()
    # CompiledKernel.run takes grid, stream, handles and hooks, then all arguments by position
    tensors = *on_device_3(7), SomeTensor(4096) if has_bias else None
    addresses = tuple(tensor and tensor.data_ptr() for tensor in tensors)
    run(5, 1, 1, 73, "handle", "packed", None, None, None, *addresses, *ARGUMENTS)
    expected, run.calls = run.calls, []
    kept = keep(run, bias=tensors[3])
    assert run.calls == []
    assert isinstance(kept, kept_launch._DirectLaunch) == is_direct
    kept(*tensors, addresses)
    if not is_direct:  # then Triton asks each tensor for its address
        run.calls = [
            tuple(getattr(value, "address", value) for value in call) for call in run.calls
        ]
    assert run.calls == expected


def test_a_launcher_that_leaves_an_argument_out_is_left_to_it(driver):
    assert not isinstance(keep(ShortLauncher()), kept_launch._DirectLaunch)


@pytest.mark.parametrize("launcher", [PackedLauncher, ScratchLauncher])
def test_a_kernel_lives_as_long_as_its_kept_launch(driver, launcher):
    # From Triton 3.8 on the end of this object unloads the kernel.
    compiled = Compiled(launcher())
    alive = weakref.ref(compiled)
    launch = launching.Launch("kernel", (5, 1, 1), ("a", "b", "out"), ARGUMENTS)
    kept = kept_launch.keep_launch(launch, compiled, *on_device_3(0))
    del compiled
    assert alive() is not None
    del kept
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("is_kept", [False, True])
def test_scratch_memory_that_is_not_kept_is_each_launch_its_own(driver, monkeypatch, is_kept):
    capturing = False
    asked = []

    def get_scratch(device, partials, counters, stream):
        asked.append((device.index, partials, counters, stream))
        addresses = 900 + len(asked), 5000 + len(asked)
        return SimpleNamespace(addresses=addresses, is_kept=is_kept and not capturing)

    monkeypatch.setattr(kept_launch, "get_scratch", get_scratch)
    monkeypatch.setattr(kept_launch, "is_current_stream_capturing", lambda: capturing)
    run = SpreadLauncher()
    scratch = launching.ScratchSize(256, 8)
    kept = keep(run, ("a", "b", "out", "partials", "counters"), scratch)
    # Which memory each launch gets: captured ones their own, the others one for all where it is kept.
    numbers = (1, 1, 2, 3, 1) if is_kept else (1, 2, 3, 4, 5)
    for call, captured in enumerate((False, False, True, True, False)):
        capturing = captured
        kept(*on_device_3(1), None, (16, 32, 48, None))
        number = numbers[call]
        assert asked == [(3, 256, 8, 73)] * max(numbers[: call + 1])
        assert run.calls[-1][13:18] == (16, 32, 48, 900 + number, 5000 + number)


def test_a_launch_is_for_the_current_device(driver, monkeypatch):
    kept = keep(SpreadLauncher())
    assert kept.is_possible()
    driver.get_current_device = lambda: 0
    assert not keep(SpreadLauncher()).is_possible()
    # A single device is always the current one.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert keep(SpreadLauncher()).is_possible()


def test_a_profiler_is_asked_for_at_each_launch(driver, monkeypatch):
    kept = keep(SpreadLauncher())
    monkeypatch.setattr(kept_launch, "launch_hooks_installed", lambda: True)
    assert not kept.is_possible()


class Descriptor:
    """As Triton's TensorDescriptor."""

    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, base):
        self.base, self.shape, self.strides = base, [64, 128], [128, 1]


@pytest.fixture
def encoded(driver):
    """The addresses that were encoded, by Triton's own wrapper of the installed version."""
    encoded = []

    class Encoded:
        def __init__(self, address, *rest):
            self.address = address
            encoded.append(address)

    driver.utils = SimpleNamespace(fill_tma_descriptor=Encoded, fill_tma_descriptor_tiled=Encoded)
    return encoded


def installed_launcher(signature):
    """Triton's own launcher for a kernel of such a signature, its compiled function replaced."""
    from triton.backends.nvidia import driver as nvidia

    meta = {
        "swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [64, 64], "fp4_padded": False
    }  # fmt: skip
    calls = []

    def launch(*arguments):
        if isinstance(arguments[-1], (tuple, list)):
            arguments = (*arguments[:-1], *arguments[-1])
        calls.append(arguments)

    run = object.__new__(nvidia.CudaLauncher)
    signature = dict(enumerate(signature))
    metas = [meta for kind in signature.values() if kind.startswith("tensordesc")]
    run.launch = nvidia.wrap_handle_tensordesc(launch, signature, metas)
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = run.num_ctas = 1
    run.launch_cooperative_grid = run.launch_pdl = run.gsan_enabled = False
    run.arg_annotations = run.kernel_signature = None
    return run, calls


def plain(arguments):
    """What can be compared: the address that a descriptor was encoded for."""
    return [getattr(argument, "address", argument) for argument in arguments]


@launches_directly
def test_triton_launches_pointers_as_it_is_listened_to(driver):
    run, calls = installed_launcher(["*bf16"] * 3 + ["i32"] * 4)
    run(5, 1, 1, 73, "handle", "packed", None, None, None, 16, 32, 48, *ARGUMENTS)
    kept = keep(run, ("a", "b", "out"))
    assert isinstance(kept, kept_launch._DirectLaunch), (
        "this version of Triton launches in another way"
    )
    kept(*on_device_3(1), None, (16, 32, 48, None))
    assert calls[1] == calls[0]


@launches_directly
def test_triton_launches_descriptors_as_it_is_listened_to(driver, encoded):
    run, calls = installed_launcher(
        ["tensordesc<bf16[64, 64]>", "*bf16", "tensordesc<bf16[64, 64]>"] + ["i32"] * 4
    )
    described = launching.Described
    kept = keep(run, (described("b", Descriptor), "out", described("a", Descriptor)))
    assert isinstance(kept, kept_launch._DirectLaunch), (
        "this version of Triton launches in another way"
    )
    for seed in (1, 2):
        a, b, out = on_device_3(seed)
        run(
            *(5, 1, 1, 73, "handle", "packed", None, None, None),
            *(Descriptor(b), out.address, Descriptor(a), *ARGUMENTS),
        )
        encoded.clear()
        for _ in range(2):
            kept(a, b, out, None, (a.address, b.address, out.address, None))
            assert plain(calls[-1]) == plain(calls[-2])
        assert sorted(encoded) == [a.address, b.address]


def test_descriptors_that_are_not_one_object_each_are_left_to_triton(driver):
    class Spreading(SpreadLauncher):
        def __init__(self):
            super().__init__()
            launcher = self.launch

            def encode(*arguments):
                return launcher(*(getattr(value, "base", value) for value in arguments))

            self.launch = encode

    run = Spreading()
    kept = keep(run, (launching.Described("a", Descriptor), "b", "out"))
    a, b, out = on_device_3(1)
    kept(a, b, out, None, (a.address, b.address, out.address, None))
    assert a in run.calls[-1]


@launches_directly
def test_an_encoded_descriptor_serves_its_kernel_shape_and_strides_alone(
    driver, encoded, monkeypatch
):
    for name in ("_encoded", "_described", "_filled"):
        monkeypatch.setattr(kept_launch, name, {})
    run, calls = installed_launcher(["tensordesc<bf16[64, 64]>"] * 2 + ["*bf16"] + ["i32"] * 4)
    described = launching.Described("a", Descriptor), launching.Described("b", Descriptor), "out"
    launch = launching.Launch("kernel", (5, 1, 1), described, ARGUMENTS)

    def newly_encoded(compiled, *shapes):
        tensors = on_device_3(1)
        for tensor, shape in zip(tensors, shapes):
            tensor.shape = torch.Size(shape)
        kept = kept_launch.keep_launch(launch, compiled, *tensors)
        encoded.clear()
        kept(*tensors, None, (*(tensor.address for tensor in tensors), None))
        return sorted(encoded)

    one, other = Compiled(run), Compiled(run)
    both = [tensor.address for tensor in on_device_3(1)[:2]]
    assert newly_encoded(one) == both
    assert newly_encoded(one) == []
    assert newly_encoded(other) == both
    assert newly_encoded(one, (32, 128)) == both
    assert newly_encoded(one, (64, 128), (32, 128)) == both
    monkeypatch.setattr(SomeTensor, "stride", lambda self: (256, 1))
    assert newly_encoded(one) == both


@launches_directly
def test_two_descriptors_of_one_address_are_two(driver, encoded, monkeypatch):
    # They have blocks of their own.
    monkeypatch.setattr(kept_launch, "_encoded", {})
    run, calls = installed_launcher(["tensordesc<bf16[64, 64]>"] * 2 + ["*bf16"] + ["i32"] * 4)
    described = (launching.Described(name, Descriptor) for name in "ab")
    kept = keep(run, (*described, "out"))
    square = SomeTensor(4096)
    for seed in (1, 2):
        out = on_device_3(seed)[2]
        kept(square, square, out, None, (4096, 4096, out.address, None))
        of_a, of_b = (value for value in calls[-1] if getattr(value, "address", None) == 4096)
        assert of_a is not of_b


@launches_directly
def test_the_number_of_kept_descriptors_has_an_end(driver, encoded, monkeypatch):
    monkeypatch.setattr(kept_launch, "_MAX_ENCODED", 6)
    monkeypatch.setattr(kept_launch, "_encoded", {})
    run, calls = installed_launcher(["tensordesc<bf16[64, 64]>"] + ["*bf16"] * 2 + ["i32"] * 4)
    kept = keep(run, (launching.Described("a", Descriptor), "b", "out"))
    for seed in range(20):
        a, b, out = on_device_3(seed)
        kept(a, b, out, None, (a.address, b.address, out.address, None))
        assert plain(calls[-1]).count(a.address) == 1
        assert len(kept_launch._encoded) <= 6


@launches_directly
def test_the_number_of_kept_kinds_of_descriptors_has_an_end(driver, encoded, monkeypatch):
    monkeypatch.setattr(kept_launch, "_MAX_DESCRIBED", 6)
    monkeypatch.setattr(kept_launch, "_described", {})
    run, calls = installed_launcher(["tensordesc<bf16[64, 64]>"] + ["*bf16"] * 2 + ["i32"] * 4)
    a, b, out = on_device_3(1)
    for rows in range(20):
        monkeypatch.setattr(SomeTensor, "shape", torch.Size((rows, 128)))
        kept = keep(run, (launching.Described("a", Descriptor), "b", "out"))
        kept(a, b, out, None, (a.address, b.address, out.address, None))
        assert plain(calls[-1]).count(a.address) == 1
        assert len(kept_launch._described) <= 6


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


@launches_directly
def test_a_hook_in_the_place_of_all_hooks_is_seen(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda *_: None)
    assert launching.launch_hooks_installed()


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


def test_the_number_of_filled_argument_lists_has_an_end(driver, monkeypatch):
    monkeypatch.setattr(kept_launch, "_MAX_FILLED", 6)
    monkeypatch.setattr(kept_launch, "_filled", {})
    run = SpreadLauncher()
    kept = keep(run, ("a", "b", "out"))
    for seed in [*range(20), *range(20)]:
        tensors = on_device_3(seed)
        addresses = tuple(tensor.address for tensor in tensors)
        kept(*tensors, None, (*addresses, None))
        assert run.calls[-1][13:16] == addresses
        assert len(kept_launch._filled) <= 6


@pytest.mark.parametrize("launcher", [SpreadLauncher, PackedLauncher])
def test_what_was_filled_serves_that_launch_those_addresses_and_that_stream_alone(
    driver, monkeypatch, launcher
):
    monkeypatch.setattr(kept_launch, "_filled", {})
    current = []
    driver.get_current_stream = lambda index: current[-1]
    runs = [launcher(), launcher()]
    launches = [keep(run, ("a", "b", "out")) for run in runs]
    for _ in range(2):
        for stream in (73, 5):
            current.append(stream)
            for seed in (1, 2):
                tensors = on_device_3(seed)
                addresses = tuple(tensor.address for tensor in tensors)
                for run, kept in zip(runs, launches):
                    before = len(run.calls)
                    kept(*tensors, None, (*addresses, None))
                    run(
                        *(5, 1, 1, stream, "handle", "packed", None, None, None),
                        *(*addresses, *ARGUMENTS),
                    )
                    assert run.calls[before] == run.calls[before + 1]
    # two launches, two streams, two places
    assert len(kept_launch._filled) == 8
