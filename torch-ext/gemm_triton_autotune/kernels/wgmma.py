"""wgmma of any width, in Gluon: 64 x 64 of a times 64 x COLUMNS of b, where COLUMNS is a multiple of 8 up to 256.

Gluon's own `warpgroup_mma` takes tensors, whose sides are powers of two, and so has few of the widths of the
instruction, PTX's `wgmma.mma_async`. Here an accumulator is a tuple of tensors of 64 x 8, one for each 8
columns, whose registers are those in which the instruction leaves these columns, and the instruction is written out.

It is told where its operands lie in shared memory, which Gluon does not tell. So they have to be in the largest
buffer of the kernel: Triton allocates that one first, at the start of shared memory. No release promises this; a test
of `tests/test_kernel_gluon.py` asks each one for it, and no release that was not asked is used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def wgmma_layout(columns):
    """The registers of a tensor of 64 rows that wgmma computes."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def wgmma_zeros(COLUMNS: gl.constexpr):
    """An accumulator of 64 x COLUMNS."""
    layout: gl.constexpr = wgmma_layout(8)
    acc = (gl.zeros((64, 8), gl.float32, layout),)
    for _ in gl.static_range(COLUMNS // 8 - 1):
        acc = acc + (gl.zeros((64, 8), gl.float32, layout),)
    return acc


@gluon.jit
def first_operand():
    """PTX's matrix descriptor of an operand at the start of the largest buffer, in swizzled rows of 128 bytes.

    That of an operand which begins x bytes later, a multiple of 1024, is x // 16 more. Its fields, in units of 16
    bytes: the address; from bit 16 on the distance from 64 columns of a row-major b to the next 64, which the other
    operands do not have; from bit 32 on that from 8 rows to the next 8; and the swizzle, from bit 62 on.
    """
    address = gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )
    return (address.to(gl.int64) >> 4) | (8192 // 16 << 16) | (1024 // 16 << 32) | (1 << 62)


@gluon.jit
def wgmma(acc, a, b, A_IS_ROW_MAJOR: gl.constexpr, B_IS_NT: gl.constexpr, DTYPE: gl.constexpr):
    """``acc`` plus the product of 64 x 64 of a and 64 rows of b, as wide as ``acc``, once `wgmma_wait` was called.

    a, b: descriptors of rows along k, or (a, if not A_IS_ROW_MAJOR) along m, or (b, if not B_IS_NT) along n.
    """
    GROUPS: gl.constexpr = len(acc)
    layout: gl.constexpr = wgmma_layout(8)
    a_and_b = (gl.full((64, 8), a, gl.int64, layout), gl.full((64, 8), b, gl.int64, layout))
    return gl.inline_asm_elementwise(
        _wgmma_assembly(GROUPS, A_IS_ROW_MAJOR, B_IS_NT, DTYPE),
        _in_place(GROUPS, True),
        acc + a_and_b,
        dtype=_float32(GROUPS),
        is_pure=False,
        pack=4,
    )


@gluon.jit
def wgmma_wait(acc, IN_FLIGHT: gl.constexpr):
    """``acc`` when all but the last IN_FLIGHT calls of `wgmma` are complete."""
    return gl.inline_asm_elementwise(
        _wait_assembly(IN_FLIGHT),
        _in_place(len(acc), False),
        acc,
        dtype=_float32(len(acc)),
        is_pure=False,
        pack=4,
    )


@gluon.jit
def wgmma_columns(acc, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """The COLUMNS of ``acc`` from FIRST on, a power of two, as one tensor; no value changes its register."""
    if COLUMNS == 8:
        columns = acc[FIRST // 8]
    else:
        left = wgmma_columns(acc, FIRST, COLUMNS // 2)
        right = wgmma_columns(acc, FIRST + COLUMNS // 2, COLUMNS // 2)
        both = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (64, COLUMNS))
        layout: gl.constexpr = wgmma_layout(COLUMNS)
        columns = gl.convert_layout(both, layout, assert_trivial=True)
    return columns


@gluon.constexpr_function
def _wgmma_assembly(groups, a_is_row_major, b_is_nt, dtype):
    # Each thread has 4 registers of each group, and 4 copies of each descriptor.
    registers = 4 * groups
    acc = ", ".join(f"${i}" for i in range(registers))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{8 * groups}k16.f32.{dtype}.{dtype}"
    # 16 of k are 32 bytes of a row, or 16 rows of 128 bytes.
    a_step, b_step = (
        32 // 16 if along_k else 16 * 128 // 16 for along_k in (a_is_row_major, b_is_nt)
    )
    transposed = f"{int(not a_is_row_major)}, {int(not b_is_nt)}"
    lines = [
        ".reg .b64 a, b;",
        ".reg .pred accumulate;",
        "setp.eq.u32 accumulate, 0, 0;",
        f"mov.b64 a, ${2 * registers};",
        f"mov.b64 b, ${2 * registers + 4};",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(4):
        if step > 0:
            lines += [f"add.s64 a, a, {a_step};", f"add.s64 b, b, {b_step};"]
        lines.append(f"{instruction} {{{acc}}}, a, b, accumulate, 1, 1, {transposed};")
    lines.append("wgmma.commit_group.sync.aligned;")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _wait_assembly(in_flight):
    return f"wgmma.wait_group.sync.aligned {in_flight};"


@gluon.constexpr_function
def _in_place(groups, has_descriptors):
    """Constraints of inline assembly that changes an accumulator, and may read two descriptors."""
    results = ["=f"] * (4 * groups)
    operands = [str(register) for register in range(4 * groups)]
    return ",".join(results + operands + (["l"] * 8 if has_descriptors else []))


@gluon.constexpr_function
def _float32(groups):
    return tuple(gl.float32 for _ in range(groups))
