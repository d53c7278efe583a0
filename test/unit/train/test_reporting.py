"""When a report is written on the way."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from difftrain.train.reporting import EVERY_S, FIRST_S, SHARE, Reporting
from difftrain.train.state import Position

AT, END = Position(3, 6, steps_left=9), Position(12, 24, steps_left=0)


class Stage:
    """A run with a clock that is moved, and reports that take a while."""

    def __init__(self) -> None:
        self.now, self.cost_s, self.written = 100.0, 0.2, 0
        self.saving, clock = SimpleNamespace(written=0), SimpleNamespace(paused=lambda _: nullcontext())
        given: Any = self.saving, clock
        self.reporting = Reporting(self.write, *given, lambda: self.now)
        self.reporting.before_training(AT)

    def write(self) -> None:
        self.written += 1
        self.now += self.cost_s

    def after(self, seconds: float, at: Position = AT, *, saved: bool = False) -> int:
        self.now += seconds
        self.saving.written += saved
        self.reporting.after_step(at)
        return self.written


def test_after_a_while_and_every_few_minutes() -> None:
    stage = Stage()
    assert stage.after(FIRST_S - 1) == 0 and stage.after(1) == 1
    assert stage.after(EVERY_S - 1) == 1 and stage.after(1) == 2
    assert stage.after(EVERY_S, END) == 2, "the end writes its own"


def test_after_a_save_as_soon_as_the_time_allows() -> None:
    stage = Stage()
    assert stage.after(1, saved=True) == 1
    assert stage.after(1, saved=True) == 1 and stage.after(stage.cost_s / SHARE) == 2
    assert stage.after(1) == 2, "no save since"


def test_a_page_that_takes_long_is_written_rarely() -> None:
    stage = Stage()
    stage.cost_s = 6.0
    began = stage.now
    for _ in range(3000):
        stage.after(3.0, saved=True)
    share = (stage.written - 1) * stage.cost_s / (stage.now - began)
    assert stage.written > 3 and share <= SHARE


def test_a_fault_is_said_once_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()

    def full() -> None:
        stage.written += 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage.reporting, "_write", full)
    with caplog.at_level("WARNING", "difftrain"):
        assert stage.after(FIRST_S) == 1 and stage.after(EVERY_S) == 2
    assert len(caplog.records) == 1
