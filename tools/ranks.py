"""Tuning by the ranks of a `torchrun`: each takes the next weight that is left, and rank 0 writes.

All goes through the key-value store of torch.distributed's rendezvous. There is no collective operation, in
which a rank that died would leave the others waiting.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable

import torch.distributed

# A rank that says nothing for so long is dead.
DEAD_AFTER_S = 60.0
_INTERVAL_S = 0.2


def is_distributed() -> bool:
    """Is this process one of several that `torchrun` started?"""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class Ranks:
    """The store that the ranks share, and what each puts there: it is alive, has taken a job, has a result."""

    def __init__(self) -> None:
        store, self.rank, self.size = next(torch.distributed.rendezvous("env://"))
        self._store = torch.distributed.PrefixStore("tune", store)
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self._results = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._tell_alive, daemon=True).start()

    def _tell_alive(self) -> None:
        count = 0
        # A client of its own: a call that waits would hold up the others.
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        while not self._is_over.wait(_INTERVAL_S):
            count += 1
            store.set(f"alive/{self.rank}", str(count))

    def share(self, content: Any) -> Any:
        """The ``content`` of rank 0, for all ranks."""
        if self.rank == 0:
            self._store.set("shared", json.dumps(content))
        return json.loads(self._store.get("shared"))

    def claim(self, count: int) -> Iterator[int]:
        """The numbers of the jobs, from 0 to ``count``, that this rank is to do, one at a time."""
        while True:
            index = self._store.add("claimed", 1) - 1
            if index >= count or self._store.check(["stopped"]):
                return
            yield index

    def stop(self) -> None:
        """Let no rank claim another job."""
        self._store.set("stopped", "1")

    def send(self, result: Any) -> None:
        """Hand a result to rank 0."""
        self._store.set(f"result/{self.rank}/{self._results}", json.dumps(result))
        self._results += 1

    def leave(self) -> None:
        """Say that no more results will come."""
        self._store.set(f"left/{self.rank}", "1")
        if self.rank != 0:
            self.end()

    def end(self) -> None:
        """Be silent from now on."""
        self._is_over.set()

    def receive(self, take: Callable[[Any], None]) -> list[int]:
        """Hand all results to ``take``, until every rank has left or is dead. Returns: those that are dead."""
        store = self._store
        taken = [0] * self.size
        heard = {rank: ("", time.monotonic()) for rank in range(self.size)}
        running, dead = set(range(self.size)), []
        while running:
            for rank in sorted(running):
                has_left = store.check([f"left/{rank}"])
                while store.check([f"result/{rank}/{taken[rank]}"]):
                    take(json.loads(store.get(f"result/{rank}/{taken[rank]}")))
                    taken[rank] += 1
                if has_left:
                    running.discard(rank)
                elif not self._is_alive(rank, heard):
                    running.discard(rank)
                    dead.append(rank)
            time.sleep(_INTERVAL_S)
        self.end()
        return dead

    def _is_alive(self, rank: int, heard: dict[int, tuple[str, float]]) -> bool:
        key = f"alive/{rank}"
        count = self._store.get(key).decode() if self._store.check([key]) else ""
        now = time.monotonic()
        if count != heard[rank][0]:
            heard[rank] = count, now
        return now - heard[rank][1] < DEAD_AFTER_S
