"""How far a run is, in a line of a log, and a sign of life where nothing else has been printed for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

FIRST_S = 3.0  # of silence, before the first line
SILENCE_S = 10.0  # of silence, later
_LOOK_S = 0.5

Text = str | Callable[[], str]


# ---------------------------------------------------------------------- a line of a log


class Progress:
    """Count steps of a run, and say how far it is: `23:01:07 step 20/3000 (0.7 %) epoch 1 | 4.61 steps/s, 11 min left`."""

    def __init__(self, total: int, done: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        """Begin. total: steps of the whole run. done: those made by earlier sessions."""
        self.total, self.step, self.epoch = total, done, 0
        self._now = now
        self._from, self._since = done, 0.0
        self._started = False

    def advance(self, step: int) -> None:
        """Take note of a step that is done. The rate leaves out the first one of a session, which prepares much."""
        self.step = step
        if not self._started:
            self._started, self._from, self._since = True, step, self._now()

    def head(self) -> str:
        """Return the beginning of a step's line, with the time of day."""
        return f"{_time_of_day(int(time.time()))} {self.text()}"

    def text(self) -> str:
        """Return step, total, share, epoch, rate and time left."""
        share = 100 * self.step / self.total if self.total else 100.0
        epoch = f" epoch {self.epoch}" if self.epoch else ""
        steps, seconds = self.step - self._from, self._now() - self._since
        if not self._started or steps < 1 or seconds <= 0:
            return f"step {self.step}/{self.total} ({share:.1f} %){epoch}"
        rate, left = steps / seconds, (self.total - self.step) * seconds / steps
        speed = f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"
        time_left = f", {duration(left)} left" if left > 0 else ""
        return f"step {self.step}/{self.total} ({share:.1f} %){epoch} | {speed}{time_left}"


@lru_cache(1)  # asking the system for the time zone costs more than the rest of a line
def _time_of_day(second: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(second))


def duration(seconds: float) -> str:
    """Return a time for people: 41 s, 11 min, 3 h 20 min, 2 d 3 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


# ---------------------------------------------------------------------- a sign of life


class SignsOfLife:
    """Say what is being done where nothing has been printed for a while: reading weights may take minutes.

    `doing` names it, `heard` takes note of what is printed; a thread looks twice a second while `printed_by` holds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._doing: list[tuple[Text, float]] = []  # the innermost last, and since when
        self._heard_at, self._limit_s = now(), FIRST_S
        self._log: Callable[[str], None] | None = None
        self._end = threading.Event()

    def heard(self) -> None:
        """Take note that something was printed."""
        self._heard_at, self._limit_s = self._now(), SILENCE_S

    @contextmanager
    def doing(self, what: Text) -> Iterator[None]:
        """Name what is done inside; of a text that is made when it is needed, an empty one is not said."""
        self._doing.append((what, self._now()))
        try:
            yield
        finally:
            self._doing.pop()

    def now(self, what: str) -> None:
        """Name what is done from here on, inside the innermost `doing`."""
        if self._doing:
            self._doing[-1] = (what, self._now())

    def look(self) -> None:
        """Say what is being done, if nothing has been printed for long enough."""
        if self._log is None or not self._doing or self._now() - self._heard_at < self._limit_s:
            return
        what, since = self._doing[-1]
        text = f"{what}, {duration(self._now() - since)} so far" if isinstance(what, str) else what()
        if text:
            self.heard()
            self._log(text)

    @contextmanager
    def printed_by(self, log: Callable[[str], None]) -> Iterator[None]:
        """Print signs of life while inside; one inside another takes over until it ends."""
        before, self._log = self._log, log
        thread = None
        if before is None:
            self._end.clear()
            thread = threading.Thread(target=self._watch, name="signs of life", daemon=True)
            thread.start()
        try:
            yield
        finally:
            self._log = before
            if thread is not None:
                self._end.set()
                thread.join(2 * _LOOK_S)

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_S):
            self.look()


SIGNS = SignsOfLife()  # of this process
