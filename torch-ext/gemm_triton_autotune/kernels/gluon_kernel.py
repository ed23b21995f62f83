"""Device code of the `gluon` family, in Gluon: a warp-specialised, persistent GEMM for Hopper.

Importing this module needs Triton's Gluon; `gluon.py` asks whether that is there. All barriers and the
order in which they are used are in this file. For each CTA let step s = 0, 1, … be the k steps of all
its tiles, one after the other. Step s lives in ring stage s % NUM_STAGES; in use u = s // NUM_STAGES of
that stage

    full[stage]   completes its phase u when all bytes of the step have landed
    empty[stage]  completes its phase u when every consumer has read the step

so a consumer waits for parity u & 1 of `full`, and the loader, before it loads use u, for parity
(u - 1) & 1 of `empty`, which a fresh barrier grants for u = 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .dependent_launch import gdc_launch_dependents, gdc_wait
from .wgmma import first_operand, wgmma, wgmma_columns, wgmma_layout, wgmma_wait, wgmma_zeros

# Triton 3.8 renamed the two copies and 3.9 the view; each name is looked up once, for all versions.
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_view = (
    gl.shared_memory_descriptor.reinterpret
    if hasattr(gl.shared_memory_descriptor, "reinterpret")
    else gl.shared_memory_descriptor._reinterpret
)


# One compile serves every size: nothing here gains from knowing that one is divisible.
@gluon.jit(do_not_specialize=["M", "N", "K"])
def gluon_gemm_kernel(
    # TMA descriptors, in boxes of 64 x 64; and if B_IS_NT the one or two boxes of b beyond a multiple of 64 columns,
    # the wider first, else None
    a_desc,
    b_desc,
    b_desc_2,
    b_desc_3,
    out_desc,
    # (N,), or None
    bias_ptr,
    # shape
    M,
    N,
    K,
    # tile
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    BLOCK_SIZE_K: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    # of a and b in each stage, of 128 bytes: a multiple of 8, or (what each Triton takes) of 64
    STAGE_ROWS: gl.constexpr,
    # chunks of out that a consumer may have on their way to memory, and steps that it may have in wgmma: 0 or 1
    STAGING: gl.constexpr,
    STEPS_IN_FLIGHT: gl.constexpr,
    A_IS_ROW_MAJOR: gl.constexpr,
    B_IS_NT: gl.constexpr,
    SWAP: gl.constexpr,
    PDL: gl.constexpr,
):
    """out = a @ b + bias; a (M, K) row-major or (if not A_IS_ROW_MAJOR) column-major, b (K, N) row-major or (if B_IS_NT)
    column-major, out (M, N).

    If SWAP, a, b and out are the caller's b.T, a.T and out.T: `out_desc` is that of the caller's out, there is a number of
    the bias for each row, and GROUP_SIZE_M is one of columns.

    A CTA computes the BLOCK_SIZE_M x BLOCK_SIZE_N tiles pid, pid + CTAs, …: one warp loads the k steps of
    all of them into a ring, across tile borders, and a warpgroup for each 64 rows, a consumer, multiplies these.
    The last tiles reach back, and share rows or columns with those before them; TMA fills what still lies outside of a
    and b with zeros and drops what lies outside of out.
    The roles are those of https://triton-lang.org/main/getting-started/tutorials/gluon/08-warp-specialization.html.
    """
    dtype: gl.constexpr = a_desc.dtype
    CONSUMERS: gl.constexpr = BLOCK_SIZE_M // 64
    # `wgmma` finds its operands here because no other buffer is as large. In slabs of 8 rows of 128 bytes, after which
    # the swizzle starts over.
    RING_SLABS: gl.constexpr = NUM_STAGES * (STAGE_ROWS // 8)
    ring = gl.allocate_shared_memory(dtype, [RING_SLABS, 8, BLOCK_SIZE_K], a_desc.layout)
    out_chunks = gl.allocate_shared_memory(dtype, [CONSUMERS * STAGING, 64, 64], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    # TMA completes these barriers through the asynchronous proxy.
    fence_async_shared()

    row, column = _tile_start(
        gl.program_id(0), M, N, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, SWAP
    )
    if PDL:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()
    # The first loads are under way while the partitions still start. A ring longer than K is not filled:
    # what lies behind the last step of the first tile belongs to the next tile.
    loads = (a_desc, b_desc, b_desc_2, b_desc_3, ring, full)
    for stage in range(gl.minimum(_cdiv(K, BLOCK_SIZE_K), NUM_STAGES)):
        _load_step(
            loads, row, column, stage, stage, BLOCK_SIZE_M, BLOCK_SIZE_N, A_IS_ROW_MAJOR, B_IS_NT
        )  # fmt: skip

    buffers = (out_desc, bias_ptr, ring, out_chunks, full, empty)
    # Tuples of constexprs have to be written out: in a variable they would be run-time values.
    # The numbers are warps and registers of the workers; the first partition gets what is left.
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (buffers, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, STEPS_IN_FLIGHT, A_IS_ROW_MAJOR, B_IS_NT, SWAP, 0)),
            (_loader, (loads, empty, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, A_IS_ROW_MAJOR, B_IS_NT, SWAP, PDL)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (buffers, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, STEPS_IN_FLIGHT, A_IS_ROW_MAJOR, B_IS_NT, SWAP, 0)),
            (_consumer, (buffers, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, STEPS_IN_FLIGHT, A_IS_ROW_MAJOR, B_IS_NT, SWAP, 1)),
            (_loader, (loads, empty, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, A_IS_ROW_MAJOR, B_IS_NT, SWAP, PDL)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (buffers, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, STEPS_IN_FLIGHT, A_IS_ROW_MAJOR, B_IS_NT, SWAP, 0)),
            (_consumer, (buffers, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, STEPS_IN_FLIGHT, A_IS_ROW_MAJOR, B_IS_NT, SWAP, 1)),
            (_consumer, (buffers, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, STEPS_IN_FLIGHT, A_IS_ROW_MAJOR, B_IS_NT, SWAP, 2)),
            (_loader, (loads, empty, M, N, K, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, A_IS_ROW_MAJOR, B_IS_NT, SWAP, PDL)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


@gluon.jit
def _loader(
    loads,
    empty,
    M,
    N,
    K,
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    A_IS_ROW_MAJOR: gl.constexpr,
    B_IS_NT: gl.constexpr,
    SWAP: gl.constexpr,
    PDL: gl.constexpr,
):
    """Load every step that the kernel did not load before the partitions started."""
    NUM_STAGES: gl.constexpr = empty.shape[0]
    BLOCK_SIZE_K: gl.constexpr = loads[4].shape[2]
    steps = _cdiv(K, BLOCK_SIZE_K)
    tiles = _cdiv(M, BLOCK_SIZE_M) * _cdiv(N, BLOCK_SIZE_N)
    loaded = gl.minimum(steps, NUM_STAGES)
    # A full ring starts over, at use 1 of its stages; a ring longer than K goes on, at use 0.
    stage = gl.where(loaded == NUM_STAGES, 0, loaded)
    phase = gl.where(loaded == NUM_STAGES, 0, 1)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _tile_start(tile, M, N, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, SWAP)
        for step in range(gl.where(tile == gl.program_id(0), loaded, 0), steps):
            mbarrier.wait(empty.index(stage), phase)
            _load_step(
                loads, row, column, step, stage, BLOCK_SIZE_M, BLOCK_SIZE_N, A_IS_ROW_MAJOR, B_IS_NT
            )  # fmt: skip
            stage, phase = _next_stage(stage, phase, NUM_STAGES)
    if PDL == 2:
        # Not before the last step was multiplied: the CTAs that come next take places in the order in which these
        # become free, and neighbours that do not end together would be torn apart.
        last = _stage_before(stage, NUM_STAGES)
        mbarrier.wait(empty.index(last), gl.where(stage == 0, phase, phase ^ 1))
        gdc_launch_dependents()


@gluon.jit
def _load_step(
    loads,
    row,
    column,
    step,
    stage,
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    A_IS_ROW_MAJOR: gl.constexpr,
    B_IS_NT: gl.constexpr,
):
    """Load one k step of the tile at `row` and `column` into a stage that is free: the rows of a, then b."""
    a_desc, b_desc, b_desc_2, b_desc_3, ring, full = loads
    SLABS: gl.constexpr = ring.shape[0] // full.shape[0]
    barrier = full.index(stage)
    mbarrier.expect(barrier, _step_bytes(BLOCK_SIZE_M, BLOCK_SIZE_N, B_IS_NT))
    k = step * ring.shape[2]
    slab = stage * SLABS
    for i in gl.static_range(BLOCK_SIZE_M // 64):
        _load_box(a_desc, row + i * 64, k, A_IS_ROW_MAJOR, barrier, ring, slab + i * 8, SLABS)
    slab += BLOCK_SIZE_M // 8
    BOXES: gl.constexpr = BLOCK_SIZE_N // 64 if B_IS_NT else _round_up(BLOCK_SIZE_N, 64) // 64
    for i in gl.static_range(BOXES):
        _load_box(b_desc, column + i * 64, k, B_IS_NT, barrier, ring, slab + i * 8, SLABS)
    if b_desc_2 is not None:
        _load_box(b_desc_2, column + BOXES * 64, k, B_IS_NT, barrier, ring, slab + BOXES * 8, SLABS)
    if b_desc_3 is not None:
        MORE: gl.constexpr = BOXES * 64 + b_desc_2.block_shape[0]
        _load_box(b_desc_3, column + MORE, k, B_IS_NT, barrier, ring, slab + MORE // 8, SLABS)


@gluon.jit
def _load_box(desc, start, k, ALONG_K: gl.constexpr, barrier, ring, slab, SLABS: gl.constexpr):
    """Load the rows or columns of an operand from `start` on, whose memory runs along k or along them."""
    box = _box(ring, slab, SLABS, desc.block_shape[0])
    if ALONG_K:
        _tma_load(desc, [start, k], barrier, box)
    else:
        _tma_load(desc, [k, start], barrier, box)


@gluon.jit
def _box(ring, slab, SLABS: gl.constexpr, ROWS: gl.constexpr):
    """ROWS of `ring`, whose stages have SLABS, from `slab` on."""
    if SLABS % 8 == 0:
        COUNT: gl.constexpr = ring.shape[0] * 8 // ROWS
        boxes = _view(ring, ring.dtype, [COUNT, ROWS, ring.shape[2]], ring.layout)
        box = boxes.index(slab * 8 // ROWS)
    else:
        box = _view(ring.index(slab), ring.dtype, [ROWS, ring.shape[2]], ring.layout)
    return box


@gluon.jit
def _consumer(
    buffers,
    M,
    N,
    K,
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    STEPS_IN_FLIGHT: gl.constexpr,
    A_IS_ROW_MAJOR: gl.constexpr,
    B_IS_NT: gl.constexpr,
    SWAP: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Multiply and store the rows of every tile that belong to warpgroup CONSUMER."""
    out_desc, bias_ptr, ring, out_chunks, full, empty = buffers
    NUM_STAGES: gl.constexpr = full.shape[0]
    SLABS: gl.constexpr = ring.shape[0] // NUM_STAGES
    CONSUMERS: gl.constexpr = BLOCK_SIZE_M // 64
    DTYPE: gl.constexpr = "bf16" if ring.dtype == gl.bfloat16 else "f16"
    # A wgmma has at most 256 columns; of two, the second begins with a box of 64 of a row-major b.
    PARTS: gl.constexpr = 1 if BLOCK_SIZE_N <= 256 else 2
    GROUPS_LEFT: gl.constexpr = 192 // 8
    first = first_operand()

    steps = _cdiv(K, ring.shape[2])
    tiles = _cdiv(M, BLOCK_SIZE_M) * _cdiv(N, BLOCK_SIZE_N)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _tile_start(tile, M, N, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M, SWAP)
        acc = wgmma_zeros(BLOCK_SIZE_N)
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            # 64 units of 16 bytes are a slab.
            a = first + (stage * SLABS + CONSUMER * 8) * 64
            b = first + (stage * SLABS + BLOCK_SIZE_M // 8) * 64
            if PARTS == 1:
                acc = wgmma(acc, a, b, A_IS_ROW_MAJOR, B_IS_NT, DTYPE)
            else:
                left = wgmma(acc[:GROUPS_LEFT], a, b, A_IS_ROW_MAJOR, B_IS_NT, DTYPE)
                right = wgmma(
                    acc[GROUPS_LEFT:], a, b + GROUPS_LEFT * 64, A_IS_ROW_MAJOR, B_IS_NT, DTYPE
                )
                acc = left + right
            acc = wgmma_wait(acc, STEPS_IN_FLIGHT * PARTS)
            if STEPS_IN_FLIGHT:
                # The step before this one is complete.
                before = _stage_before(stage, NUM_STAGES)
                mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
            else:
                mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = _next_stage(stage, phase, NUM_STAGES)
        if STEPS_IN_FLIGHT:
            acc = wgmma_wait(acc, 0)
            last = _stage_before(stage, NUM_STAGES)
            mbarrier.arrive(empty.index(last), count=1)
        row += CONSUMER * 64
        if tile + gl.num_programs(0) < tiles:
            _store(
                acc, out_desc, bias_ptr, row, column, M, N, out_chunks, ring, SLABS, CONSUMERS, CONSUMER, SWAP, 0
            )  # fmt: skip
        else:
            _store(
                acc, out_desc, bias_ptr, row, column, M, N, out_chunks, ring, SLABS, CONSUMERS, CONSUMER, SWAP, NUM_STAGES
            )  # fmt: skip
    # The shared memory of a CTA that has ended may go to another while TMA still reads it.
    tma.store_wait(0)


@gluon.jit
def _store(
    acc,
    out_desc,
    bias_ptr,
    row,
    column,
    M,
    N,
    out_chunks,
    ring,
    SLABS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CONSUMER: gl.constexpr,
    SWAP: gl.constexpr,
    FREE_STAGES: gl.constexpr,
):
    """Store the columns of a tile, by chunks of 64, through shared memory.

    After the last tile of a CTA all stages are free: a consumer then stages where its own rows of a were, and
    waits for no earlier store. Nobody else reads these, it has seen every load into them land, and
    the loader issues no more.
    """
    CHUNKS: gl.constexpr = (len(acc) + 7) // 8
    STAGING: gl.constexpr = out_chunks.shape[0] // CONSUMERS
    for i in gl.static_range(CHUNKS):
        if i < FREE_STAGES:
            chunk = _box(ring, i * SLABS + CONSUMER * 8, SLABS, 64)
        else:
            chunk = out_chunks.index(CONSUMER * STAGING + i % STAGING)
            # The store that last read this chunk is STAGING stores ago, except where a tile begins and the
            # tile before it has not ended with the last chunk.
            tma.store_wait((CHUNKS - 1) % STAGING if i == 0 else STAGING - 1)
        _store_chunk(
            acc, _chunk_column(i, len(acc)), out_desc, bias_ptr, row, column, M, N, chunk, SWAP
        )  # fmt: skip


@gluon.jit
def _store_chunk(
    acc, FIRST: gl.constexpr, out_desc, bias_ptr, row, column, M, N, chunk, SWAP: gl.constexpr
):
    """Store the 64 columns of ``acc`` from FIRST on through `chunk`."""
    values = wgmma_columns(acc, FIRST, 64)
    layout: gl.constexpr = wgmma_layout(64)
    column += FIRST
    if bias_ptr is not None:
        if SWAP:
            offs_m = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
            bias = gl.load(bias_ptr + offs_m, mask=offs_m < M, other=0.0)
            values += gl.expand_dims(bias.to(gl.float32), 1)
        else:
            offs_n = column + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
            bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
            values += gl.expand_dims(bias.to(gl.float32), 0)
    if SWAP:
        chunk.permute((1, 0)).store(values.to(chunk.dtype))
        fence_async_shared()
        _tma_store(out_desc, [column, row], chunk)
    else:
        chunk.store(values.to(chunk.dtype))
        fence_async_shared()
        _tma_store(out_desc, [row, column], chunk)


@gluon.constexpr_function
def _chunk_column(index, groups):
    """Where chunk ``index`` of an accumulator begins; the last ends with it, and may share columns with another."""
    return min(64 * index, 8 * groups - 64)


@gluon.constexpr_function
def _step_bytes(block_m, block_n, b_is_nt):
    """What TMA brings for a step. A row-major b comes in boxes of 64 columns, of which a tile may need less."""
    return (block_m + (block_n if b_is_nt else _round_up(block_n, 64))) * 128


@gluon.constexpr_function
def _round_up(x, multiple):
    return (x + multiple - 1) // multiple * multiple


@gluon.jit
def _tile_position(
    tile, M, N, BLOCK_SIZE_M: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, GROUP_SIZE_M: gl.constexpr
):
    """Row and column of a tile; GROUP_SIZE_M tile rows share the columns of b that are in L2."""
    num_pid_m = _cdiv(M, BLOCK_SIZE_M)
    num_pid_n = _cdiv(N, BLOCK_SIZE_N)
    # No group is taller than the matrix, so its tiles are never more than there are.
    group_size = gl.minimum(num_pid_m, GROUP_SIZE_M)
    tiles_in_group = group_size * num_pid_n
    first_pid_m = tile // tiles_in_group * group_size
    rows_in_group = gl.minimum(num_pid_m - first_pid_m, group_size)
    pid_m = first_pid_m + tile % tiles_in_group % rows_in_group
    pid_n = tile % tiles_in_group // rows_in_group
    return pid_m, pid_n


@gluon.jit
def _tile_start(
    tile,
    M,
    N,
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    SWAP: gl.constexpr,
):
    """The first row and column of a tile."""
    if SWAP:
        pid_n, pid_m = _tile_position(tile, N, M, BLOCK_SIZE_N, BLOCK_SIZE_M, GROUP_SIZE_M)
    else:
        pid_m, pid_n = _tile_position(tile, M, N, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M)
    return _reaching_back(pid_m, M, BLOCK_SIZE_M), _reaching_back(pid_n, N, BLOCK_SIZE_N)


@gluon.jit
def _reaching_back(pid, size, BLOCK: gl.constexpr):
    """As `raster.first_row`, of rows and columns: out has a multiple of 8 of these, and so has each tile."""
    return gl.minimum(pid * BLOCK, gl.maximum(size - BLOCK, 0))


@gluon.jit
def _next_stage(stage, phase, NUM_STAGES: gl.constexpr):
    wraps = stage == NUM_STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _stage_before(stage, NUM_STAGES: gl.constexpr):
    return gl.where(stage == 0, NUM_STAGES - 1, stage - 1)


@gluon.jit
def _cdiv(x, BLOCK: gl.constexpr):
    # (x - 1) // y + 1 rounds up without the overflow that x + y - 1 has near 2**31.
    return (x - 1) // BLOCK + 1
