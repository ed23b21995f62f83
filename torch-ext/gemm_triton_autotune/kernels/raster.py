"""The order in which the programs of a launch, or the rounds of a persistent one, take the tiles of out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_row(pid_m, M, BLOCK_SIZE_M: tl.constexpr):
    """Where tile row ``pid_m`` begins: the last one as far back as it takes not to reach beyond M.

    What it shares with the one before it is computed and stored by both, with the same bits. TMA takes longer for a
    box that is partly outside. Not for rows that are neighbours in memory, where a box begins at a multiple of 16 bytes
    (`gluon`'s columns do: theirs and all widths are multiples of 8).
    """
    return tl.minimum(pid_m * BLOCK_SIZE_M, tl.maximum(M - BLOCK_SIZE_M, 0))


@triton.jit
def grouped_tile(index, num_pid_m, num_pid_n, GROUP_SIZE_M: tl.constexpr):
    """The row and column, in tiles, of tile number ``index``.

    GROUP_SIZE_M tile rows share the columns of b that are in L2, as in Triton's tutorial 03
    (https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html).
    """
    # No group is taller than the matrix, so its tiles are never more than there are: no overflow.
    group_size = tl.minimum(num_pid_m, GROUP_SIZE_M)
    tiles_in_group = group_size * num_pid_n
    first_pid_m = index // tiles_in_group * group_size
    rows_in_group = tl.minimum(num_pid_m - first_pid_m, group_size)
    pid_m = first_pid_m + index % tiles_in_group % rows_in_group
    pid_n = index % tiles_in_group // rows_in_group
    return pid_m, pid_n
