"""Time of training: steps, waiting for data, and everything that is neither, each in its own account.

wall = compute + data wait          of the steps; the device is synchronised where an interval is closed
pauses                              saving, sampling, evaluation: in no speed figure, only in the end-to-end time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from difftrain.report.progress import SIGNS

T = TypeVar("T")

MOST_WARMUP_STEPS = 5


def warmup_steps(steps: int) -> int:
    """Return how many steps at the start of a session are left out of speed: the first min(5, a third)."""
    return min(MOST_WARMUP_STEPS, steps // 3)


class Mark(Protocol):
    """A point in the device's stream of work (an event with timing, as torch's device modules have them)."""

    def elapsed_time(self, end: Any) -> float: ...  # milliseconds, after both have passed


@dataclass
class Interval:
    """Hold the sums of some training steps. wait_s is the part of wall_s in which the device had no data."""

    steps: int = 0
    images: int = 0
    flops: float = 0.0
    wall_s: float = 0.0
    wait_s: float = 0.0

    def add(self, other: Interval) -> None:
        """Add another span's sums to this one's."""
        self.steps += other.steps
        self.images += other.images
        self.flops += other.flops
        self.wall_s += other.wall_s
        self.wait_s += other.wait_s

    @property
    def compute_s(self) -> float:
        """Return the seconds that were not spent on waiting for data."""
        return self.wall_s - self.wait_s

    @property
    def fps(self) -> float:
        """Return images a second over all cards, waiting for data included."""
        return self.images / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def compute_fps(self) -> float:
        """Return images a second over all cards, waiting for data excluded."""
        return self.images / self.compute_s if self.compute_s > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Return seconds per optimizer step, waiting for data included."""
        return self.wall_s / self.steps if self.steps else 0.0

    @property
    def step_wait_s(self) -> float:
        """Return seconds waited for data per optimizer step."""
        return self.wait_s / self.steps if self.steps else 0.0


@dataclass
class Account:
    """Hold what some sessions of a run took. Steps of the warm-up are apart, so that they can be left out."""

    sessions: int = 0
    warm: Interval = field(default_factory=Interval)
    steady: Interval = field(default_factory=Interval)
    pauses_s: dict[str, float] = field(default_factory=dict)
    e2e_s: float = 0.0

    @property
    def measured(self) -> Interval:
        """Return the span that speed is computed from: all steps where none came after the warm-up."""
        return self.steady if self.steady.steps else self.warm

    @property
    def warmup_excluded(self) -> int:
        """Return how many steps the speed leaves out."""
        return self.warm.steps if self.steady.steps else 0

    def add(self, other: Account) -> None:
        """Add another account's sums to this one's."""
        self.sessions += other.sessions
        self.warm.add(other.warm)
        self.steady.add(other.steady)
        for name, seconds in other.pauses_s.items():
            self.pauses_s[name] = self.pauses_s.get(name, 0.0) + seconds
        self.e2e_s += other.e2e_s

    @classmethod
    def of(cls, state: dict[str, Any]) -> Account:
        """Read what Clock.state wrote."""
        spans = {name: Interval(**state[name]) for name in ("warm", "steady")}
        return cls(**{**state, **spans, "pauses_s": dict(state["pauses_s"])})


class Clock:
    """Measure one session of training, and carry the account of the sessions before it.

        clock.start()
        for micro in clock.batches(loader):     # times the waiting
            engine.step(micro, counts)          # only queues work
            clock.stepped(images=global_batch)
            if step % log_every == 0:
                span = clock.read()             # synchronises; the steps since the last reading
            with clock.paused("save"): ...      # synchronises before and after
        clock.stop()

    The host is held up where an interval ends: at `read`, around pauses, and once at the end of the warm-up.
    Waiting counts as far as the device stood still meanwhile: with marks, a wait during which it still had queued
    work costs no time and is not counted; without (the device is the host), every wait is.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] = lambda: None,
        *,
        session_steps: int = 0,
        mark: Callable[[], Mark] | None = None,
        now: Callable[[], float] = time.perf_counter,
        age_s: float = 0.0,
    ) -> None:
        """Prepare a clock.

        session_steps: optimizer steps that this session is to make; its warm-up is min(5, a third) of them.
        mark: record an event with timing in the device's stream. age_s: how long the process has run already.
        """
        self._synchronize, self._mark, self._now = synchronize, mark, now
        self._born = now() - age_s
        self._warmup = warmup_steps(session_steps)
        self._before = Account()  # earlier sessions
        self._session = Account(sessions=1)
        self._interval = Interval()  # since the last reading
        self._piece = Interval()  # since the last synchronisation
        self._waits: list[tuple[float, Mark | None, Mark | None]] = []
        self._opened: float | None = None
        self._pause: tuple[str, float] | None = None  # name and beginning of the outermost one

    @property
    def running(self) -> bool:
        """Tell whether steps are being measured at this moment."""
        return self._opened is not None

    def start(self) -> None:
        """Begin to measure steps."""
        self._synchronize()
        self._opened = self._now()

    def batches(self, source: Iterable[T]) -> Iterator[T]:
        """Yield what a loader yields, and measure how long each took to come."""
        iterator = iter(source)
        while True:
            before = self._mark() if self._mark is not None else None
            began = self._now()
            try:
                item = next(iterator)
            except StopIteration:
                return
            waited = self._now() - began
            after = self._mark() if self._mark is not None else None
            self._waits.append((waited, before, after))
            yield item

    def stepped(self, images: int, flops: float = 0.0) -> None:
        """Count one optimizer step of so many images (over all cards) and model FLOPs."""
        self._piece.steps += 1
        self._piece.images += images
        self._piece.flops += flops
        if self._warmup and self._session.warm.steps + self._piece.steps == self._warmup:
            self._close()  # once a session: speed is measured from here on

    def read(self) -> Interval:
        """Synchronise the device and return the steps since the last reading."""
        self._close()
        interval, self._interval = self._interval, Interval()
        return interval

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Keep something out of the speed, and account for it under a name; inner pauses belong to the outer one."""
        if self._pause is not None:
            yield
            return
        if self.running:
            self._close()  # the steps' queued work is theirs, not the pause's
        self._pause = (name, self._now())
        try:
            with SIGNS.doing(name):
                yield
        finally:
            self._synchronize()
            ended = self._now()
            began, self._pause = self._pause[1], None
            self._session.pauses_s[name] = self._session.pauses_s.get(name, 0.0) + ended - began
            if self.running:
                self._opened = ended

    def stop(self) -> None:
        """End measuring; what was not read yet stays in the account."""
        if self.running:
            self._close()
        self._opened = None

    def session(self) -> Account:
        """Return the account of this session up to now, a pause that is going on included."""
        account = Account(e2e_s=self._now() - self._born)
        account.add(self._session)
        if self._pause is not None:
            name, began = self._pause
            account.pauses_s[name] = account.pauses_s.get(name, 0.0) + self._now() - began
        return account

    def total(self) -> Account:
        """Return the account of this session and of those that it continues."""
        account = Account()
        account.add(self._before)
        account.add(self.session())
        return account

    def state(self) -> dict[str, Any]:
        """Return the account over all sessions, for a checkpoint; call it inside a pause."""
        return asdict(self.total())

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: its sessions come before this one."""
        self._before = Account.of(state) if state else Account()

    def _close(self) -> None:
        """Synchronise, and book the steps since the last time."""
        if self._opened is None:
            raise RuntimeError("the clock was not started")
        self._synchronize()
        ended = self._now()
        self._piece.wall_s = ended - self._opened
        self._piece.wait_s = min(sum(self._stood_still(*wait) for wait in self._waits), self._piece.wall_s)
        book = self._session.warm if self._session.warm.steps < self._warmup else self._session.steady
        book.add(self._piece)
        self._interval.add(self._piece)
        self._piece, self._waits, self._opened = Interval(), [], ended

    @staticmethod
    def _stood_still(waited: float, before: Mark | None, after: Mark | None) -> float:
        if before is None or after is None:
            return waited
        return min(waited, max(before.elapsed_time(after) / 1000, 0.0))
