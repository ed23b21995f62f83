"""Layers for `kernels.kernelize`: each lends its `forward` to the modules of a model."""

from __future__ import annotations

import torch

from .op import linear


class Linear(torch.nn.Module):
    """``input @ weight.t() + bias`` by `gemm`, in the place of a `torch.nn.Linear`.

    Shapes: input (..., K), weight (N, K), bias (N,) or None; returns (..., N). float16 or bfloat16, all alike;
    under autocast other floating-point dtypes are converted, as for `torch.nn.Linear`.
    Raises: ValueError when shapes, dtypes or devices do not match.
    """

    # What `kernels.kernelize` asks for each of its modes.
    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)
