"""Tuning one weight for several M: what is compared, in which order, and what of it is kept.

While one M is measured the candidates of the next are compiled. In the end as few distinct
configurations are kept as serve each M nearly as well as its best one, since each is a compile in
somebody's serving process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any, Callable

import torch

from . import kernels, measure, search
from .bench import Bench, Problem, Skip
from .candidates import candidate_configs
from .config import Config
from .defaults import default_configs
from .device import DeviceProperties, device_properties
from .kernels.launch import cdiv
from .measurements import TOP, Measurement, describe_environment, is_same_environment
from .workers import Workers

logger = logging.getLogger("gemm_triton_autotune")

# What a shared configuration may cost an M against its own best.
_SHARED_COST = 0.01
# Of the others' winners those whose quick time at an M is within this factor, and no more than so many.
_SHARED_FACTOR = 1.05
_SHARED_TRIED = 6
_SHARED_ROUNDS = 9

# fmt: off
TUNED_MS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768),
    *(1024, 1280, 1536, 2048, 3072, 4096, 8192),
)
# fmt: on

Candidates = Callable[[int], Sequence[Config]]
# Called with entries and their measurements, by M, as soon as they are known.
Save = Callable[[Mapping[int, Config], Mapping[int, Measurement]], None]


def default_candidates(
    problem: Problem, device: torch.device, exhaustive: bool = False
) -> Candidates:
    """What is compared at each M: what may win there, or all that may win for any M."""
    N, K, layout, _ = problem
    properties = device_properties(device)
    if exhaustive:
        return functools.cache(functools.partial(_exhaustive_configs, N, K, layout, properties))
    return functools.cache(lambda M: candidate_configs(M, N, K, properties, layout))


def _exhaustive_configs(
    N: int, K: int, layout: str, properties: DeviceProperties, M: int
) -> list[Config]:
    found = {
        json.dumps(config): config for config in candidate_configs(M, N, K, properties, layout)
    }
    for other in (None, *TUNED_MS):
        shape = (other, N, K) if other else (None, None, None)
        for config in candidate_configs(*shape, properties, layout):
            found.setdefault(json.dumps(config), config)
    return list(found.values())


def stored_candidates(measured: Mapping[int, Measurement]) -> Candidates:
    """The best of an earlier run, to rank them again."""
    return lambda M: [config for _, config in measured[M].top] if M in measured else []


def space_id(configs: Iterable[Config]) -> str:
    """Says which candidates, of which kernels, were compared: another one means that they would be anew."""
    text = json.dumps([sorted(config.items()) for config in configs])
    return hashlib.sha256(f"{_kernels_id()} {text}".encode()).hexdigest()[:12]


@functools.cache
def _kernels_id() -> str:
    files = sorted(Path(kernels.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def environment_of(device: torch.device, timer: measure.Timer | None = None) -> dict[str, Any]:
    """The conditions of a measurement here and now; ``timer`` as in `tune_gemm`."""
    timer = timer or measure.own_timer(device)
    return describe_environment(device, measure.protocol(device, timer))


def is_measured(
    M: int,
    problem: Problem,
    entries: Mapping[int, Config],
    measured: Mapping[int, Measurement],
    environment: Mapping[str, Any],
    candidates: Candidates,
) -> bool:
    """Would measuring ``M`` compare the same things under the same conditions as what the entry is from?"""
    found = measured.get(M)
    return (
        found is not None
        and found.top[0][1] == entries.get(M)
        and found.dtype == problem.dtype
        and found.space == space_id(candidates(M))
        and is_same_environment(found.environment, environment)
    )


def tune_problem(
    problem: Problem,
    Ms: Sequence[int],
    device: torch.device,
    candidates: Candidates,
    entries: Mapping[int, Config],
    measured: Mapping[int, Measurement],
    save: Save,
    timer: measure.Timer | None = None,
    workers: Workers | None = None,
    resume: bool = False,
    on_progress: Callable[[int, int, int, float], None] | None = None,
    on_result: Callable[[search.Result], None] | None = None,
    spaces: Mapping[int, str] | None = None,
) -> dict[int, str]:
    """`tune_gemm` for checked arguments and without files: ``entries`` and ``measured`` are what they hold,
    and ``save`` is called with what they shall hold besides.

    spaces: what measurements say that was compared, where that is not what ``candidates`` gives.
    Returns: for each M that could not be tuned, why. Raises: RuntimeError if that is all of them.
    """
    own_workers = None
    if timer is None and workers is None and device.type != "cpu":
        workers = own_workers = Workers(device)
    if workers is None:
        timer = timer or measure.own_timer(device)
    environment = environment_of(device, timer)
    if resume:
        known = problem, entries, measured, environment, candidates
        Ms = [M for M in Ms if not is_measured(M, *known)]
        if not Ms:
            return {}
    try:
        bench = workers.bench(problem) if timer is None else Bench(problem, device, timer)
        tuner = Tuner(
            problem,
            bench,
            device,
            entries,
            candidates,
            environment,
            save,
            workers if timer is None and workers.can_compile else None,
            on_progress,
            on_result,
            spaces,
        )
        failures = tuner.run(Ms)
    finally:
        if own_workers is not None:
            own_workers.close()
    if len(failures) == len(Ms):
        raise RuntimeError(failures[Ms[0]])
    return failures


class Tuner:
    """Tunes one weight on a bench.

    entries: what is used at present, by M. candidates: what is compared besides those and the default.
    workers: what compiles ahead; None where nothing is compiled.
    """

    def __init__(
        self,
        problem: Problem,
        bench: Any,
        device: torch.device,
        entries: Mapping[int, Config],
        candidates: Candidates,
        environment: Mapping[str, Any],
        save: Save,
        workers: Workers | None = None,
        on_progress: Callable[[int, int, int, float], None] | None = None,
        on_result: Callable[[search.Result], None] | None = None,
        spaces: Mapping[int, str] | None = None,
    ) -> None:
        self._problem = problem
        self._bench = bench
        self._properties = properties = device_properties(device)
        self._entries = {
            M: config
            for M, config in entries.items()
            if kernels.config_problem(config, properties) is None
        }
        self._candidates = candidates
        self._environment = environment
        self._save = save
        self._workers = workers
        self._on_progress = on_progress
        self._on_result = on_result
        self._spaces = spaces or {}
        self._futures: dict[int, dict[str, Future]] = {}
        self._results: dict[int, search.Result] = {}

    def run(self, Ms: Sequence[int]) -> dict[int, str]:
        """Tune each of ``Ms``, and save each; for those that could not be tuned, why."""
        failures: dict[int, str] = {}
        own = {M: self._own_candidates(M) for M in Ms}
        try:
            if self._workers is not None:
                for priority, M in enumerate(Ms, start=1):
                    self._compile(M, own[M], priority)
            for M in Ms:
                try:
                    self._tune(M, own[M])
                # torch's own OutOfMemoryError is a RuntimeError.
                except (RuntimeError, MemoryError) as error:
                    failures[M] = (str(error).strip() or type(error).__name__).splitlines()[0]
                    logger.warning("M=%d was not tuned: %s", M, failures[M])
            self._share()
        finally:
            for futures in self._futures.values():
                for future in futures.values():
                    future.cancel()
        return failures

    def _default(self, M: int) -> Config:
        N, K, layout, _ = self._problem
        return default_configs(M, N, K, self._properties, layout)[0]

    def _own_candidates(self, M: int) -> list[Config]:
        default = self._default(M)
        return [default, *(config for config in self._candidates(M) if config != default)]

    def _tune(self, M: int, own: Sequence[Config]) -> None:
        below = max((other for other in self._entries if other < M), default=None)
        above = min((other for other in self._entries if other > M), default=None)
        tried = list(own)
        for other in (M, below, above):
            config = self._entries.get(other)
            if config is not None and config not in tried:
                tried.append(config)
        result = search.search(
            M,
            self._problem.N,
            self._problem.K,
            self._bench,
            tried,
            self._default(M),
            self._entries.get(M),
            search.uncompiled if self._workers is None else functools.partial(self._compiled, M),
            self._on_progress,
            self._properties,
        )
        self._results[M] = result
        self._entries[M] = result.config
        self._save({M: result.config}, {M: self._measurement(M)})
        if self._on_result is not None:
            self._on_result(result)

    def _measurement(self, M: int) -> Measurement:
        result = self._results[M]
        return Measurement(
            environment=self._environment,
            dtype=self._problem.dtype,
            space=self._spaces.get(M) or space_id(self._candidates(M)),
            tuned_us=_us(result.tuned_ms),
            default_us=_us(result.default_ms),
            torch_us=_us(result.torch_ms),
            noise=None if result.noise is None else round(result.noise, 5),
            top=tuple((_us(time_ms), config) for time_ms, config in result.top[:TOP]),
        )

    def _compile(self, M: int, configs: Sequence[Config], priority: int) -> dict[str, Future]:
        futures = self._futures.setdefault(M, {})
        missing = [config for config in configs if _key(config) not in futures]
        new = self._workers.compile(self._problem, M, missing, priority)
        futures.update(zip(map(_key, missing), new))
        return futures

    def _compiled(self, M: int, configs: Sequence[Config]) -> Iterator[tuple[Config, Skip | None]]:
        futures = self._compile(M, configs, priority=0)
        waiting = {futures[_key(config)]: config for config in configs}
        for future in as_completed(waiting):
            yield waiting[future], future.result()

    def _share(self) -> None:
        """Replace winners by those of other Ms where that costs next to nothing."""
        own = {
            M: result for M, result in self._results.items() if result.config != self._default(M)
        }
        winners = {_key(result.config): result.config for result in own.values()}
        if len(winners) < 2:
            return
        times = {
            M: _gaining(
                self._times(M, _with_no_more_tiles(winners, M, result.config), result), result
            )
            for M, result in own.items()
        }
        for M, key in fewest(times, _SHARED_COST).items():
            result = own[M]
            if winners[key] != result.config:
                self._replace(M, winners[key], times[M])

    def _times(
        self, M: int, winners: Mapping[str, Config], result: search.Result
    ) -> dict[str, float]:
        """The times at ``M`` of its own winner and those of others that may take its place."""
        quick = {_key(config): time_ms for time_ms, config in result.quick}
        if not self._bench.has_rounds:
            return {key: time_ms for key, time_ms in quick.items() if key in winners}
        own = _key(result.config)
        try:
            self._bench.set_rows(M)
            for key, config in winners.items():
                if key not in quick:
                    try:
                        quick[key] = self._bench.quick_ms(config)
                    except Skip:
                        quick[key] = math.inf
            limit_ms = quick[own] * _SHARED_FACTOR
            near = sorted((quick[key], key) for key in winners if quick[key] <= limit_ms)
            rivals = [winners[key] for _, key in near if key != own][:_SHARED_TRIED]
            if not rivals:
                return {own: result.tuned_ms}
            compared = [result.config, *rivals]
            rounds = self._bench.interleaved_ms(compared, _SHARED_ROUNDS)
        except (RuntimeError, Skip) as error:
            logger.info("M=%d keeps its own configuration: %s", M, error)
            return {own: result.tuned_ms}
        return dict(zip(map(_key, compared), map(statistics.median, rounds)))

    def _replace(self, M: int, config: Config, times: Mapping[str, float]) -> None:
        result = self._results[M]
        try:
            self._bench.set_rows(M)
            self._bench.verify(config)
        except (Skip, RuntimeError) as error:
            logger.info("M=%d keeps its own configuration: %s", M, error)
            return
        # In the measure of the rounds that the result is from.
        time_ms = result.tuned_ms * times[_key(config)] / times[_key(result.config)]
        others = [timed for timed in result.top if timed.config != config]
        top = (search.Timed(time_ms, config), *others)
        self._results[M] = result._replace(config=config, tuned_ms=time_ms, top=top)
        self._entries[M] = config
        self._save({M: config}, {M: self._measurement(M)})


def _with_no_more_tiles(winners: Mapping[str, Config], M: int, own: Config) -> dict[str, Config]:
    """Those of ``winners`` that share ``M`` rows out among no more tiles than its ``own``.

    More tiles of rows read b more often, which is as fast only while the reads meet in L2: here by 1 %, at another
    time not (on an H200 31 and 39 us for one entry).
    """

    def tiles(config: Config) -> int:
        return cdiv(M, config["BLOCK_SIZE_M"])

    return {key: config for key, config in winners.items() if tiles(config) <= tiles(own)}


def _gaining(times: Mapping[str, float], result: search.Result) -> dict[str, float]:
    """Those of ``times`` at an M that are still a gain on the default, and that of its own winner."""
    own = _key(result.config)
    limit_ms = math.inf
    if math.isfinite(result.default_ms):
        least = search.least_gain(result.default_ms, result.torch_ms)
        limit_ms = times[own] * result.default_ms / result.tuned_ms * (1 - least)
    return {key: time_ms for key, time_ms in times.items() if key == own or time_ms <= limit_ms}


def fewest(times: Mapping[int, Mapping[str, float]], cost: float) -> dict[int, str]:
    """For each M the fastest of a set of configurations, which is small and has one for each M within
    ``cost`` of its best.

    times: by M and configuration; what is absent does not serve that M. The set is found greedily: the
    configuration that serves most of the Ms that are left, at a tie the one that is faster there.
    """
    limits = {M: min(own.values()) * (1 + cost) for M, own in times.items()}
    left = set(times)
    chosen: list[str] = []
    while left:
        serves: dict[str, list[float]] = {}
        for M in sorted(left):
            for key, time_ms in times[M].items():
                if time_ms <= limits[M]:
                    serves.setdefault(key, []).append(time_ms / limits[M])
        best = max(serves, key=lambda key: (len(serves[key]), -sum(serves[key])))
        chosen.append(best)
        left = {M for M in left if not times[M].get(best, math.inf) <= limits[M]}
    return {
        M: min((key for key in chosen if key in own), key=lambda key, own=own: own[key])
        for M, own in times.items()
    }


def _key(config: Config) -> str:
    return json.dumps(config, sort_keys=True)


def _us(time_ms: float) -> float | None:
    return round(time_ms * 1e3, 3) if math.isfinite(time_ms) else None
