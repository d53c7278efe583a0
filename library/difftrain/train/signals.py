"""Signals as requests: a handler only notes what was asked, the loop acts on it at a step boundary.

SIGUSR1 asks for a checkpoint; SIGTERM and SIGINT ask for a checkpoint and the end of the run, with the exit code
128 + signal that shells expect. torchrun and terminals send one wish twice, to the group and to each process: only a
signal that comes seconds after the first is impatience, and ends the process at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

IMPATIENT_S = 5.0
# ordered: over the ranks the largest request wins. Of a checkpoint; with an export; with one, and to end; and to end
NOTHING, SAVE, EXPORT, QUIT, STOP = range(5)


class Requests:
    """Hold what signals have asked of this process since it was last taken."""

    def __init__(self) -> None:
        self._wanted = NOTHING
        self._heeded = False
        self.stop_signal = 0
        self._asked_at = 0.0

    def take(self) -> int:
        """Return the largest request so far; a save is asked once, a stop stays."""
        wanted = self._wanted
        if wanted == SAVE:
            self._wanted = NOTHING
        return wanted

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._wanted = max(self._wanted, SAVE)
            return
        if not self._heeded:  # nothing is lost yet, or all is saved: nobody waits for a step boundary
            raise SystemExit(128 + number)
        if self._wanted == STOP:
            if time.monotonic() - self._asked_at > IMPATIENT_S:
                raise SystemExit(128 + number)
            return
        self._wanted, self.stop_signal, self._asked_at = STOP, number, time.monotonic()

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Turn stops into requests while the loop runs, which acts on them; outside, a stop ends the process."""
        self._heeded = True
        try:
            yield
        finally:
            self._heeded = False

    @contextmanager
    def listening(self) -> Iterator[Requests]:
        """Install the handlers, and put the former ones back."""
        numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
        former = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
