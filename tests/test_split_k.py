"""Split-K's scratch: nobody shares it, nothing has to clear it, and it does not grow."""

import contextlib
import gc
import json
import threading

import kernels
import pytest
import torch
import triton
import triton.language as tl

from .exact import assert_product

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
launch_gemm_kernel = gemm_kernel.kernels.launch_gemm_kernel
scratch = gemm_kernel.kernels.scratch
split_k = gemm_kernel.kernels.split_k

# A counter's unit for launches; what counts marks and arrivals is below it.
LAUNCH = 1 << 20

# Few tiles and many parts: two launches have room on a GPU at once, and each is long.
SWAP = {
    "kernel": "swap",
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 4,
    "SPLIT_K": 13,
}
# Two parts of columns, and fewer sharers than programs.
TMA = {**SWAP, "kernel": "tma", "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 96, "SPLIT_K": 6}


@pytest.fixture
def events(monkeypatch):
    """What is done on a stream of CUDA, in order, where there is none."""
    events = []

    class Stream:
        def __init__(self, device):
            self.synchronize = lambda: events.append("wait")

    @contextlib.contextmanager
    def current(stream):
        events.append("on a stream")
        yield
        events.append("off it")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return events


def _forget(monkeypatch, *kept):
    """Let what is ``kept`` of scratch memory be empty, and what was made of it with it."""
    for name in (*kept, "_scratches"):
        monkeypatch.setattr(scratch, name, {})
    monkeypatch.setattr(gemm_kernel.kernels.kept_launch, "_filled", {})


@pytest.fixture
def counters_of(monkeypatch, events):
    """Counters as a CUDA device gives them, for a stream and a capture of the test's choice."""
    device = torch.device("cuda", 0)
    reserve = torch.zeros(scratch._RESERVED_COUNTERS, dtype=torch.int32)
    fallback = torch.zeros(0, dtype=torch.int32)
    monkeypatch.setattr(scratch, "_zeroed_counters", lambda device: reserve)
    _forget(monkeypatch, "_reserves", "_owned")
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: fallback)

    def get(count, stream=7, capture=0):
        monkeypatch.setattr(
            scratch,
            "_owner",
            lambda device, stream: None if capture is None else (0, stream, capture),
        )
        given = scratch._get_counters(device, scratch._owner(device, stream), count)
        return None if given is fallback else given

    return get


def test_owners_have_counters_apart(counters_of):
    owners = [(7, 0), (8, 0), (7, 1), (7, 2), (8, 2)]
    slices = [counters_of(40, *owner) for owner in owners]
    starts = [given.storage_offset() for given in slices]
    # aligned as a compiled kernel takes every tensor to be
    assert all(start % 4 == 0 for start in starts)
    for given, following in zip(slices, starts[1:]):
        assert given.numel() >= 40
        assert given.storage_offset() + given.numel() <= following
    again = [counters_of(33, *owner).storage_offset() for owner in owners]
    assert again == starts


@pytest.fixture
def partials_of(monkeypatch, events):
    """Partial sums as a CUDA device gives them, for a stream and a capture of the test's choice."""
    device = torch.device("cuda", 0)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda count, **options: events.append("allocate") or empty(count)
    )
    monkeypatch.setattr(scratch, "_KEPT_PARTIALS", 64)
    monkeypatch.setattr(scratch, "_kept", {})

    def get(count, stream=7, capture=0):
        return scratch._get_partials(device, (0, stream, capture), count)

    return get


def test_small_partials_are_kept_for_their_stream(partials_of):
    first = partials_of(10)
    assert partials_of(64) is first
    assert partials_of(10, stream=8) is not first
    assert partials_of(10, stream=8) is partials_of(64, stream=8)
    # what is larger, or belongs to a graph, is made for each launch
    assert partials_of(65).numel() == 65
    assert partials_of(65) is not partials_of(65)
    assert partials_of(10, capture=1) is not partials_of(10, capture=1)
    assert partials_of(10) is first


def test_kept_partials_are_nobody_elses_any_more(partials_of, events):
    # They may be used on another stream than the one for which their memory was given out.
    partials_of(10)
    assert events == ["on a stream", "allocate", "wait", "off it"]


def test_what_is_kept_is_not_made_on_a_stream_that_another_thread_captures(
    partials_of, events, monkeypatch
):
    # Torch hands out 32 streams in turn, so a new one may be in use.
    capturing = iter([True, True, False])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    partials_of(10)
    assert events == [*["on a stream", "off it"] * 2, "on a stream", "allocate", "wait", "off it"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no stream"):
        partials_of(10, stream=8)


def test_the_number_of_kept_partials_has_an_end(partials_of):
    streams = range(2 * scratch._MAX_KEPT)
    first = [partials_of(10, stream) for stream in streams]
    again = [partials_of(10, stream) for stream in streams]
    kept = [one is other for one, other in zip(first, again)]
    assert kept == [stream < scratch._MAX_KEPT for stream in streams]


def test_a_larger_launch_takes_more(counters_of):
    small, large = counters_of(10), counters_of(1000)
    assert large.numel() >= 1000
    assert large.storage_offset() >= small.storage_offset() + small.numel()
    for count in (10, large.numel()):
        assert counters_of(count).storage_offset() == large.storage_offset()


def test_a_capture_makes_no_reserve(counters_of):
    assert counters_of(10, capture=1) is None
    assert counters_of(10, capture=0) is not None
    assert counters_of(10, capture=1) is not None
    assert counters_of(10, capture=None) is None


def test_the_reserve_ends(counters_of):
    first = counters_of(10)
    slices = scratch._RESERVED_COUNTERS // scratch.MAX_COUNTERS
    for capture in range(1, slices):
        assert counters_of(scratch.MAX_COUNTERS, capture=capture) is not None
    assert counters_of(scratch.MAX_COUNTERS, capture=slices) is None
    assert counters_of(10).storage_offset() == first.storage_offset()


def test_the_whole_reserve_is_given_out(counters_of):
    assert counters_of(scratch._RESERVED_COUNTERS) is not None


def test_threads_that_come_at_once_have_counters_apart(counters_of, monkeypatch):
    device, taken = torch.device("cuda", 0), []

    def take(stream):
        taken.append(scratch._take_counters(device, (0, stream, 0), 10).storage_offset())

    other = threading.Thread(target=take, args=(8,))
    make = scratch._apart

    def make_slowly(*arguments):
        if other.ident is None:
            other.start()
            other.join(0.1)
        return make(*arguments)

    monkeypatch.setattr(scratch, "_apart", make_slowly)
    take(7)
    other.join()
    assert sorted(taken) == [0, scratch._LINE]


def test_threads_that_come_at_once_keep_the_same_partials(partials_of, monkeypatch):
    # A kept launch has the address of the first, which nothing else would keep alive.
    make, first = scratch._apart, []

    def make_late(*arguments):
        if not first:
            first.append(None)
            first[0] = partials_of(10)
        return make(*arguments)

    monkeypatch.setattr(scratch, "_apart", make_late)
    assert partials_of(10) is first[0]


def test_what_is_kept_is_made_in_a_thread_of_its_own(events):
    # The caller's allocations may be directed to a pool.
    made_in = scratch._apart(lambda device: threading.get_ident(), torch.device("cuda", 0))
    assert made_in != threading.get_ident()


@pytest.fixture
def scratch_of(monkeypatch, events):
    """`get_scratch` as on CUDA devices, for a stream and a capture of the test's choice; None is an unknown one."""
    _forget(monkeypatch, "_reserves", "_owned", "_kept")
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(scratch, "_KEPT_PARTIALS", 64)
    monkeypatch.setattr(torch, "empty", lambda count, **options: empty(count))
    monkeypatch.setattr(torch, "zeros", lambda count, **options: zeros(count, dtype=torch.int32))

    def get(partials=10, counters=8, device=0, stream=7, capture=0):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capture != 0)
        monkeypatch.setattr(scratch, "_capture_id", lambda stream: capture or None)
        return scratch.get_scratch(torch.device("cuda", device), partials, counters, stream)

    return get


def _share_memory(one, other):
    return any(left == right for left, right in zip(one.addresses, other.addresses))


def test_launches_on_a_stream_have_the_same_scratch(scratch_of):
    first = scratch_of()
    assert first.is_kept
    assert first.addresses == (first.partials.data_ptr(), first.counters.data_ptr())
    assert scratch_of(64, len(first.counters)) is first
    assert scratch_of(stream=8) is scratch_of(stream=8)
    assert scratch_of(device=1) is scratch_of(device=1)
    assert scratch_of() is first


@pytest.mark.parametrize(
    "other", [{"stream": 8}, {"device": 1}, {"capture": 1}, {"capture": None}], ids=str
)
def test_launches_elsewhere_have_scratch_of_their_own(scratch_of, other):
    first, elsewhere = scratch_of(), scratch_of(**other)
    assert not _share_memory(first, elsewhere)
    assert scratch_of() is first
    assert elsewhere.is_kept == ("capture" not in other)
    if other == {"capture": None}:
        assert not _share_memory(elsewhere, scratch_of(**other))


def test_a_larger_launch_gets_as_much_as_it_asks_for(scratch_of):
    small = scratch_of()
    larger = scratch_of(partials=65)
    assert len(larger.partials) >= 65
    assert not larger.is_kept
    assert scratch_of() is small
    more = scratch_of(counters=len(small.counters) + 1)
    assert len(more.counters) > len(small.counters)
    # Its own from now on, also for smaller ones.
    assert more.is_kept
    assert scratch_of() is more


def test_counters_that_no_reserve_has_are_each_launch_its_own(scratch_of, monkeypatch):
    monkeypatch.setattr(scratch, "_RESERVED_COUNTERS", 0)
    first, second = scratch_of(), scratch_of()
    assert not first.is_kept
    assert first.addresses[1] != second.addresses[1]
    assert first.counters.count_nonzero() == 0


@pytest.mark.parametrize(("failed", "number", "found"), [(0, 5, 5), (0, 0, None), (1, 5, None)])
def test_a_capture_that_the_driver_does_not_number_is_not_known(monkeypatch, failed, number, found):
    def query(stream, status, number_place, *rest):
        number_place._obj.value = number
        return failed

    monkeypatch.setattr(scratch, "_capture_query", lambda: query)
    assert scratch._capture_id(7) == found


def test_streams_of_rocm_are_not_shown_to_the_driver_of_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(scratch, "cuda_driver_function", lambda name: pytest.fail(name))
    assert scratch._capture_query.__wrapped__() is None


def test_a_whole_launch_has_no_scratch():
    assert split_k.scratch(1, 8, 1024) is None
    assert split_k.operands(1) == (None, None)


def test_few_partial_sums_are_added_up_by_one_and_others_by_a_power_of_two():
    kib = 1024 // 4
    assert [split_k.shares(2, size * kib) for size in (16, 39, 40)] == [1, 1, 2]
    assert [split_k.shares(3, size * kib) for size in (16, 26, 27)] == [1, 1, 2]
    assert [split_k.shares(parts, kib) for parts in (4, 7, 8, 13, 16)] == [4, 4, 8, 8, 16]


def test_a_split_has_its_limits():
    problem = split_k.operand_problem
    assert problem(2, scratch.MAX_COUNTERS, 16) is None
    assert "tiles" in problem(2, scratch.MAX_COUNTERS + 1, 16)
    most = (32 << 20) // (16 * 4 * 8)
    assert problem(16, 8, most) is None
    assert "bytes of scratch" in problem(16, 8, most + 1)
    assert problem(1, scratch.MAX_COUNTERS + 1, most) is None
    assert split_k.scratch(3, 8, 1024) == (3 * 8 * 1024, 8)


@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 17, 33])
@pytest.mark.parametrize("parts", [1, 2, 3, 16])
def test_every_k_is_in_one_part(device, blocks, parts):
    # K = ones: an element of out counts the k that were summed.
    config = {**SWAP, "BLOCK_SIZE_K": 32, "SPLIT_K": parts}
    K = 32 * blocks - 5
    a = torch.ones(2, K, dtype=torch.float16, device=device)
    b = torch.ones(K, 3, dtype=torch.float16, device=device)
    out = launch_gemm_kernel(a, b, a.new_empty(2, 3), config)
    assert torch.equal(out, torch.full_like(out, K))


count_in = split_k.count_in


@triton.jit
def _count_in_kernel(
    counters_ptr, shares_ptr, delays_ptr, SPLIT_K: tl.constexpr, SHARES: tl.constexpr
):
    """Each program counts itself in after so many atomics, and writes down which shares it got."""
    pid = tl.program_id(0)
    delay = tl.load(delays_ptr + pid)
    waited = 0
    while waited < delay:
        tl.atomic_add(delays_ptr + pid, -1)
        waited += 1
    shares = count_in(counters_ptr, pid // SPLIT_K, pid % SPLIT_K, SPLIT_K, SHARES)
    tl.store(shares_ptr + pid, shares)


# More than a sharer waits for, and less.
DELAYS = {"none": 0, "a little": 12, "long": 200}


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize(("parts", "sharers"), [(2, 2), (3, 1), (3, 2), (8, 8), (13, 8), (16, 16)])
def test_every_share_is_added_up_once(device, parts, sharers, delay):
    on_gpu = device.type == "cuda"
    tiles = 64 if on_gpu else 3
    # The number of launches begins anew after the largest, and in between it is negative.
    counters = torch.full((tiles,), -2 * LAUNCH, dtype=torch.int32, device=device)
    found = []
    for _ in range(50 if on_gpu else 3):
        delays = torch.randint(2, (tiles * parts,), dtype=torch.int32) * delay
        shares = torch.full((tiles * parts,), -1, dtype=torch.int32, device=device)
        _count_in_kernel[(tiles * parts,)](counters, shares, delays.to(device), parts, sharers)
        found.append(shares.cpu().view(tiles, parts))
        assert (counters & (LAUNCH - 1)).count_nonzero() == 0
    shares = torch.cat(found)
    # Bits that nobody has twice add up to all of them only if each is there.
    assert (shares.sum(1) == (1 << sharers) - 1).all()
    assert [(shares & (1 << bit) != 0).sum(1).tolist() for bit in range(sharers)] == [
        [1] * len(shares)
    ] * sharers
    if sharers == 1:
        return  # the last one's, whoever that is
    own = torch.tensor([1 << split if split < sharers else 0 for split in range(parts)])
    left = (shares & ~own).count_nonzero()
    if not on_gpu:
        assert left == len(shares)  # a program after the other: nobody waits for long
    elif delay > 100:
        assert left > 0
    elif delay == 0:
        assert left < len(shares) / 10


class Work:
    """A split launch on operands of its own, and the bits it has to give."""

    def __init__(self, config, N, device):
        M = config["BLOCK_SIZE_M"]
        self.config = config
        self.a = torch.randn(M, 8192, dtype=torch.float16, device=device)
        self.b = torch.randn(8192, N, dtype=torch.float16, device=device)
        self.out = self.a.new_full((M, N), torch.nan)
        self.expected = launch_gemm_kernel(self.a, self.b, self.out.clone(), config)
        assert_product(self.expected, self.a, self.b)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def step(self):
        self.out.fill_(torch.nan)
        launch_gemm_kernel(self.a, self.b, self.out, self.config)
        self.wrong += (self.out != self.expected).sum()


def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("streams and graphs of CUDA")


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SWAP, TMA], ids=["swap", "tma"])
def test_streams_do_not_share_scratch(device, config):
    _needs_cuda(device)
    works = [Work(config, 256, device) for _ in range(4)]
    streams = [torch.cuda.Stream(device) for _ in works]
    torch.cuda.synchronize(device)
    for _ in range(200):
        for work, stream in zip(works, streams):
            with torch.cuda.stream(stream):
                work.step()
    torch.cuda.synchronize(device)
    assert [work.wrong.item() for work in works] == [0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SWAP, TMA], ids=["swap", "tma"])
def test_threads_do_not_share_scratch(device, config):
    _needs_cuda(device)
    works = [Work(config, 256, device) for _ in range(4)]
    # Two threads on a stream of their own, two together on one stream.
    shared = torch.cuda.Stream(device)
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device), shared, shared]
    torch.cuda.synchronize(device)

    def repeat(work, stream):
        with torch.cuda.stream(stream):
            for _ in range(200):
                work.step()

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(works, streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize(device)
    assert [work.wrong.item() for work in works] == [0] * 4


@pytest.mark.gpu
def test_new_scratch_is_memory_that_no_stream_still_works_on(device, monkeypatch):
    # Memory freed on the default stream, which still has to read it, given to a launch on another one.
    _needs_cuda(device)
    work = Work(SWAP, 192, device)
    _forget(monkeypatch, "_kept")
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        work.out.fill_(torch.nan)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    freed = torch.full((scratch._KEPT_PARTIALS,), 7.0, device=device)
    copy = torch.empty_like(freed)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(1 << 28)
    copy.copy_(freed)
    del freed
    with torch.cuda.stream(side):
        work.step()
    torch.cuda.synchronize(device)
    assert (copy == 7).all()
    assert work.wrong.item() == 0


def _capture(work, launches):
    # Every capture is on the one stream that torch keeps for it.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work.step()
    return graph


def _replay_at_once(works, graphs, times):
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(times):
        for stream, graph in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
        # Eager launches beside them.
        works[-1].step()
    torch.cuda.synchronize()
    return [work.wrong.item() for work in works]


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SWAP, TMA], ids=["swap", "tma"])
def test_graphs_do_not_share_scratch(device, config):
    _needs_cuda(device)
    works = [Work(config, 192, device) for _ in range(4)]
    graphs = [_capture(work, launches=10) for work in works[:-1]]
    assert _replay_at_once(works, graphs, times=300) == [0] * 4


@pytest.mark.gpu
def test_it_goes_on_without_a_reserve(device, monkeypatch):
    _needs_cuda(device)
    works = [Work(SWAP, 192, device) for _ in range(3)]
    _forget(monkeypatch, "_owned")
    monkeypatch.setattr(scratch._reserves[device.index], "_used", scratch._RESERVED_COUNTERS)
    graphs = [_capture(work, launches=10) for work in works[:-1]]
    assert _replay_at_once(works, graphs, times=100) == [0] * 3
    assert scratch._owned == {}


@pytest.mark.gpu
def test_a_graph_takes_counters_once(device):
    _needs_cuda(device)
    if torch.version.hip:
        pytest.skip(
            "ROCm does not tell captures apart, so launches in them clear their own counters"
        )
    work = Work(SWAP, 192, device)
    used = []
    for launches in (1, 50, 50):
        _capture(work, launches)
        used.append(scratch._reserves[device.index]._used)
    assert used[2] - used[1] == used[1] - used[0] == scratch._LINE


@pytest.mark.gpu
def test_branches_of_one_graph_do_not_share_scratch(device):
    _needs_cuda(device)
    works = [Work(SWAP, 192, device) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(10):
            works[0].step()
            with torch.cuda.stream(side):
                works[1].step()
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(300):
        graph.replay()
    torch.cuda.synchronize(device)
    assert [work.wrong.item() for work in works] == [0, 0]


@pytest.mark.gpu
def test_memory_does_not_grow(device):
    _needs_cuda(device)
    work = Work(SWAP, 192, device)
    gc.collect()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(device)]

    def repeat(times):
        for _ in range(times):
            for stream in streams:
                with torch.cuda.stream(stream):
                    launch_gemm_kernel(work.a, work.b, work.out, SWAP)
        torch.cuda.synchronize(device)
        return (
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
            scratch._reserves[device.index]._used,
        )

    assert repeat(3) == repeat(1000)


@pytest.mark.gpu
def test_counters_hold_nothing_but_the_number_of_launches(device):
    _needs_cuda(device)
    for config in (SWAP, TMA):
        work = Work(config, 304, device)
        _capture(work, launches=2).replay()
    torch.cuda.synchronize(device)
    counters = scratch._reserves[device.index]._counters
    assert (counters & (LAUNCH - 1)).count_nonzero() == 0
    assert counters.count_nonzero() > 0


@pytest.mark.gpu
def test_torch_compile_with_cuda_graphs(device, tuned_dir, monkeypatch):
    # What is kept must not come from the pool that a compiled function warms up in.
    _needs_cuda(device)
    _forget(monkeypatch, "_reserves", "_owned")
    name = gemm_kernel.tuning.config_file_name(192, 8192, device, "NN")
    (tuned_dir / name).write_text(json.dumps({"16": SWAP}))
    a = torch.randn(16, 8192, dtype=torch.float16, device=device)
    b = torch.randn(8192, 192, dtype=torch.float16, device=device)
    compiled = torch.compile(lambda a, b: gemm_kernel.gemm(a, b), mode="reduce-overhead")
    for _ in range(5):
        assert_product(compiled(a, b).clone(), a, b)
    assert scratch._reserves
