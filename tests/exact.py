"""Comparison with the exact product: one bound that calibrates itself, for every shape and dtype."""

from __future__ import annotations

import torch


def assert_product(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    case: object = "",
    bias: torch.Tensor | None = None,
) -> None:
    """``out`` differs from ``a @ b + bias`` in float64 by at most twice what rounding to its dtype costs.

    The bound is QuACK's, made independent of cuBLAS: no table of tolerances, and an accumulator of half
    precision does not pass it.
    """
    exact = a.double() @ b.double()
    if bias is not None:
        exact += bias.double()
    assert out.shape == exact.shape
    if exact.numel() == 0:
        return
    rounding = (exact.to(out.dtype).double() - exact).abs().max().item()
    # Tensor cores cut the sum to float32 with each 16 products or so: seen where K is in the 100,000s.
    accumulation = a.shape[1] / 16 * 2**-24 * exact.abs().max().item()
    error = (out.double() - exact).abs().max().item()
    assert error <= 2 * rounding + accumulation + 1e-5, (
        f"error {error:.3e}, rounding {rounding:.3e} {case}"
    )
