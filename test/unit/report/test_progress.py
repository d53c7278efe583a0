"""How far a run is, and signs of life: by a clock that the test moves."""

from __future__ import annotations

import re
import time

import pytest

from difftrain.report.progress import FIRST_S, SILENCE_S, Progress, SignsOfLife, duration


class Time:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_line_tells_total_rate_and_time_left() -> None:
    clock = Time()
    progress = Progress(3000, now=clock)
    assert progress.text() == "step 0/3000 (0.0 %)"
    clock.now += 30  # the first step compiles: it is no measure
    progress.advance(1)
    progress.epoch = 1
    assert progress.text() == "step 1/3000 (0.0 %) epoch 1"
    for step in range(2, 21):
        clock.now += 0.25
        progress.advance(step)
    assert progress.text() == "step 20/3000 (0.7 %) epoch 1 | 4 steps/s, 12 min left"
    assert re.fullmatch(r"\d\d:\d\d:\d\d step 20/3000 \(0\.7 %\) epoch 1 \| .*", progress.head())


def test_a_resumed_run_counts_all_steps_and_times_its_own() -> None:
    clock = Time()
    progress = Progress(100, done=40, now=clock)
    for step in (41, 42):
        clock.now += 8
        progress.advance(step)
    share, _, speed = progress.text().partition(" | ")
    assert share == "step 42/100 (42.0 %)" and re.findall(r"\d+", speed) == ["8", "8"]  # seconds of one, minutes left
    progress.advance(100)
    assert "left" not in progress.text()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (100, "2 min"), (12000, "3 h 20 min"), (183600, "2 d 3 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_silence_is_broken_once_a_while_by_what_is_done() -> None:
    clock, said = Time(), list[str]()
    signs = SignsOfLife(clock)

    def after(seconds: float) -> int:
        clock.now += seconds
        signs.look()
        return len(said)

    assert after(100) == 0, "nobody prints them, and nothing is done"
    signs.heard()
    signs._log = said.append
    with signs.doing("loading"):
        assert after(SILENCE_S - 1) == 0 and after(1) == 1 and after(1) == 1
        with signs.doing("reading"):
            signs.now("sorting")
            assert after(SILENCE_S) == 2 and "sorting" in said[-1] and "reading" not in said[-1]
        signs.heard()
        assert after(SILENCE_S - 1) == 2, "something else was printed"
        assert after(1) == 3 and "loading" in said[-1]
        with signs.doing(lambda: ""):
            assert after(2 * SILENCE_S) == 3, "a progress bar shows it"
    assert after(2 * SILENCE_S) == 3


def test_the_first_sign_comes_within_five_seconds_of_the_start() -> None:
    assert FIRST_S + 1 < 5 and SILENCE_S + 1 < 15
    clock, said = Time(), list[str]()
    signs = SignsOfLife(clock)
    signs._log = said.append
    with signs.doing("loading"):
        clock.now += FIRST_S
        signs.look()
    assert len(said) == 1


def test_a_thread_says_them_until_it_is_no_longer_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = list[str](), list[str]()
    signs = SignsOfLife()
    with signs.printed_by(outer.append), signs.doing("loading"):
        with signs.printed_by(inner.append):
            signs._heard_at -= 2 * SILENCE_S
            until = time.monotonic() + 5
            while not inner and time.monotonic() < until:
                time.sleep(0.02)
        assert inner and not outer
    assert signs._log is None
