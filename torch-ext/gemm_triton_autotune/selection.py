"""Which entry of a tuned file serves a call: that of its very M, else the nearest M whose tile suits.

Nearest in log space alone is not enough. A tile that holds all 96 rows for which it won takes twice as long for
100, because the last four take a second one; up to twice as long as torch.mm was measured (`benchmarks/NOTES.md`,
section 23). The work model knows such steps, and little else: so it only says which of the entries are out of place.
"""

from __future__ import annotations

from typing import Callable

from .config import Config
from .cost_model import rates_for, time_us
from .device import DeviceProperties
from .tuned_file import MANY_ROWS, TunedConfigs

# An entry may take this much longer than the best one around, by the model.
_TOLERANCE = 1.05
# Around M are the tuned Ms within this factor.
_AROUND = 4


def entry_for(
    M: int,
    N: int,
    K: int,
    tuned: TunedConfigs,
    properties: DeviceProperties,
    accepts: Callable[[Config], bool] | None = None,
) -> int | None:
    """The M of the entry of ``tuned`` that a (M, K) @ (K, N) on such a device runs with.

    It is the nearest to ``M`` in log space, at a tie the smaller, of those that ``accepts`` takes and that by the
    work model take at most 5 % longer for M rows than the best within a factor of 4.
    Returns: None if there is none, or M is outside of them all by more than a factor of `REACH`.
    """
    nearest = tuned.nearest(M, accepts)
    if nearest is None or nearest == M:
        return nearest
    middle = min(M, MANY_ROWS)
    around = [
        other
        for other, config in tuned.items()
        if middle <= other * _AROUND
        and other <= middle * _AROUND
        and (accepts is None or accepts(config))
    ]
    rates = rates_for(properties)
    times_us = {other: time_us(tuned[other], M, N, K, rates) for other in around}
    limit_us = min(times_us.values(), default=0.0) * _TOLERANCE
    suiting = [other for other, needed_us in times_us.items() if needed_us <= limit_us]
    # Ascending, so that of two as far away the smaller is the first.
    return min(suiting, key=lambda other: max(other / M, M / other), default=nearest)
