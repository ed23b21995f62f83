"""The search of `tune_gemm`: which one of the candidates for a problem wins.

A quick look at every candidate; then the best few, the default and what is used at present in interleaved
rounds, until all but one are beaten, or it is known within half a percent how they compare. Of equals
the default is chosen, else what is used at present, else the simplest: no file is better than one
that brings nothing.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple

from .bench import Skip
from .candidates import refinements
from .config import Config
from .device import DeviceProperties

logger = logging.getLogger("gemm_triton_autotune")

# Those whose quick time is within this factor of the best, and no more than so many, go to the final.
_FINALIST_FACTOR = 1.1
_FINALISTS = 6
# Rounds are taken so many at a time, up to so many times.
_ROUNDS = 9
_MAX_SERIES = 8
# Of so many leaders the refinements are tried.
_REFINED = 3
# The least gain that the default is given up for: on an H200 gains of 1 % and more were the same when measured again, in
# another process, and 1 of 85 was lost; of smaller ones some were (`benchmarks/NOTES.md`, section 38).
_LEAST_GAIN = 0.01
# Two others within this factor are as good, and nothing is measured to tell them apart.
_SAME = 0.005
# So many standard errors are beyond the noise.
_SIGNIFICANT = 3

# What compiles candidates ahead: each one, and what stands against it, in the order in which they are ready.
Compiled = Callable[[Sequence[Config]], Iterable[tuple[Config, "Skip | None"]]]


def least_gain(default_ms: float, torch_ms: float) -> float:
    """The gain, as a part of its time, that the default is given up for: any that is beyond the noise where torch.mm is
    faster than it."""
    return 0.0 if torch_ms < default_ms else _LEAST_GAIN


class Timed(NamedTuple):
    """A configuration and the milliseconds that it took."""

    time_ms: float
    config: Config


class Result(NamedTuple):
    """What the search found for one M. Times in milliseconds; `skipped` counts by reason."""

    M: int
    config: Config
    default_ms: float
    tuned_ms: float
    torch_ms: float
    measured: int
    skipped: dict[str, int]
    # The standard error of tuned against default, as a part of the time; None without rounds.
    noise: float | None = None
    # The best, the chosen one first; and the quick times of all that ran.
    top: tuple[Timed, ...] = ()
    quick: tuple[Timed, ...] = ()


def uncompiled(configs: Sequence[Config]) -> Iterable[tuple[Config, Skip | None]]:
    """`Compiled` where nothing is compiled ahead."""
    return ((config, None) for config in configs)


def search(
    M: int,
    N: int,
    K: int,
    bench: Any,
    candidates: Sequence[Config],
    default: Config,
    present: Config | None = None,
    compiled: Compiled = uncompiled,
    on_progress: Callable[[int, int, int, float], None] | None = None,
    properties: DeviceProperties | None = None,
) -> Result:
    """Find the fastest right one of ``candidates`` with a `Bench` or `RemoteBench`.

    default: the candidate that takes no tuning; only for a gain of `least_gain` is another one chosen.
    present: what is used until now; it stays unless another one is faster beyond the noise, or the default as fast.
    properties: the device's; what it cannot run is not tried to refine a candidate.
    Raises: RuntimeError if no candidate runs, or the operands do not fit.
    """
    search = _Search(M, N, K, bench, default, present, compiled, on_progress, properties)
    return search.run(_distinct(candidates))


class _Search:
    def __init__(
        self,
        M: int,
        N: int,
        K: int,
        bench: Any,
        default: Config,
        present: Config | None,
        compiled: Compiled,
        on_progress: Callable[[int, int, int, float], None] | None,
        properties: DeviceProperties | None,
    ) -> None:
        self.M = M
        self.shape = f"M={M}, N={N}, K={K}"
        self.bench = bench
        self.default = default
        self.present = present
        self.compiled = compiled
        self.on_progress = on_progress
        self.properties = properties
        self.skipped: dict[str, int] = {}
        self.times: list[Timed] = []
        # What ran in the quick look and did not stand up to more.
        self.dropped: list[Config] = []

    def run(self, candidates: list[Config]) -> Result:
        self.bench.set_rows(self.M)
        self._look(candidates)
        if self.bench.has_rounds:
            self._look(self._refined(candidates))
        while True:
            final = self._final(len(candidates))
            if not final.is_empty():
                chosen = final.choose(self.present, self.default)
                try:
                    self.bench.verify(chosen)
                    break
                except Skip as error:
                    self._drop(chosen, error)
        ranked = [timed for timed in final.ranked() if timed.config != chosen]
        top = (Timed(final.time_ms(chosen), chosen), *ranked)
        return Result(
            self.M,
            chosen,
            final.time_ms(self.default),
            final.time_ms(chosen),
            final.torch_ms,
            len(self.times),
            self.skipped,
            final.noise(chosen, self.default),
            top,
            tuple(self.times),
        )

    def _refined(self, tried: list[Config]) -> list[Config]:
        """What refines the leaders, beside what was ``tried``."""
        leaders = sorted(self.times, key=_time)[:_REFINED]
        new = _distinct(
            config for leader in leaders for config in refinements(leader.config, self.properties)
        )
        return [config for config in new if config not in tried]

    def _look(self, candidates: list[Config]) -> None:
        """A quick time of each candidate that runs and is right."""
        for index, (config, problem) in enumerate(self.compiled(candidates)):
            try:
                if problem is not None:
                    raise problem
                self.times.append(Timed(self.bench.quick_ms(config), config))
            except Skip as error:
                self._skip(config, error)
            if self.on_progress is not None:
                best_ms = min((timed.time_ms for timed in self.times), default=math.nan)
                self.on_progress(self.M, index + 1, len(candidates), best_ms)

    def _final(self, candidates: int) -> _Final:
        times = [timed for timed in self.times if timed.config not in self.dropped]
        if not times:
            counts = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            raise RuntimeError(f"None of {candidates} candidates runs for {self.shape}: {counts}")
        if not self.bench.has_rounds:
            return _Final.of_single_times(times, self.bench.torch_ms())
        ranked = sorted(times, key=_time)
        limit_ms = ranked[0].time_ms * _FINALIST_FACTOR
        finalists = [config for time_ms, config in ranked if time_ms <= limit_ms][:_FINALISTS]
        always = (self.default, self.present)
        finalists += [c for _, c in ranked if c in always and c not in finalists]
        return measure_final(self.bench, finalists, self.default, self._drop)

    def _drop(self, config: Config, error: Skip) -> None:
        self._skip(config, error)
        self.dropped.append(config)

    def _skip(self, config: Mapping[str, Any], error: Skip) -> None:
        self.skipped[error.reason] = self.skipped.get(error.reason, 0) + 1
        logger.info("Skipped %s for M=%d: %s %s", config, self.M, error.reason, error.detail)


def measure_final(
    bench: Any,
    finalists: Sequence[Config],
    default: Config,
    on_skip: Callable[[Config, Skip], None] = lambda config, error: None,
) -> _Final:
    """Interleaved rounds of ``finalists`` and torch.mm; who is clearly beaten leaves after a series.

    The default stays to the end, as what the others are compared with.
    """
    final = _Final()
    running = list(finalists)
    for _ in range(_MAX_SERIES):
        series = None
        while series is None and running:
            try:
                series = bench.interleaved_ms([*running, None], _ROUNDS)
            except Skip as error:
                if error.turn is None or error.turn >= len(running):
                    raise RuntimeError(f"the final rounds failed: {error.reason}") from error
                # It ran before and does not now; the others are measured again.
                on_skip(running[error.turn], error)
                final.remove(running.pop(error.turn))
        if series is None:
            break
        *times, torch_times = series
        final.add(running, times, torch_times)
        contenders = final.contenders()
        if len(contenders) == 1 or final.tells_all_that_matters(contenders, default):
            break
        running = [config for config in running if config in (*contenders, default)]
    return final


class _Final:
    """Times of the finalists; those of one round belong together."""

    def __init__(self) -> None:
        self._configs: list[Config] = []
        self._times: list[list[float]] = []
        self._torch_times: list[float] = []

    @classmethod
    def of_single_times(cls, times: Sequence[Timed], torch_ms: float) -> _Final:
        final = cls()
        final.add(
            [timed.config for timed in times], [[timed.time_ms] for timed in times], [torch_ms]
        )
        return final

    def add(
        self,
        configs: Sequence[Config],
        times: Sequence[Sequence[float]],
        torch_times: Sequence[float],
    ) -> None:
        for config, new in zip(configs, times):
            if config not in self._configs:
                self._configs.append(config)
                self._times.append([])
            self._of(config).extend(new)
        self._torch_times.extend(torch_times)

    def remove(self, config: Config) -> None:
        if config in self._configs:
            index = self._configs.index(config)
            del self._configs[index], self._times[index]

    def is_empty(self) -> bool:
        return not self._configs

    def _of(self, config: Config) -> list[float]:
        return self._times[self._configs.index(config)]

    @property
    def torch_ms(self) -> float:
        return statistics.median(self._torch_times) if self._torch_times else math.nan

    @property
    def _has_rounds(self) -> bool:
        return len(self._torch_times) > 1

    def time_ms(self, config: Config) -> float:
        if config not in self._configs:
            return math.nan
        # Without rounds there is nothing to go by, and torch.mm's one time may be none.
        if not self._has_rounds:
            return statistics.median(self._of(config))
        # A card slows as it warms, and who left early was timed on a cool one: so by what torch.mm took in the
        # same rounds.
        multiples = [own / torch for own, torch in zip(self._of(config), self._torch_times)]
        return statistics.median(multiples) * self.torch_ms

    def ranked(self) -> list[Timed]:
        return sorted((Timed(self.time_ms(config), config) for config in self._configs), key=_time)

    def noise(self, config: Config, other: Config) -> float | None:
        """The standard error of the median of how much longer ``other`` takes, as a part of the time."""
        if config == other or not all(c in self._configs for c in (config, other)):
            return None
        return self._lead(config, other)[1]

    def _lead(self, config: Config, other: Config) -> tuple[float, float | None]:
        """How much longer ``other`` takes than ``config``, and the noise of that."""
        leads = [theirs / ours - 1 for ours, theirs in zip(self._of(config), self._of(other))]
        lead = statistics.median(leads)
        if len(leads) < 2:
            return lead, None
        # Of a normal spread: its median absolute deviation times 1.48 is the standard deviation, and the
        # median's standard error is 1.25 times that of the mean. A single round that was disturbed says nothing.
        spread = 1.4826 * statistics.median(abs(value - lead) for value in leads)
        return lead, 1.25 * spread / math.sqrt(len(leads))

    def beats(self, config: Config, other: Config, least: float = 0.0) -> bool:
        """Is ``other`` slower by more than ``least`` and the noise?"""
        lead, noise = self._lead(config, other)
        return lead > max(least, _SIGNIFICANT * (noise or 0.0))

    def contenders(self) -> list[Config]:
        """Those that the best does not beat, the best first."""
        best, *others = (timed.config for timed in self.ranked())
        return [best, *(config for config in others if not self.beats(best, config))]

    def tells_all_that_matters(self, contenders: Sequence[Config], default: Config) -> bool:
        """Is it known within `_SAME` how the best of ``contenders`` compares with the others and the default?"""
        best, *equal = contenders
        others = [config for config in (*equal, default) if config in self._configs]
        noises = [self._lead(best, config)[1] for config in others]
        return all(noise is not None and _SIGNIFICANT * noise <= _SAME for noise in noises)

    def choose(self, present: Config | None, default: Config) -> Config:
        """The best; of equals the default, or what is used at present, or the simplest."""
        equal = self.contenders()
        best = equal[0]
        # Without rounds nothing is known of the noise.
        torch_ms = self.torch_ms if self._has_rounds else math.nan
        least = least_gain(self.time_ms(default), torch_ms)
        if default in self._configs and not self.beats(best, default, least):
            equal.append(default)
        for preferred in (default, present):
            if preferred in equal:
                return preferred
        # Without rounds nothing is known of the noise: the first of the fastest.
        if not self._has_rounds:
            return best
        as_good = [c for c in equal if self._lead(best, c)[0] <= _SAME]
        if default in self._configs:
            # What is simpler must not have lost the gain for which the default was given up.
            as_good = [c for c in as_good if self.beats(c, default, least)]
        return min(as_good, key=len)


def _distinct(configs: Iterable[Config]) -> list[Config]:
    # The times of one that was measured twice would not belong to the rounds of the others.
    found: list[Config] = []
    for config in configs:
        if config not in found:
            found.append(config)
    return found


def _time(timed: Timed) -> float:
    return timed.time_ms
