"""`warmup`: compile, before traffic comes, all that calls with a weight can get."""

from __future__ import annotations

import torch

from . import measure, tuning
from .arguments import check_device, check_dtype, check_problem
from .config import Config
from .device import resolve_device

# The most rows that a warm-up runs, and looks configurations up for.
_WARMED_ROWS = 8192


def _rows_of_each(N: int, K: int, device: torch.device, layout: str) -> list[int]:
    """For each configuration that calls can get, the fewest rows that do."""
    first: dict[str, int] = {}
    for M in range(1, _WARMED_ROWS + 1):
        first.setdefault(str(tuning.get_config(M, N, K, device, layout)), M)
    return list(first.values())


def warmup(
    N: int,
    K: int,
    device: torch.device | None = None,
    layout: str = "NN",
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
) -> list[Config]:
    """Compile every configuration that calls with a weight of this shape can get, before they come.

    device: None is the current one.
    layout: "NT" where b is the transpose of an (N, K) weight, as in ``gemm(x, weight.t())`` and nn.Linear; "NN" for a
    row-major b (K, N).
    bias: for calls that have one, which are other kernels than those that have none.
    Runs one product for each, of as many rows as its M and at most 8192; calls with more rows may meet one
    more default.
    Returns: the configurations, in order of M.
    Raises: ValueError for arguments out of range; torch.OutOfMemoryError if they do not fit.
    """
    device = resolve_device(device)
    check_problem((), N, K, layout)
    check_device("warmup", device)
    check_dtype("warmup", dtype)
    b = measure.make_weight(N, K, dtype, layout, device)
    bias_row = torch.zeros(N, dtype=dtype, device=device) if bias else None
    tuned = tuning._load_tuned_configs(N, K, device, layout) or {}
    Ms = {*_rows_of_each(N, K, device, layout), *(M for M in tuned if M > _WARMED_ROWS)}
    launched: list[Config] = []
    for M in sorted(Ms):
        # A file may have any M; more rows than these are only more tiles of the same kernel.
        a = torch.zeros(min(M, _WARMED_ROWS), K, dtype=dtype, device=device)
        out = a.new_empty(a.shape[0], N)
        if tuning.get_config(M, N, K, device, layout) not in launched:
            config = tuning.launch_tuned(a, b, out, layout, M, bias_row)
            if config not in launched:
                launched.append(config)
    return launched
