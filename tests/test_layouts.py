"""Any shape, strides and offsets of each operand: the product is right, and nothing else is touched."""

from typing import NamedTuple

import kernels
import torch

from .drawn import examples, hypothesis
from .exact import assert_product
from .test_config import GOOD

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

given, st = hypothesis.given, hypothesis.strategies

SIZES = st.sampled_from([1, 2, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129]) | st.integers(0, 200)
SENTINEL = 7.25
# The default and, past look-up, one configuration of each family and tile height.
CONFIGS = [
    None,
    *{
        (c.get("kernel"), c["BLOCK_SIZE_M"]): c for c in gemm_kernel.tuning.candidate_configs()
    }.values(),
]


class Layout(NamedTuple):
    """Where the elements of a matrix lie in its buffer, in elements."""

    transposed: bool  # columns are the outer dimension
    step: int  # between elements of the inner dimension
    padding: int  # behind each row of the outer dimension
    offset: int  # before the first element
    expanded: str  # dimensions of stride 0

    def strides(self, rows, columns):
        inner = rows if self.transposed else columns
        outer_stride = inner * self.step + self.padding
        strides = (self.step, outer_stride) if self.transposed else (outer_stride, self.step)
        return tuple(0 if name in self.expanded else stride for name, stride in zip("rc", strides))


def layouts(*expanded):
    return st.builds(
        Layout,
        transposed=st.booleans(),
        step=st.sampled_from([1, 1, 1, 2, 3]),
        padding=st.sampled_from([0, 0, 1, 8, 13]),
        offset=st.sampled_from([0, 0, 1, 3, 8]),
        expanded=st.sampled_from(["", *expanded]),
    )


def make(layout, rows, columns, fill, dtype, device):
    """A buffer full of ``fill``, with room behind, and the view of it that ``layout`` describes."""
    strides = layout.strides(rows, columns)
    last = max(rows - 1, 0) * strides[0] + max(columns - 1, 0) * strides[1]
    buffer = torch.full((layout.offset + last + 20,), fill, dtype=dtype, device=device)
    return buffer, buffer.as_strided((rows, columns), strides, layout.offset)


def bits(tensor):
    return tensor.view(torch.int16)


@given(
    shape=st.tuples(SIZES, SIZES, SIZES),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    a_layout=layouts("r", "c", "rc"),
    b_layout=layouts("r", "c", "rc"),
    out_layout=layouts(),
    config=st.sampled_from(CONFIGS),
)
@examples(120)
def test_any_layout_is_right(device, shape, dtype, a_layout, b_layout, out_layout, config):
    M, N, K = shape
    # NaN around the operands: an element read from there would show.
    a_buffer, a = make(a_layout, M, K, torch.nan, dtype, device)
    b_buffer, b = make(b_layout, K, N, torch.nan, dtype, device)
    for operand in (a, b):
        sizes = [
            1 if stride == 0 else size for size, stride in zip(operand.shape, operand.stride())
        ]
        operand.as_strided(sizes, operand.stride()).normal_()
    out_buffer, out = make(out_layout, M, N, SENTINEL, dtype, device)
    outside = torch.ones_like(out_buffer, dtype=torch.bool)
    outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
    before = a_buffer.clone(), b_buffer.clone(), out_buffer.clone()
    out.fill_(torch.nan)

    kernel = gemm_kernel.kernels
    if config is None or 0 in shape or _problem(config, a, b, out):
        assert gemm_kernel.gemm(a, b, out=out) is out
        assert_product(gemm_kernel.gemm(a, b), a, b)
    else:
        kernel.launch_gemm_kernel(a, b, out, config)

    assert_product(out, a, b)
    assert torch.equal(bits(a_buffer), bits(before[0]))
    assert torch.equal(bits(b_buffer), bits(before[1]))
    assert torch.equal(bits(out_buffer)[outside], bits(before[2])[outside])


def _problem(config, a, b, out):
    properties = gemm_kernel.device.device_properties(a.device)
    problem = gemm_kernel.kernels.config_problem(config, properties)
    return problem or gemm_kernel.kernels.operand_problem(config, a, b, out)


def test_the_draws_reach_every_family():
    families = {(config or GOOD).get("kernel", "tiled") for config in CONFIGS}
    assert families == set(gemm_kernel.kernels.FAMILIES)
