"""The processes of a tuning run: one that measures, and several that compile ahead of it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from . import measure
from .bench import WRONG, Problem, Skip, current_target
from .config import Config
from .device import device_guard, device_properties
from .kernels import INTERPRETED
from .worker import TOO_LONG, Lost, Worker

logger = logging.getLogger("gemm_triton_autotune")

# How long one step may take. To set up is to make the weights or the operands.
_SET_UP_LIMIT_S = 300.0
COMPILE_LIMIT_S = 120.0
MEASURE_LIMIT_S = 30.0
# More processes than these wait for each other.
_MAX_COMPILERS = 16


class RemoteBench:
    """A `Bench` in a process of its own, which is set up again after it was lost."""

    def __init__(self, worker: Worker, problem: Problem, has_rounds: bool) -> None:
        self._worker = worker
        self._problem = problem
        self._M: int | None = None
        self._is_set: tuple[int, int | None] = (0, None)
        self.has_rounds = has_rounds

    def set_rows(self, M: int) -> None:
        self._M = M
        self._set_up()

    def quick_ms(self, config: Config) -> float:
        return self._call("quick_ms", config)

    def torch_ms(self) -> float:
        return self._call("torch_ms")

    def interleaved_ms(self, configs: Sequence[Config | None], rounds: int) -> list[list[float]]:
        return self._call("interleaved_ms", configs, rounds)

    def verify(self, config: Config) -> None:
        self._call("verify", config)

    def _call(self, method: str, *arguments: Any) -> Any:
        self._set_up()
        try:
            return self._worker.call(method, *arguments, limit_s=MEASURE_LIMIT_S)
        except Skip as error:
            if error.reason != WRONG:
                raise
        # The one before may have written over the operands: once more, with new ones.
        self._is_set = 0, None
        self._set_up()
        return self._worker.call(method, *arguments, limit_s=MEASURE_LIMIT_S)

    def _set_up(self) -> None:
        if not self._worker.is_running():
            self._worker.start()
        starts, M = self._is_set
        try:
            if starts != self._worker.starts:
                self._worker.call("open", *self._problem, limit_s=_SET_UP_LIMIT_S)
                self._is_set = self._worker.starts, None
            if self._is_set != (self._worker.starts, self._M):
                self._worker.call("set_rows", self._M, limit_s=_SET_UP_LIMIT_S)
                self._is_set = self._worker.starts, self._M
        except Lost as error:
            raise RuntimeError(
                f"operands cannot be made: the process {error.reason} ({error.detail})"
            ) from None


class Workers:
    """The processes of a tuning run on one device; kept for several weights, since starting them takes seconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._measurer = Worker("measure", device=str(device))
        self._tasks: queue.PriorityQueue = queue.PriorityQueue()
        self._order = itertools.count()
        self._compilers: list[Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def bench(self, problem: Problem) -> RemoteBench:
        return RemoteBench(
            self._measurer, problem, has_rounds=measure.own_timer(self.device) is None
        )

    @property
    def can_compile(self) -> bool:
        """Can it be said without a device what to compile? Triton's interpreter compiles nothing."""
        return not INTERPRETED and device_properties(self.device).backend in ("cuda", "rocm")

    def compile(
        self, problem: Problem, M: int, configs: Sequence[Config], priority: int
    ) -> list[Future]:
        """Compile ``configs`` for ``M`` rows, those of the lowest priority first.

        Returns: a future for each, with None or the `Skip`.
        """
        if not self._compilers:
            self._start_compilers()
        futures = []
        for config in configs:
            futures.append(Future())
            task = problem, M, config, futures[-1]
            self._tasks.put((priority, next(self._order), task))
        return futures

    def _start_compilers(self) -> None:
        with device_guard(self.device):
            target = list(current_target())
        backend = device_properties(self.device).backend
        for _ in range(_compiler_count()):
            worker = Worker("compile", target=target, backend=backend)
            self._compilers.append(worker)
            threading.Thread(target=self._compile_tasks, args=(worker,), daemon=True).start()

    def _compile_tasks(self, worker: Worker) -> None:
        try:
            while True:
                _, _, task = self._tasks.get()
                if task is None:
                    return
                problem, M, config, future = task
                if future.set_running_or_notify_cancel():
                    future.set_result(_compile_problem(worker, problem, M, config))
        finally:
            worker.close()

    def close(self) -> None:
        """End all processes, whatever they are at; what was not compiled yet will not be."""
        self._measurer.close()
        with contextlib.suppress(queue.Empty):
            while True:
                _, _, task = self._tasks.get_nowait()
                if task is not None:
                    task[-1].cancel()
        compilers, self._compilers = self._compilers, []
        for worker in compilers:
            self._tasks.put((-1, next(self._order), None))
            worker.close()


def _compile_problem(worker: Worker, problem: Problem, M: int, config: Config) -> Skip | None:
    try:
        worker.call("compile", problem, M, config, limit_s=COMPILE_LIMIT_S)
    except Lost as error:
        # Not proved to be its fault (memory may be short): then the process that measures compiles it.
        return error if error.reason == TOO_LONG else None
    except Skip as error:
        return error
    except Exception as error:
        logger.info("Compiling ahead failed with %s: %s", type(error).__name__, error)
    return None


def _compiler_count() -> int:
    """As many as there are cores for this process, but for one; ranks on one machine share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(share - 1, _MAX_COMPILERS))
