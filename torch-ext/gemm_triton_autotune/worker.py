"""A process of the tuner that is ready to be lost, seen from both sides: `Worker` calls, `serve` answers.

A configuration can hang, end the process that runs it, or leave its GPU in a state in which nothing works
any more. So none runs in the caller's process: a process that does not answer in time is killed, and the next
call starts a new one. Messages are lines of JSON on the standard streams of the child, which starts
from the package's own folder, wherever that was loaded from.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any, Callable

import torch
import triton

from . import measure
from .bench import Bench, CompileTarget, Problem, Skip, compile_config
from .config import Config

# To start is to import torch.
START_LIMIT_S = 300.0
_END_LIMIT_S = 30.0

# Isolated, so that nothing in the current folder is imported in place of a library; then with the
# parent's path, so that both find the same ones.
_BOOT = """
import importlib.util, json, sys
start = json.loads(sys.stdin.buffer.readline())
sys.path[:] = start["sys_path"]
spec = importlib.util.spec_from_file_location(start["package"], start["file"])
package = importlib.util.module_from_spec(spec)
sys.modules[start["package"]] = package
spec.loader.exec_module(package)
importlib.import_module(start["package"] + ".worker").serve(start)
"""


TOO_LONG = "took too long"


class Lost(Skip):
    """The process was lost to what it ran."""


class Worker:
    """A child process and the calls that it serves, one at a time."""

    def __init__(self, role: str, **options: Any) -> None:
        self._start_message = {
            "sys_path": sys.path,
            "package": __package__,
            "file": sys.modules[__package__].__file__,
            "role": role,
            "options": options,
        }
        self._process: subprocess.Popen | None = None
        # How many processes there were: what was set up in an earlier one is not in this one.
        self.starts = 0

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start a process and wait until it is ready. Raises: RuntimeError if that fails."""
        self.close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.starts += 1
        self._replies: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(
            target=_read_lines, args=(self._process.stdout, self._replies.put), daemon=True
        ).start()
        try:
            self._send(self._start_message)
            self._receive(START_LIMIT_S)
        except Skip as error:
            raise RuntimeError(
                f"a process of the tuner does not start: it {error.reason} ({error.detail})"
            ) from None

    def call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        """What ``method`` of the process's role returns; each step of it may take ``limit_s`` seconds.

        Raises: Skip as the method does, or `Lost`; RuntimeError for anything else that it raises.
        """
        if not self.is_running():
            self.start()
        self._send({"method": method, "arguments": arguments})
        turn = None
        while True:
            try:
                reply = self._receive(limit_s)
            except Lost as lost:
                lost.turn = turn
                raise
            if "turn" not in reply:
                break
            turn = reply["turn"]
        if "result" in reply:
            return reply["result"]
        reason, detail = reply["reason"], reply["detail"]
        if reply["broken"]:
            self.close()
            raise Lost("broke the device", f"{reason}: {detail}", turn)
        if reply["is_skip"]:
            raise Skip(reason, detail, turn)
        raise RuntimeError(f"{reason}: {detail}")

    def close(self) -> None:
        """End the process, whatever it is at."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_LIMIT_S)  # a driver may keep it for ever
            with contextlib.suppress(OSError):
                process.stdin.close()
            self._errors.close()

    def _send(self, message: Any) -> None:
        # A process that is gone is noticed by the answer that does not come.
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self, limit_s: float) -> dict[str, Any]:
        try:
            reply = self._replies.get(timeout=limit_s)
        except queue.Empty:
            self.close()
            raise Lost(TOO_LONG, f"no answer in {limit_s:g} s") from None
        if reply is None:
            status, said = self._process.wait(), self._last_words()
            self.close()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise Lost("ended its process", f"{how}: {said}")
        return reply

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:200] if lines else "no message"


def _read_lines(stream: Any, put: Callable[[Any], None]) -> None:
    with stream:
        for line in stream:
            # A library that is imported may print whatever it likes before the stream is ours.
            with contextlib.suppress(ValueError):
                put(json.loads(line))
    put(None)


def serve(start: dict[str, Any]) -> None:
    """The child's side: answer calls until the parent closes the stream, or is gone."""
    # The terminal sends an interrupt to all; what it means for this process, the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else writes to the standard output does not disturb the answers

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(
        target=_read_lines,
        # Nobody is left to answer, and this process may be in the middle of something endless.
        args=(sys.stdin.buffer, lambda line: os._exit(0) if line is None else requests.put(line)),
        daemon=True,
    ).start()
    role = _ROLES[start["role"]](lambda index: reply(turn=index), **start["options"])
    reply(ready=True)
    while True:
        request = requests.get()
        try:
            reply(result=getattr(role, request["method"])(*request["arguments"]))
        except Exception as error:
            skip = Skip.because_of(error)
            broken = not role.works()
            reply(
                is_skip=isinstance(error, Skip),
                reason=skip.reason,
                detail=(skip.detail or str(error.__cause__ or ""))[:1000],
                broken=broken,
            )
            if broken:
                os._exit(1)


class _Measurer:
    """A `Bench`, made anew for each problem."""

    def __init__(self, on_turn: Callable[[int], None], device: str) -> None:
        self._on_turn = on_turn
        self._device = torch.device(device)
        self._bench: Bench | None = None

    def works(self) -> bool:
        return measure.device_works(self._device)

    def open(self, *problem: Any) -> None:
        self._bench = None
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
        timer = measure.own_timer(self._device)
        self._bench = Bench(Problem(*problem), self._device, timer)
        self._bench.warm_up()

    def set_rows(self, M: int) -> None:
        self._bench.set_rows(M)

    def quick_ms(self, config: Config) -> float:
        return self._bench.quick_ms(config)

    def torch_ms(self) -> float:
        return self._bench.torch_ms()

    def interleaved_ms(self, configs: list, rounds: int) -> list[list[float]]:
        return self._bench.interleaved_ms(configs, rounds, self._on_turn)

    def verify(self, config: Config) -> None:
        self._bench.verify(config)


class _Compiler:
    """Compiles for a target; needs no GPU and takes none of its memory."""

    def __init__(self, on_turn: Callable[[int], None], target: list, backend: str) -> None:
        # The process that measures comes first, or its times would be those of waiting for a core.
        if hasattr(os, "nice"):
            os.nice(10)
        triton.runtime.driver.set_active(CompileTarget(*target))
        self._backend = backend

    def works(self) -> bool:
        return True

    def compile(self, problem: list, M: int, config: Config) -> None:
        compile_config(Problem(*problem), M, config, self._backend)


_ROLES: dict[str, Callable] = {"measure": _Measurer, "compile": _Compiler}
