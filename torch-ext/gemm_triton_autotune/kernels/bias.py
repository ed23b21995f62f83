"""The bias in an epilogue: added to the accumulator in float32, so that out is rounded once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_bias(bias_ptr, offs_n, N):
    """The bias of columns ``offs_n`` of out, in float32."""
    return tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
