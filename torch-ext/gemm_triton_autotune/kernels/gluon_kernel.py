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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .dependent_launch import gdc_launch_dependents, gdc_wait

# Triton 3.8 renamed the two copies and 3.9 the view; each name is looked up once, for all versions.
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_view = (
    gl.shared_memory_descriptor.reinterpret
    if hasattr(gl.shared_memory_descriptor, "reinterpret")
    else gl.shared_memory_descriptor._reinterpret
)


# One compile serves every size: nothing here gains from knowing that one is divisible.
@gluon.jit(do_not_specialize=["M", "N", "K", "stride_bk", "stride_bn"])
def gluon_gemm_kernel(
    # TMA descriptors: a in boxes of one consumer's rows, b of one box of columns, out of one chunk
    a_desc,
    b_desc,
    out_desc,
    # b, to be prefetched, or None
    b_ptr,
    # (N,), or None
    bias_ptr,
    # shape
    M,
    N,
    K,
    # strides in elements
    stride_bk,
    stride_bn,
    # tile
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    BLOCK_SIZE_K: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    # how the tile is shared out: its columns are PART_1 + PART_2 + PART_3, powers of two from wide to
    # narrow, of which the last two or the last may be 0
    CONSUMERS: gl.constexpr,
    PART_1: gl.constexpr,
    PART_2: gl.constexpr,
    PART_3: gl.constexpr,
    STAGING: gl.constexpr,
    A_IN_REGISTERS: gl.constexpr,
    B_IS_NT: gl.constexpr,
    PDL: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """out = a @ b + bias; a (M, K) row-major, b (K, N) row-major or (if B_IS_NT) column-major, out (M, N).

    A CTA computes the BLOCK_SIZE_M x BLOCK_SIZE_N tiles pid, pid + CTAs, …: one warp loads the k steps of
    all of them into a ring, across tile borders, and CONSUMERS warpgroups multiply, each its own rows of
    the tile. TMA fills what lies outside of a and b with zeros and drops what lies outside of out.
    The roles are those of https://triton-lang.org/main/getting-started/tutorials/gluon/08-warp-specialization.html.
    """
    dtype: gl.constexpr = a_desc.dtype
    ROWS: gl.constexpr = BLOCK_SIZE_M // CONSUMERS
    BOX: gl.constexpr = b_desc.block_shape[0 if B_IS_NT else 1]
    CHUNK: gl.constexpr = out_desc.block_shape[1]

    a_slots = gl.allocate_shared_memory(
        dtype, [NUM_STAGES * CONSUMERS, ROWS, BLOCK_SIZE_K], a_desc.layout
    )
    b1_boxes = _allocate_boxes(b_desc, NUM_STAGES * (PART_1 // BOX))
    b2_boxes = _allocate_boxes(b_desc, NUM_STAGES * (PART_2 // BOX)) if PART_2 > 0 else b1_boxes
    b3_boxes = _allocate_boxes(b_desc, NUM_STAGES * (PART_3 // BOX)) if PART_3 > 0 else b1_boxes
    out_chunks = gl.allocate_shared_memory(
        dtype, [CONSUMERS * STAGING, ROWS, CHUNK], out_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    # TMA completes these barriers through the asynchronous proxy.
    fence_async_shared()

    b1 = _operands(b1_boxes, NUM_STAGES, PART_1, B_IS_NT)
    b2 = _operands(b2_boxes, NUM_STAGES, PART_2 if PART_2 > 0 else PART_1, B_IS_NT)
    b3 = _operands(b3_boxes, NUM_STAGES, PART_3 if PART_3 > 0 else PART_1, B_IS_NT)

    pid_m, pid_n = _tile_position(gl.program_id(0), M, N, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M)
    if PREFETCH > 0:
        # CTAs that need the same columns of b share out its steps.
        for i in gl.static_range(PREFETCH):
            step = (pid_m * PREFETCH + i) % _cdiv(K, BLOCK_SIZE_K)
            _prefetch_b(
                b_ptr, pid_n * BLOCK_SIZE_N, step * BLOCK_SIZE_K, N, K, stride_bk, stride_bn, BLOCK_SIZE_N, B_IS_NT
            )  # fmt: skip
    if PDL:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()
    # The first loads are under way while the partitions still start. A ring longer than K is not filled:
    # what lies behind the last step of the first tile belongs to the next tile.
    loads = (a_desc, b_desc, a_slots, b1_boxes, b2_boxes, b3_boxes, full)
    for stage in range(gl.minimum(_cdiv(K, BLOCK_SIZE_K), NUM_STAGES)):
        _load_step(
            loads,
            _first_row(pid_m, M, BLOCK_SIZE_M),
            pid_n,
            stage,
            stage,
            PART_1,
            PART_2,
            PART_3,
            B_IS_NT,
        )

    # Tuples of constexprs have to be written out: in a variable they would be run-time values.
    buffers = (out_desc, a_slots, b1, b2, b3, out_chunks, full, empty)
    # The numbers are warps and registers of the workers; the first partition gets what is left.
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (buffers, bias_ptr, M, N, K, PART_1, PART_2, PART_3, GROUP_SIZE_M, A_IN_REGISTERS, B_IS_NT, 0)),
            (_loader, (loads, empty, M, N, K, PART_1, PART_2, PART_3, GROUP_SIZE_M, B_IS_NT, PDL)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (buffers, bias_ptr, M, N, K, PART_1, PART_2, PART_3, GROUP_SIZE_M, A_IN_REGISTERS, B_IS_NT, 0)),
            (_consumer, (buffers, bias_ptr, M, N, K, PART_1, PART_2, PART_3, GROUP_SIZE_M, A_IN_REGISTERS, B_IS_NT, 1)),
            (_loader, (loads, empty, M, N, K, PART_1, PART_2, PART_3, GROUP_SIZE_M, B_IS_NT, PDL)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (buffers, bias_ptr, M, N, K, PART_1, PART_2, PART_3, GROUP_SIZE_M, A_IN_REGISTERS, B_IS_NT, 0)),
            (_consumer, (buffers, bias_ptr, M, N, K, PART_1, PART_2, PART_3, GROUP_SIZE_M, A_IN_REGISTERS, B_IS_NT, 1)),
            (_consumer, (buffers, bias_ptr, M, N, K, PART_1, PART_2, PART_3, GROUP_SIZE_M, A_IN_REGISTERS, B_IS_NT, 2)),
            (_loader, (loads, empty, M, N, K, PART_1, PART_2, PART_3, GROUP_SIZE_M, B_IS_NT, PDL)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


@gluon.jit
def _prefetch_b(
    b_ptr, first_n, first_k, N, K, stride_bk, stride_bn, BLOCK_SIZE_N: gl.constexpr, B_IS_NT: gl.constexpr
):  # fmt: skip
    """Bring the 64 x BLOCK_SIZE_N part of b at (first_k, first_n) into L2, by lines of 64 elements."""
    # A line for each thread of the first partition.
    LINES: gl.constexpr = 128
    for first in gl.static_range(0, _round_up(BLOCK_SIZE_N, 64), LINES):
        offs = first + gl.arange(0, LINES, layout=gl.BlockedLayout([1], [32], [4], [0]))
        if B_IS_NT:
            offs_n = first_n + offs
            offs_k = first_k + offs * 0
        else:
            offs_n = first_n + offs // 64 * 64
            offs_k = first_k + offs % 64
        offs_n = gl.minimum(offs_n, N - 1).to(gl.int64)
        offs_k = gl.minimum(offs_k, K - 1).to(gl.int64)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [b_ptr + offs_n * stride_bn + offs_k * stride_bk],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _loader(
    loads,
    empty,
    M,
    N,
    K,
    PART_1: gl.constexpr,
    PART_2: gl.constexpr,
    PART_3: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    B_IS_NT: gl.constexpr,
    PDL: gl.constexpr,
):
    """Load every step that the kernel did not load before the partitions started."""
    a_slots = loads[2]
    NUM_STAGES: gl.constexpr = empty.shape[0]
    BLOCK_SIZE_M: gl.constexpr = a_slots.shape[0] // NUM_STAGES * a_slots.shape[1]
    BLOCK_SIZE_N: gl.constexpr = PART_1 + PART_2 + PART_3
    BLOCK_SIZE_K: gl.constexpr = a_slots.shape[2]
    steps = _cdiv(K, BLOCK_SIZE_K)
    tiles = _cdiv(M, BLOCK_SIZE_M) * _cdiv(N, BLOCK_SIZE_N)
    loaded = gl.minimum(steps, NUM_STAGES)
    # A full ring starts over, at use 1 of its stages; a ring longer than K goes on, at use 0.
    stage = gl.where(loaded == NUM_STAGES, 0, loaded)
    phase = gl.where(loaded == NUM_STAGES, 0, 1)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pid_m, pid_n = _tile_position(tile, M, N, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M)
        row = _first_row(pid_m, M, BLOCK_SIZE_M)
        for step in range(gl.where(tile == gl.program_id(0), loaded, 0), steps):
            mbarrier.wait(empty.index(stage), phase)
            _load_step(loads, row, pid_n, step, stage, PART_1, PART_2, PART_3, B_IS_NT)
            stage, phase = _next_stage(stage, phase, NUM_STAGES)
    if PDL == 2:
        gdc_launch_dependents()


@gluon.jit
def _load_step(
    loads, row, pid_n, step, stage, PART_1: gl.constexpr, PART_2: gl.constexpr, PART_3: gl.constexpr, B_IS_NT: gl.constexpr
):  # fmt: skip
    """Load one k step of the tile at `row` and `pid_n` into a stage that is free."""
    a_desc, b_desc, a_slots, b1_boxes, b2_boxes, b3_boxes, full = loads
    CONSUMERS: gl.constexpr = a_slots.shape[0] // full.shape[0]
    ROWS: gl.constexpr = a_slots.shape[1]
    BLOCK_SIZE_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_SIZE_N: gl.constexpr = PART_1 + PART_2 + PART_3
    BLOCK_SIZE_K: gl.constexpr = a_slots.shape[2]
    BOX: gl.constexpr = b_desc.block_shape[0 if B_IS_NT else 1]
    BOXES_1: gl.constexpr = PART_1 // BOX
    BOXES_2: gl.constexpr = PART_2 // BOX
    BOXES_3: gl.constexpr = PART_3 // BOX
    barrier = full.index(stage)
    mbarrier.expect(barrier, (BLOCK_SIZE_M + BLOCK_SIZE_N) * BLOCK_SIZE_K * 2)
    k = step * BLOCK_SIZE_K
    for i in gl.static_range(CONSUMERS):
        a_slot = a_slots.index(stage * CONSUMERS + i)
        _tma_load(a_desc, [row + i * ROWS, k], barrier, a_slot)
    for i in gl.static_range(BLOCK_SIZE_N // BOX):
        if i < BOXES_1:
            b_box = b1_boxes.index(stage * BOXES_1 + i)
        elif i < BOXES_1 + BOXES_2:
            b_box = b2_boxes.index(stage * BOXES_2 + i - BOXES_1)
        else:
            b_box = b3_boxes.index(stage * BOXES_3 + i - BOXES_1 - BOXES_2)
        n = pid_n * BLOCK_SIZE_N + i * BOX
        if B_IS_NT:
            _tma_load(b_desc, [n, k], barrier, b_box)
        else:
            _tma_load(b_desc, [k, n], barrier, b_box)


@gluon.jit
def _consumer(
    buffers,
    bias_ptr,
    M,
    N,
    K,
    PART_1: gl.constexpr,
    PART_2: gl.constexpr,
    PART_3: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    A_IN_REGISTERS: gl.constexpr,
    B_IS_NT: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Multiply and store the rows of every tile that belong to warpgroup CONSUMER."""
    out_desc, a_slots, b1, b2, b3, out_chunks, full, empty = buffers
    NUM_STAGES: gl.constexpr = full.shape[0]
    CONSUMERS: gl.constexpr = a_slots.shape[0] // NUM_STAGES
    ROWS: gl.constexpr = a_slots.shape[1]
    BLOCK_SIZE_M: gl.constexpr = CONSUMERS * ROWS
    BLOCK_SIZE_N: gl.constexpr = PART_1 + PART_2 + PART_3
    CHUNK: gl.constexpr = out_chunks.shape[2]
    layout_1: gl.constexpr = _wgmma_layout(PART_1)
    layout_2: gl.constexpr = _wgmma_layout(PART_2 if PART_2 > 0 else PART_1)
    layout_3: gl.constexpr = _wgmma_layout(PART_3 if PART_3 > 0 else PART_1)
    PARTS: gl.constexpr = 3 if PART_3 > 0 else (2 if PART_2 > 0 else 1)
    IN_FLIGHT: gl.constexpr = 0 if A_IN_REGISTERS else PARTS

    steps = _cdiv(K, a_slots.shape[2])
    tiles = _cdiv(M, BLOCK_SIZE_M) * _cdiv(N, BLOCK_SIZE_N)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        pid_m, pid_n = _tile_position(tile, M, N, BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M)
        row = _first_row(pid_m, M, BLOCK_SIZE_M) + CONSUMER * ROWS
        column = pid_n * BLOCK_SIZE_N
        acc_1 = gl.zeros((ROWS, PART_1), gl.float32, layout_1)
        if PART_2 > 0:
            acc_2 = gl.zeros((ROWS, PART_2), gl.float32, layout_2)
        if PART_3 > 0:
            acc_3 = gl.zeros((ROWS, PART_3), gl.float32, layout_3)
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = a_slots.index(stage * CONSUMERS + CONSUMER)
            if A_IN_REGISTERS:
                a_1 = a.load(gl.DotOperandLayout(operand_index=0, parent=layout_1, k_width=2))
            else:
                a_1 = a
            acc_1 = warpgroup_mma(a_1, _operand(b1, stage, B_IS_NT), acc_1, is_async=True)
            if PART_2 > 0:
                a_2 = _like(a_1, layout_2, A_IN_REGISTERS)
                acc_2 = warpgroup_mma(a_2, _operand(b2, stage, B_IS_NT), acc_2, is_async=True)
            if PART_3 > 0:
                a_3 = _like(a_1, layout_3, A_IN_REGISTERS)
                acc_3 = warpgroup_mma(a_3, _operand(b3, stage, B_IS_NT), acc_3, is_async=True)
            # With a in shared memory this step stays in flight, and the one before it is complete. With a
            # in registers, which the next step overwrites, nothing may stay in flight.
            if PARTS == 3:
                acc_1, acc_2, acc_3 = warpgroup_mma_wait(IN_FLIGHT, (acc_1, acc_2, acc_3))
            elif PARTS == 2:
                acc_1, acc_2 = warpgroup_mma_wait(IN_FLIGHT, (acc_1, acc_2))
            else:
                acc_1 = warpgroup_mma_wait(IN_FLIGHT, (acc_1,))
            if A_IN_REGISTERS:
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                before = gl.where(stage == 0, NUM_STAGES - 1, stage - 1)
                mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
            stage, phase = _next_stage(stage, phase, NUM_STAGES)
        if not A_IN_REGISTERS:
            if PARTS == 3:
                acc_1, acc_2, acc_3 = warpgroup_mma_wait(0, (acc_1, acc_2, acc_3))
            elif PARTS == 2:
                acc_1, acc_2 = warpgroup_mma_wait(0, (acc_1, acc_2))
            else:
                acc_1 = warpgroup_mma_wait(0, (acc_1,))
            last = gl.where(stage == 0, NUM_STAGES - 1, stage - 1)
            mbarrier.arrive(empty.index(last), count=1)
        chunks = _chunks(acc_1, CHUNK)
        if PART_2 > 0:
            chunks = chunks + _chunks(acc_2, CHUNK)
        if PART_3 > 0:
            chunks = chunks + _chunks(acc_3, CHUNK)
        if tile + gl.num_programs(0) < tiles:
            _store_chunks(
                chunks,
                out_desc,
                bias_ptr,
                row,
                column,
                N,
                out_chunks,
                a_slots,
                CONSUMER,
                CONSUMERS,
                0,
            )
        else:
            _store_chunks(
                chunks,
                out_desc,
                bias_ptr,
                row,
                column,
                N,
                out_chunks,
                a_slots,
                CONSUMER,
                CONSUMERS,
                NUM_STAGES,
            )
    # The shared memory of a CTA that has ended may go to another while TMA still reads it.
    tma.store_wait(0)


@gluon.jit
def _store_chunks(
    chunks,
    out_desc,
    bias_ptr,
    row,
    column,
    N,
    out_chunks,
    a_slots,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    FREE_STAGES: gl.constexpr,
):
    """Store the columns of a tile, chunk by chunk, through shared memory.

    After the last tile of a CTA all stages are free: a consumer then stages in its own slots of a, and
    waits for no earlier store. Nobody else reads those slots, it has seen every load into them land, and
    the loader issues no more.
    """
    CHUNK: gl.constexpr = out_chunks.shape[2]
    STAGING: gl.constexpr = out_chunks.shape[0] // CONSUMERS
    # A chunk of out is as wide as a slot of a, or a fraction of it.
    IN_SLOT: gl.constexpr = a_slots.shape[2] // CHUNK
    free_chunks = _view(
        a_slots,
        out_chunks.dtype,
        [a_slots.shape[0] * IN_SLOT, a_slots.shape[1], CHUNK],
        out_chunks.layout,
    )
    for i in gl.static_range(len(chunks)):
        if i < FREE_STAGES * IN_SLOT:
            slot = i // IN_SLOT * CONSUMERS + CONSUMER
            chunk = free_chunks.index(slot * IN_SLOT + i % IN_SLOT)
        else:
            chunk = out_chunks.index(CONSUMER * STAGING + i % STAGING)
            # The store that last read this chunk is STAGING stores ago, except where a tile begins and the
            # tile before it has not ended with the last chunk.
            tma.store_wait((len(chunks) - 1) % STAGING if i == 0 else STAGING - 1)
        values = _add_bias(chunks[i], bias_ptr, column + i * CHUNK, N)
        chunk.store(values.to(out_chunks.dtype))
        fence_async_shared()
        _tma_store(out_desc, [row, column + i * CHUNK], chunk)


@gluon.jit
def _add_bias(chunk, bias_ptr, column, N):
    """``chunk`` of the columns from ``column`` on, with the bias of these added in float32."""
    if bias_ptr is not None:
        CHUNK: gl.constexpr = chunk.shape[1]
        offs_n = column + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, _wgmma_layout(CHUNK)))
        bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        chunk += gl.expand_dims(bias.to(gl.float32), 0)
    return chunk


@gluon.jit
def _allocate_boxes(b_desc, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(
        b_desc.dtype, [COUNT, b_desc.block_shape[0], b_desc.block_shape[1]], b_desc.layout
    )


@gluon.jit
def _like(a, parent: gl.constexpr, A_IN_REGISTERS: gl.constexpr):
    """``a`` for another wgmma: the same registers, since a fragment of a does not depend on the width of b."""
    if A_IN_REGISTERS:
        layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=parent, k_width=2)
        a = gl.convert_layout(a, layout, assert_trivial=True)
    return a


@gluon.jit
def _operands(boxes, NUM_STAGES: gl.constexpr, PART: gl.constexpr, B_IS_NT: gl.constexpr):
    """``boxes`` as one operand of PART columns for each stage: the boxes of a stage are adjacent."""
    if B_IS_NT:
        operands = _view(boxes, boxes.dtype, [NUM_STAGES, PART, boxes.shape[2]], boxes.layout)
    else:
        operands = _view(boxes, boxes.dtype, [NUM_STAGES, boxes.shape[1], PART], boxes.layout)
    return operands


@gluon.jit
def _operand(b, stage, B_IS_NT: gl.constexpr):
    return b.index(stage).permute((1, 0)) if B_IS_NT else b.index(stage)


@gluon.constexpr_function
def _round_up(x, multiple):
    return (x + multiple - 1) // multiple * multiple


@gluon.constexpr_function
def _wgmma_layout(columns):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def _chunks(acc, CHUNK: gl.constexpr):
    """The columns of an accumulator in chunks; no value changes its register."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    if COLUMNS > CHUNK:
        halves = gl.permute(gl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = gl.split(halves)
        chunks = _chunks(left, CHUNK) + _chunks(right, CHUNK)
    else:
        layout: gl.constexpr = _wgmma_layout(CHUNK)
        chunks = (gl.convert_layout(acc, layout, assert_trivial=True),)
    return chunks


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
def _first_row(pid_m, M, BLOCK_SIZE_M: gl.constexpr):
    """`raster.first_row`, in Gluon."""
    return gl.minimum(pid_m * BLOCK_SIZE_M, gl.maximum(M - BLOCK_SIZE_M, 0))


@gluon.jit
def _next_stage(stage, phase, NUM_STAGES: gl.constexpr):
    wraps = stage == NUM_STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _cdiv(x, BLOCK: gl.constexpr):
    # (x - 1) // y + 1 rounds up without the overflow that x + y - 1 has near 2**31.
    return (x - 1) // BLOCK + 1
