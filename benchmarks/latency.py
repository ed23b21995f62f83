"""How long a new process waits for its first product, by what computes it.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python benchmarks/latency.py --json latency.json

Each time is from before the first call until its result is on the host, in a process of its own that has imported
everything, has made the operands and waits (`first_call.py`); imports and the start of the device are apart. The
processes of a round start together and then call one after the other. Each case has caches of its own (Triton's and
inductor's), empty in the first round, which is reported as cold; all others find what it compiled. The two of
@triton.autotune share theirs, so that the second is never cold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
from results_file import write_results
from tables import latency_table

CHILD = Path(__file__).resolve().parent / "first_call.py"
# A process that does not answer for so long is lost.
LIMIT_S = 300.0


class Case(NamedTuple):
    """What computes (a key of `first_call.CALLS`), and the folder of its caches."""

    call: str
    caches: str


CASES = {
    "torch.mm": Case("torch", "torch"),
    "gemm, with a tuned file": Case("gemm", "gemm"),
    "gemm, without one": Case("default", "default"),
    "@triton.autotune": Case("autotune", "autotune"),
    "@triton.autotune, cache_results=True": Case("autotune-cached", "autotune"),
    "torch.compile, max-autotune": Case("compile", "compile"),
}


class Child:
    """A process that waits with its operands made, until it is told to call."""

    def __init__(self, case: Case, shape: Sequence[int], caches: Path) -> None:
        folder = caches / case.caches
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            # What this user tuned is no file that ships.
            "XDG_CACHE_HOME": str(folder),
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), case.call, *map(str, shape)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )

    def ready(self) -> dict[str, Any]:
        """What it says when it has imported everything and made its operands."""
        return self._answer()

    def call(self) -> dict[str, Any]:
        """Tell it to call; what it measured."""
        self._process.stdin.write(b"call\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Raises: RuntimeError if it ends or takes too long."""
        watch = threading.Timer(LIMIT_S, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        raise RuntimeError(said[-1][:200] if said else f"its process ended with status {status}")

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def one_round(
    names: Sequence[str], shape: Sequence[int], caches: Path, failures: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """A process for each case, told to call in turn; why one failed goes into ``failures``."""
    children = {name: Child(CASES[name], shape, caches) for name in names}
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    try:
        # Nothing is measured while another process still imports.
        for step in (Child.ready, Child.call):
            for name in [name for name in names if name not in failures]:
                try:
                    found[name].update(step(children[name]))
                except (RuntimeError, OSError, ValueError) as error:
                    failures[name] = machine.first_line(error)
    finally:
        for child in children.values():
            child.end()
    return {name: answers for name, answers in found.items() if name not in failures}


def row_of(
    name: str, cold: Mapping[str, Any] | None, warm: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Medians of the warm processes in milliseconds, and how far their first calls are apart."""
    first_ms = [one["first_ms"] for one in warm]
    medians = {
        key: round(statistics.median(one[key] for one in warm), 2)
        for key in ("import_ms", "device_ms", "first_ms", "second_ms")
    }
    return {
        "case": name,
        "cold_ms": None if cold is None else round(cold["first_ms"], 2),
        **medians,
        "least_ms": round(min(first_ms), 2),
        "most_ms": round(max(first_ms), 2),
        # None where nobody counts.
        "configs_measured": warm[-1]["configs_measured"],
        "right": all(one["right"] for one in (*warm, *([cold] if cold else []))),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[16, 4096, 4096], metavar=("M", "N", "K")
    )
    parser.add_argument("--rounds", type=int, default=3, help="warm processes of each case")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="write everything here")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    failures: dict[str, str] = {}
    cold: dict[str, dict[str, Any]] = {}
    warm: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.cases}
    with tempfile.TemporaryDirectory() as caches:
        for turn in range(arguments.rounds + 1):
            left = [name for name in arguments.cases if name not in failures]
            for name, found in one_round(left, arguments.shape, Path(caches), failures).items():
                if turn > 0:
                    warm[name].append(found)
                elif CASES[name].caches not in {CASES[other].caches for other in cold}:
                    cold[name] = found
            print(f"round {turn} of {arguments.rounds}", file=sys.stderr)
    rows = [
        {"case": name, "missing": failures[name]}
        if name in failures
        else row_of(name, cold.get(name), warm[name])
        for name in arguments.cases
    ]
    # Last, so that this process has nothing on the device while others are measured.
    device = machine.gemm_kernel.tuning.resolve_device(None)
    environment = machine.environment(
        device,
        "benchmarks/latency.py",
        shape=arguments.shape,
        rounds=arguments.rounds,
        protocol="from before the first call of a process until its result is on the host, medians",
    )
    if arguments.json:
        write_results(arguments.json, environment, rows=rows)
    print(latency_table(rows))
    return 0 if all(row.get("right") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
