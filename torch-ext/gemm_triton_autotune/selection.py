"""Which entry of a tuned file serves a call: that of its very M, else the nearer one of its two neighbours that suits
M rows, or none where the default suits them better.

Nearest in log space alone is not enough. A tile that holds all 96 rows for which it won takes twice as long for
100, because the last four take a second one; up to three times as long as torch.mm was measured
(`benchmarks/NOTES.md`, section 23). The work model knows such steps. What it says of an entry is set right by what tuning
found: that this one is the best for its own M (section 39).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple

from .config import DEFAULT_KERNEL, Config, family_of
from .cost_model import rates_for, time_us
from .defaults import default_configs
from .device import DeviceProperties
from .device_tables import device_kind
from .tuned_file import TunedConfigs

# By so much the model must find another one faster than the nearest. Its rates were measured for Hopper alone, as the
# list was that the default is from; for other kinds it is only believed where it sees tiles double, and an entry is
# better than a default. So it is than the plain kernel, of which the model thinks too well.
_MARGIN = {"sm_90": 1.01}
_MARGIN_ELSEWHERE = 1.25
# Of other Ms within this factor an entry's own says something.
_NEARBY = 2
# So many choices are kept for each file, the latest.
_MAX_KEPT = 1000
_NOT_ASKED = 0  # no M


class _Weight(NamedTuple):
    """A weight on a device, and what the work model says of it."""

    N: int
    K: int
    properties: DeviceProperties
    layout: str

    def default(self, M: int) -> Config:
        return default_configs(M, *self)[0]

    def rival(
        self, M: int, accepts: Callable[[Config], bool] | None
    ) -> tuple[int, Config] | tuple[None, None]:
        """The default that a call would get, the first that ``accepts`` takes, and its rank; if the model can compare it with
        an entry."""
        if device_kind(self.properties) not in _MARGIN:
            return None, None
        for rank, default in enumerate(default_configs(M, *self)):
            if family_of(default) == DEFAULT_KERNEL:
                break
            if accepts is None or accepts(default):
                return rank, default
        return None, None

    def time_us(self, config: Config, M: int) -> float:
        return time_us(config, M, self.N, self.K, rates_for(self.properties), self.layout)

    def entry_us(self, tuned: TunedConfigs, tuned_m: int, M: int) -> float:
        """What the entry for ``tuned_m`` rows takes for ``M``. What would make it slower than the default where it won is too
        much by the model, and by as much nearby."""
        needed_us = self.time_us(tuned[tuned_m], M)
        if max(M, tuned_m) > _NEARBY * min(M, tuned_m):
            return needed_us
        correction = tuned.corrections.get(tuned_m)
        if correction is None:
            default_us = self.time_us(self.default(tuned_m), tuned_m)
            correction = min(1.0, default_us / self.time_us(tuned[tuned_m], tuned_m))
            tuned.corrections[tuned_m] = correction
        return needed_us * correction


def entry_for(
    M: int,
    N: int,
    K: int,
    tuned: TunedConfigs,
    properties: DeviceProperties,
    layout: str,
    accepts: Callable[[Config], bool] | None = None,
    as_default: Callable[[Config], bool] | None = None,
) -> int | None:
    """The M of the entry of ``tuned`` that a (M, K) @ (K, N) on such a device runs with.

    It is one of the nearest below and above ``M`` that ``accepts`` takes: the nearer in log space, at a tie the smaller,
    unless the other one, or on Hopper the default, is faster for M rows by the work model: by more than 1 % on Hopper, else
    25.
    as_default: what is accepted of the defaults, if that is not the same.
    Returns: None for the default, or if there is no entry, or if M is outside of them all by more than a factor of `REACH`.
    """
    neighbours = tuned.neighbours(M, accepts)
    if not neighbours or neighbours[0] == M:
        return M if neighbours else None
    weight = _Weight(N, K, properties, layout)
    rank, default = weight.rival(M, as_default or accepts)
    # It takes some ten microseconds, and calls that are not kept ask each time. ``tuned`` is of one weight, layout and
    # device.
    question = (M, neighbours, rank)
    chosen = tuned.chosen.get(question, _NOT_ASKED)
    if chosen == _NOT_ASKED:
        chosen = tuned.chosen[question] = _choose(M, weight, tuned, neighbours, default)
        # A copy, and nothing that must be there: other threads do the same.
        for oldest in list(tuned.chosen)[:-_MAX_KEPT]:
            tuned.chosen.pop(oldest, None)
    return chosen


def _choose(
    M: int,
    weight: _Weight,
    tuned: TunedConfigs,
    neighbours: Sequence[int],
    default: Config | None,
) -> int | None:
    times_us = [weight.entry_us(tuned, other, M) for other in neighbours]
    best_us = min(times_us)
    if default is not None:
        best_us = min(best_us, weight.time_us(default, M))
    limit_us = best_us * _MARGIN.get(device_kind(weight.properties) or "", _MARGIN_ELSEWHERE)
    # The nearer one first.
    fast = (other for other, needed_us in zip(neighbours, times_us) if needed_us <= limit_us)
    return next(fast, None)
