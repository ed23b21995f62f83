"""`explain`: which configuration a call gets, from where, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from . import tuning
from .arguments import check_problem
from .config import Config
from .device import device_name, resolve_device
from .measurements import measurements_dir, read_measurements
from .tuned_file import REACH, TunedConfigs


def explain(M: int, N: int, K: int, device: torch.device | None = None, layout: str = "NN") -> str:
    """Say in words which configuration a (M, K) @ (K, N) on ``device`` gets, from where, and why.

    device: None is the current one.
    layout: "NT" where b is the transpose of an (N, K) weight, as in ``gemm(x, weight.t())`` and nn.Linear; "NN" for a
    row-major b (K, N).
    Raises: ValueError for arguments out of range.
    """
    device = resolve_device(device)
    check_problem([M], N, K, layout)
    accepts = tuning.takes_contiguous(M, N, K, layout)
    config, tuned, entry_m = tuning.choose(M, N, K, device, layout, accepts)
    neighbours = tuned.neighbours(M, accepts) if tuned else ()
    if tuned is not None and entry_m is not None:
        nearest = neighbours[0]
        which = "this very M" if entry_m == M else "the nearest in log space"
        if entry_m != nearest:
            which = f"by the work model faster for so many rows than the nearest, M={nearest},"
        why = (
            f"tuned, from {tuned.path}, entry M={entry_m}: {which} of M={', '.join(map(str, tuned))}"
            + _times_in_words(tuned.path, entry_m, config)
        )
    else:
        why = f"the default, because {_why_default(M, N, K, device, layout, tuned, neighbours)}"
    problem = f"(M={M}, K={K}) @ (K={K}, N={N}), {layout}, on {device_name(device)}"
    return tuning.printable(f"{problem}: {config}, {why}.")


def _times_in_words(path: Path, M: int, config: Config) -> str:
    """What the measurements say of an entry; nothing if they are not of this one."""
    folder = measurements_dir(path.parent)
    found = read_measurements(folder / path.name).get(M) if folder else None
    if found is None or found.top[0][1] != config:
        return ""
    others = (("the default", found.default_us), ("torch.mm", found.torch_us))
    times = [f"{found.tuned_us} µs", *(f"{name} {us} µs" for name, us in others if us is not None)]
    return f"; measured on {found.environment.get('date')}: {', '.join(times)}"


def _why_default(
    M: int,
    N: int,
    K: int,
    device: torch.device,
    layout: str,
    tuned: TunedConfigs | None,
    neighbours: Sequence[int],
) -> str:
    if neighbours:
        names = " and ".join(f"M={other}" for other in neighbours)
        return f"by the work model it is faster for so many rows than what {tuned.path} has for {names}"
    if tuned and tuned.neighbours(M):
        return f"what {tuned.path} has near M={M} does not take such operands"
    if tuned:
        return (
            f"M is more than {REACH} times outside M={min(tuned)} to {max(tuned)} of {tuned.path}"
        )
    if tuned is not None:
        return f"no entry of {tuned.path} can be used"
    names = [tuning.config_file_name(N, K, device, name) for name in dict.fromkeys((layout, "NN"))]
    return f"there is no {' or '.join(names)} in {', '.join(map(str, tuning.search_path()))}"
