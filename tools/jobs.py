"""What a tuning run has to do, how it is done here or by several ranks, and what becomes of the results.

A mode says what is compared: "pruned" what may win, "exhaustive" all candidates, "recheck" the best of the
last run. Results travel as JSON: rank 0, which writes them, may be another process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .progress import Progress
from .ranks import Ranks
from .report import first_line


class Job(NamedTuple):
    """One weight and the Ms that are to be measured, with what its files hold."""

    problem: Any
    Ms: list[int]
    entries: dict[int, dict]
    measured: dict[int, Any]


class Recorder:
    """Takes what the ranks find: writes it, counts it and shows how far they are."""

    def __init__(self, kernel: Any, targets: Sequence[Any], jobs: Sequence[Job]) -> None:
        self._kernel = kernel
        self._targets = targets
        self._jobs = jobs
        self.measured = [dict(job.measured) for job in jobs]
        self.finished = [0] * len(jobs)
        self.candidates = 0
        self.skipped: dict[str, int] = {}
        self.failures: dict[int, dict[str, str]] = {}
        # Why results could not be written, if so.
        self.error: Exception | None = None
        self.progress = Progress(sum(len(job.Ms) for job in jobs))

    def take(self, message: dict[str, Any]) -> None:
        index = message["job"]
        problem = self._jobs[index].problem
        if "entries" in message:
            from_record = self._kernel.measurements.from_record
            entries = {int(M): config for M, config in message["entries"].items()}
            measured = {int(M): from_record(record) for M, record in message["measured"].items()}
            self.measured[index].update(measured)
            self._targets[index].save(entries, measured)
        elif "failures" in message:
            self.failures[index] = message["failures"]
            for M, reason in message["failures"].items():
                self.progress.finished(problem, int(M), f"not tuned, {reason}")
        else:
            self.finished[index] += 1
            self.candidates += message["candidates"]
            for reason, count in message["skipped"].items():
                self.skipped[reason] = self.skipped.get(reason, 0) + count
            self.progress.finished(problem, message["M"], message["outcome"])


def make_jobs(
    kernel: Any, targets: Sequence[Any], Ms: Sequence[int] | None, mode: str, force: bool
) -> list[Job]:
    """A job for each target, of those of ``Ms`` (None: as the mode has it) that are not measured yet."""
    jobs = []
    for target in targets:
        entries, measured = target.read()
        todo = list(dict.fromkeys(Ms or kernel.tuning.TUNED_MS))
        if mode == "recheck":
            todo = [M for M in (Ms or measured) if M in measured]
        elif not force:
            candidates = _candidates(kernel, target.problem, target.device, measured, mode)
            environment = kernel.tuner.environment_of(target.device)
            known = target.problem, entries, measured, environment, candidates
            todo = [M for M in todo if not kernel.tuner.is_measured(M, *known)]
        jobs.append(Job(target.problem, todo, entries, measured))
    return jobs


def _candidates(kernel: Any, problem: Any, device: torch.device, measured: dict, mode: str) -> Any:
    if mode == "recheck":
        return kernel.tuner.stored_candidates(measured)
    return kernel.tuner.default_candidates(problem, device, mode == "exhaustive")


def _to_json(kernel: Any, job: Job) -> dict[str, Any]:
    to_record = kernel.measurements.to_record
    measured = {M: to_record(measurement) for M, measurement in job.measured.items()}
    return {**job._asdict(), "measured": measured}


def _from_json(kernel: Any, content: dict[str, Any]) -> Job:
    from_record = kernel.measurements.from_record
    return Job(
        kernel.tuning.Problem(*content["problem"]),
        content["Ms"],
        {int(M): config for M, config in content["entries"].items()},
        {int(M): from_record(record) for M, record in content["measured"].items()},
    )


def work(
    kernel: Any,
    jobs: Sequence[Job],
    indices: Iterable[int],
    mode: str,
    send: Callable[[dict[str, Any]], None],
    progress: Progress | None = None,
) -> None:
    """Do the jobs that ``indices`` gives, and ``send`` what comes out, as `Recorder.take` takes it."""
    device = kernel.tuning.resolve_device(None)
    to_record = kernel.measurements.to_record
    own = kernel.workers.Workers(device) if device.type != "cpu" else contextlib.nullcontext()
    with own as workers:
        for index in indices:
            job = jobs[index]

            def save(entries: dict, measured: dict, index: int = index) -> None:
                records = {M: to_record(measurement) for M, measurement in measured.items()}
                send({"job": index, "entries": dict(entries), "measured": records})

            def on_result(result: Any, index: int = index) -> None:
                times = (result.tuned_ms, result.default_ms, result.torch_ms)
                tuned, default, torch_time = (f"{ms * 1e3:.1f}" for ms in times)
                outcome = f"{tuned} µs, default {default}, torch {torch_time}"
                send(
                    {
                        "job": index, "M": result.M, "outcome": outcome,
                        "candidates": result.measured, "skipped": result.skipped,
                    }
                )  # fmt: skip

            def on_progress(*event: Any, problem: Any = job.problem) -> None:
                if progress is not None:
                    progress.candidate(problem, *event)

            spaces = {M: found.space for M, found in job.measured.items()}
            try:
                failures = kernel.tuner.tune_problem(
                    job.problem,
                    job.Ms,
                    device,
                    _candidates(kernel, job.problem, device, job.measured, mode),
                    job.entries,
                    job.measured,
                    save,
                    workers=workers,
                    on_progress=on_progress,
                    on_result=on_result,
                    spaces=spaces if mode == "recheck" else None,
                )
            except RuntimeError as error:
                failures = dict.fromkeys(job.Ms, first_line(error))
            send({"job": index, "failures": {str(M): reason for M, reason in failures.items()}})


def work_as_rank(
    kernel: Any,
    ranks: Ranks,
    jobs: list[Job] | None,
    recorder: Recorder | None,
    mode: str,
) -> list[int]:
    """Share ``jobs``, which rank 0 has, among the ranks. Returns: on rank 0 those that died."""
    device = kernel.tuning.device_name()
    shared = ranks.share(
        {"device": device, "jobs": [_to_json(kernel, job) for job in jobs]} if jobs else None
    )
    if shared["device"] != device:
        ranks.leave()
        raise ValueError(
            f"expects ranks on GPUs of one name, got {shared['device']} on rank 0 and {device} on rank "
            f"{ranks.rank}; tune them in runs of their own"
        )
    own = [_from_json(kernel, content) for content in shared["jobs"]]
    order = [index for index, job in enumerate(own) if job.Ms]
    # The longest first: what is begun last shall be short.
    order.sort(key=lambda index: -len(own[index].Ms) * own[index].problem.N * own[index].problem.K)
    dead: list[int] = []
    receiver = None
    if recorder is not None:
        receiver = threading.Thread(target=_receive, args=(ranks, recorder, dead), daemon=True)
        receiver.start()
    try:
        claimed = (order[index] for index in ranks.claim(len(order)))
        work(kernel, own, claimed, mode, ranks.send)
    finally:
        ranks.leave()
    if receiver is not None:
        receiver.join()
        if recorder.error is not None:
            raise recorder.error
    return dead


def _receive(ranks: Ranks, recorder: Recorder, dead: list[int]) -> None:
    try:
        dead += ranks.receive(recorder.take)
    except Exception as error:  # nobody waits for this thread before the end
        recorder.error = error
        ranks.stop()
