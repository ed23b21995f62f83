"""Which entry of a tuned file serves a call: that of its very M, else the nearest M whose tile suits.

Nearest in log space alone is not enough. A tile that holds all 96 rows for which it won takes twice as long for
100, because the last four take a second one; up to three times as long as torch.mm was measured
(`benchmarks/NOTES.md`, section 23). The work model knows such steps, and little else: so it only says which of the
entries are out of place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

from .config import Config
from .cost_model import rates_for, time_us
from .device import DeviceProperties
from .device_tables import device_kind
from .tuned_file import MANY_ROWS, TunedConfigs

# Around M are the tuned Ms within this factor.
_AROUND = 4
# An entry may take this much longer than the best one around, by the model. Its rates were measured for Hopper alone;
# for other kinds it is only believed where it sees tiles double.
_TOLERANCE = {"sm_90": 1.05}
_TOLERANCE_ELSEWHERE = 1.25
# So many Ms are kept for each file, the latest.
_MAX_KEPT = 1000


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
    work model take little longer for M rows than the best within a factor of 4: 5 % on Hopper, else 25.
    Returns: None if there is none, or M is outside of them all by more than a factor of `REACH`.
    """
    if M in tuned and (accepts is None or accepts(tuned[M])):
        return M
    # It takes some ten microseconds, and calls that are not kept ask each time. ``tuned`` is of one weight and device.
    suiting = tuned.suiting.get(M)
    if suiting is None:
        suiting = tuned.suiting[M] = _suiting(M, N, K, tuned, list(tuned), properties)
        # A copy, and nothing that must be there: other threads do the same.
        for oldest in list(tuned.suiting)[:-_MAX_KEPT]:
            tuned.suiting.pop(oldest, None)
    for other in suiting:
        if accepts is None or accepts(tuned[other]):
            return other
    # None of them: then what suits of the rest, and at last the nearest, however far its tile is from M.
    accepted = [other for other, config in tuned.items() if accepts is None or accepts(config)]
    suiting = _suiting(M, N, K, tuned, accepted, properties)
    return suiting[0] if suiting else tuned.nearest(M, accepts)


def _suiting(
    M: int, N: int, K: int, tuned: TunedConfigs, Ms: Sequence[int], properties: DeviceProperties
) -> tuple[int, ...]:
    """Those of ``Ms`` within a factor of 4 whose tile suits ``M`` rows, the nearest first."""
    rates = rates_for(properties)
    rows = min(M, MANY_ROWS)
    times_us = {
        other: time_us(tuned[other], M, N, K, rates)
        for other in Ms
        if max(rows, min(other, MANY_ROWS)) <= _AROUND * min(rows, other)
    }
    tolerance = _TOLERANCE.get(device_kind(properties) or "", _TOLERANCE_ELSEWHERE)
    limit_us = min(times_us.values(), default=0.0) * tolerance
    suiting = [other for other, needed_us in times_us.items() if needed_us <= limit_us]
    # Ascending before, so that of two as far away the smaller stays the first.
    return tuple(sorted(suiting, key=lambda other: max(other / M, M / other)))
