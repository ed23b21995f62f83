"""Progress of a tuning run: a bar on a terminal, elsewhere a line for each M."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm


class Progress:
    """Told of candidates and of finished Ms, of which there are ``total``."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
            self._bar = tqdm(total=total, bar_format=form, leave=False)

    def candidate(self, problem: Any, M: int, done: int, total: int, best_ms: float) -> None:
        """``done`` of ``total`` candidates were looked at for ``M``."""
        if self._bar is not None:
            self._bar.n = min(self._done + done / total, self._total)
            self._bar.set_description_str(
                f"({problem.N}, {problem.K}) {problem.layout} M={M}", refresh=False
            )
            self._bar.set_postfix_str(f"best {best_ms * 1e3:.1f} µs")

    def finished(self, problem: Any, M: int, outcome: str) -> None:
        """``M`` is done, and ``outcome`` says how."""
        self._done += 1
        if self._bar is not None:
            self._bar.n = self._done
            self._bar.refresh()
            return
        per_m = (time.monotonic() - self._started) / self._done
        left_s = round(per_m * (self._total - self._done))
        print(
            f"[{self._done}/{self._total}] ({problem.N}, {problem.K}) {problem.layout} M={M}: {outcome}; "
            f"about {left_s // 60}:{left_s % 60:02} left",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
