"""Which entry of a tuned file serves a call: that of its very M, else the nearest M whose tile suits, or none.

Nearest in log space alone is not enough. A tile that holds all 96 rows for which it won takes twice as long for
100, because the last four take a second one; up to three times as long as torch.mm was measured
(`benchmarks/NOTES.md`, section 23). The work model knows such steps, and little else: so it only says which of the
entries are out of place. Of `gluon` tiles it knows enough to say that all of them are: then the default, whose tiles fit
any M, was 1.02 times as slow as the best, and they 1.13 (section 34).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Callable, NamedTuple

from .config import Config, family_of
from .cost_model import rates_for, time_us
from .defaults import default_configs
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


class _Call(NamedTuple):
    """A (M, K) @ (K, N) on a device, and what the work model says of it."""

    M: int
    N: int
    K: int
    properties: DeviceProperties
    layout: str

    def times_us(self, configs: Iterable[Config]) -> list[float]:
        rates = rates_for(self.properties)
        return [time_us(each, self.M, self.N, self.K, rates, self.layout) for each in configs]

    @property
    def tolerance(self) -> float:
        """How many times as long is still as good."""
        return _TOLERANCE.get(device_kind(self.properties) or "", _TOLERANCE_ELSEWHERE)


def entry_for(
    M: int,
    N: int,
    K: int,
    tuned: TunedConfigs,
    properties: DeviceProperties,
    layout: str,
    accepts: Callable[[Config], bool] | None = None,
) -> int | None:
    """The M of the entry of ``tuned`` that a (M, K) @ (K, N) on such a device runs with.

    It is the nearest to ``M`` in log space, at a tie the smaller, of those that ``accepts`` takes and that by the
    work model take little longer for M rows than the best within a factor of 4: 5 % on Hopper, else 25.
    Returns: None if there is none, if M is outside of them all by more than a factor of `REACH`, or if it would be a `gluon`
    tile and the default is one that by the model is faster by more than that.
    """
    if M in tuned and (accepts is None or accepts(tuned[M])):
        return M
    call = _Call(M, N, K, properties, layout)
    other = _nearest_suiting(call, tuned, accepts)
    if other is None or _gives_way(tuned[other], call, accepts):
        return None
    return other


def _nearest_suiting(
    call: _Call, tuned: TunedConfigs, accepts: Callable[[Config], bool] | None
) -> int | None:
    # It takes some ten microseconds, and calls that are not kept ask each time. ``tuned`` is of one weight, layout and
    # device.
    suiting = tuned.suiting.get(call.M)
    if suiting is None:
        suiting = tuned.suiting[call.M] = _suiting(call, tuned, list(tuned))
        # A copy, and nothing that must be there: other threads do the same.
        for oldest in list(tuned.suiting)[:-_MAX_KEPT]:
            tuned.suiting.pop(oldest, None)
    for other in suiting:
        if accepts is None or accepts(tuned[other]):
            return other
    # None of them: then what suits of the rest, and at last the nearest, however far its tile is from M.
    accepted = [other for other, config in tuned.items() if accepts is None or accepts(config)]
    suiting = _suiting(call, tuned, accepted)
    return suiting[0] if suiting else tuned.nearest(call.M, accepts)


def _gives_way(config: Config, call: _Call, accepts: Callable[[Config], bool] | None) -> bool:
    """Is the default so much better for the call than ``config``, which another M has, that the model can tell?"""
    if family_of(config) != "gluon":
        return False
    default = default_configs(*call)[0]
    if family_of(default) != "gluon" or not (accepts is None or accepts(default)):
        return False
    entry_us, default_us = call.times_us((config, default))
    return entry_us > default_us * call.tolerance


def _suiting(call: _Call, tuned: TunedConfigs, Ms: Sequence[int]) -> tuple[int, ...]:
    """Those of ``Ms`` within a factor of 4 whose tile suits the call's rows, the nearest first."""
    M = call.M
    rows = min(M, MANY_ROWS)
    around = [
        other for other in Ms if max(rows, min(other, MANY_ROWS)) <= _AROUND * min(rows, other)
    ]
    times_us = call.times_us(tuned[other] for other in around)
    limit_us = min(times_us, default=0.0) * call.tolerance
    suiting = [other for other, needed_us in zip(around, times_us) if needed_us <= limit_us]
    # Ascending before, so that of two as far away the smaller stays the first.
    return tuple(sorted(suiting, key=lambda other: max(other / M, M / other)))
