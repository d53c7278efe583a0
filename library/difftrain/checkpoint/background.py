"""One piece of work that a thread does while training goes on: a checkpoint that is written, flushed and committed.

It stands alone since no collective of the training's groups may be called from two threads: what the thread says to other
ranks goes through groups of its own (Ranks.beside), and the main threads vote on its end between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Run an action in a thread that does not outlive the process; hold what came of it."""

    def __init__(self, action: Callable[[], T], name: str) -> None:
        self._action, self._ended = action, threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._began, self.seconds = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ended(self, wait_s: float | None = 0.0) -> bool:
        """Tell whether it is done, now or within some seconds; None: wait for as long as it takes."""
        return self._ended.wait(wait_s)

    def result(self) -> T:
        """Return what the action returned, or raise what it raised; once it has ended."""
        assert self._ended.is_set(), "it is still going on"
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._action()
        except BaseException as error:  # of any kind: raised where the result is taken
            self._error = error
        self.seconds = time.monotonic() - self._began
        self._ended.set()
