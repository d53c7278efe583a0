"""What the loop does with wishes at a step's end."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from difftrain.train import loop
from difftrain.train.triggers import EXPORT, NOTHING, PERIODIC, QUIT, SAMPLE, SAVE, STOP, Requests


class Nothing:
    """Take any call; a batch is a step."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def batches(self, steps: Any) -> Any:
        return steps


def steps_done(monkeypatch: pytest.MonkeyPatch, wish: int, *, saved: bool, drawn: Any = None) -> int:
    """Train five steps, ask for something at the second, and return how many were done. drawn: called with each samples."""
    wishes = iter((NOTHING, wish, NOTHING, NOTHING, NOTHING))
    run: Any = SimpleNamespace(
        clock=Nothing(), steps_left=0, flops=lambda micro: 0.0, position=SimpleNamespace(step=1),
        model=SimpleNamespace(engine=Nothing(), averages=Nothing(), parts=None),
        plan=SimpleNamespace(counts=lambda step: [(SimpleNamespace(bucket=None), 1)]), progress=SimpleNamespace(step=0, samples_seen=0),
        ranks=SimpleNamespace(agree=lambda wanted: wanted, doing=lambda what: None), device=Nothing(), cfg=None,
    )  # fmt: skip
    saving: Any = SimpleNamespace(
        requested=lambda: next(wishes),
        save_now=lambda at, export, wait: saved and wait is (wish != PERIODIC),
        sampled=lambda: drawn("taken"),
    )
    monkeypatch.setattr(loop, "in_step", lambda *_: nullcontext())
    monkeypatch.setattr(loop, "check_encoders", lambda *_: None)
    meter: Any = SimpleNamespace(
        counted=lambda micro: nullcontext(), say_memory=lambda *_: None, after_step=lambda *_: None
    )
    loop._steps(run, [[]] * 5, [], meter, saving, Requests(), drawn)
    return int(run.progress.step)


@pytest.mark.parametrize(
    ("wish", "saved", "done"),
    [
        (PERIODIC, True, 5),
        (SAVE, True, 5),
        (EXPORT, False, 5),
        (QUIT, True, 2),
        (QUIT, False, 5),
        (STOP, True, 2),
        (STOP, False, 2),
    ],
)
def test_a_run_ends_where_it_is_asked_and_has_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wish: int, saved: bool, done: int
) -> None:
    """save_quit on a full disk loses nothing: the run goes on; a signal does not wait."""
    with caplog.at_level(logging.ERROR, "difftrain"):
        assert steps_done(monkeypatch, wish, saved=saved) == done
    assert ({record.levelno for record in caplog.records} == {logging.ERROR}) is not saved
    assert ("without stopping" in caplog.text) is (wish == QUIT and not saved)


def test_samples_are_drawn_once_and_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    assert steps_done(monkeypatch, SAMPLE, saved=False, drawn=drawn.append) == 5
    assert [drawn[0], drawn[1].step] == ["taken", 1]  # the request, then the samples, at the position of the step
