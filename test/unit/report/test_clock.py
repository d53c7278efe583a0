"""The clock against sums done by hand, on a time that only moves when the test says so."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from difftrain.report.clock import Clock, warmup_steps


class Time:
    """A clock face; and a device that works its queue off in the background, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device_free_at = 0.0
        self.synchronised = 0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds

    def queue(self, seconds: float) -> None:
        self.device_free_at = max(self.device_free_at, self.now) + seconds

    def synchronize(self) -> None:
        self.synchronised += 1
        self.now = max(self.now, self.device_free_at)

    def mark(self) -> Mark:
        return Mark(max(self.now, self.device_free_at))


class Mark:
    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, end: Mark) -> float:
        return 1000 * (end.at - self.at)


def loader(time: Time, waits: list[float]) -> Iterator[int]:
    for number, wait in enumerate(waits):
        time.pass_(wait)
        yield number


def test_warmup_is_the_first_five_or_a_third() -> None:
    assert [warmup_steps(n) for n in (0, 1, 2, 3, 12, 14, 15, 16, 1000)] == [0, 0, 0, 1, 4, 4, 5, 5, 5]


def test_speed_leaves_out_warmup_and_pauses_and_counts_waiting() -> None:
    time = Time()
    clock = Clock(time.synchronize, session_steps=6, now=time, age_s=100.0)  # warm-up: 2 steps
    clock.start()
    for number in clock.batches(loader(time, [5.0, 1.0, 0.5, 0.5, 0.5, 0.5])):
        time.pass_(10.0 if number < 2 else 1.5)
        clock.stepped(images=8, flops=3.0)
        if number == 3:
            with clock.paused("saving"):
                time.pass_(40.0)
                with clock.paused("inner"):
                    time.pass_(2.0)
    clock.stop()
    account = clock.total()
    assert account.warmup_excluded == 2 and account.measured.steps == 4
    assert account.measured.fps == pytest.approx(8 / 2.0)
    assert account.measured.compute_fps == pytest.approx(8 / 1.5)
    assert account.measured.step_s == pytest.approx(2.0) and account.measured.step_wait_s == pytest.approx(0.5)
    assert account.measured.flops == pytest.approx(12.0)
    assert account.pauses_s == pytest.approx({"saving": 42.0})
    assert account.e2e_s == pytest.approx(100 + 26 + 4 * 2 + 42)


def test_readings_cover_every_step_once_across_warmup_and_pauses() -> None:
    time = Time()
    clock = Clock(time.synchronize, session_steps=9, now=time)
    clock.start()
    spans = []
    for number in clock.batches(loader(time, [0.25] * 9)):
        time.pass_(0.75)
        clock.stepped(images=4)
        if number == 4:
            with clock.paused("validation"):
                time.pass_(7.0)
        if number % 4 == 3 or number == 8:
            spans.append(clock.read())
    clock.stop()
    assert [span.steps for span in spans] == [4, 4, 1]
    assert [span.fps for span in spans] == pytest.approx([4.0, 4.0, 4.0])
    assert [span.compute_fps for span in spans] == pytest.approx([4 / 0.75] * 3)


def test_the_device_is_waited_for_only_where_an_interval_ends() -> None:
    time = Time()
    clock = Clock(time.synchronize, session_steps=100, now=time)
    clock.start()
    before = time.synchronised
    for number in clock.batches(loader(time, [0.0] * 100)):
        time.queue(1.0)
        clock.stepped(images=1)
        if number % 50 == 49:
            clock.read()
    assert time.synchronised - before == 3  # two readings, one end of warm-up
    assert clock.session().measured.fps == pytest.approx(1.0)


def test_a_wait_that_the_device_did_not_notice_is_no_wait() -> None:
    """The host queues 1 s of work in no time, then waits 0.6 s for data: the device loses nothing."""
    for mark, compute_fps in ((None, 1 / 0.4), ("events", 1.0)):
        time = Time()
        clock = Clock(time.synchronize, now=time, mark=None if mark is None else time.mark)
        clock.start()
        for _ in clock.batches(loader(time, [0.0] + [0.6] * 99)):
            time.queue(1.0)
            clock.stepped(images=1)
        span = clock.read()
        assert span.fps == pytest.approx(1.0)
        assert span.compute_fps == pytest.approx(compute_fps, rel=0.02)


def test_a_wait_longer_than_the_queued_work_counts_by_its_rest() -> None:
    time = Time()
    clock = Clock(time.synchronize, now=time, mark=time.mark)
    clock.start()
    for _ in clock.batches(loader(time, [0.0] + [1.5] * 9)):
        time.queue(1.0)
        clock.stepped(images=1)
    assert clock.read().wait_s == pytest.approx(9 * 0.5)


def test_a_resumed_run_counts_both_sessions_and_leaves_out_both_warmups() -> None:
    state: dict = {}
    for seconds in (1.0, 3.0):
        time = Time()
        clock = Clock(time.synchronize, session_steps=30, now=time, age_s=10.0)
        clock.load(state)
        clock.start()
        for number in clock.batches(loader(time, [0.0] * 30)):
            time.pass_(50.0 if number < 5 else seconds)
            clock.stepped(images=2)
        with clock.paused("saving"):
            time.pass_(4.0)
            state = json.loads(json.dumps(clock.state()))
    total = clock.total()
    assert total.sessions == 2 and total.warmup_excluded == 10 and total.measured.steps == 50
    assert total.measured.fps == pytest.approx(2 / 2.0)
    assert total.pauses_s["saving"] == pytest.approx(4.0 + 4.0)
    assert total.e2e_s == pytest.approx((10 + 250 + 25 + 4) + (10 + 250 + 75 + 4))
    assert clock.session().e2e_s == pytest.approx(10 + 250 + 75 + 4)


def test_a_session_that_ends_in_its_warmup_still_has_a_speed_and_says_so() -> None:
    time = Time()
    clock = Clock(time.synchronize, session_steps=1000, now=time)
    clock.start()
    for _ in clock.batches(loader(time, [0.0] * 3)):
        time.pass_(2.0)
        clock.stepped(images=6)
    clock.stop()
    assert clock.total().measured.fps == pytest.approx(3.0) and clock.total().warmup_excluded == 0


def test_a_pause_before_the_start_is_accounted_and_a_step_before_it_is_refused() -> None:
    time = Time()
    clock = Clock(time.synchronize, now=time)
    with clock.paused("sampling"):
        time.pass_(3.0)
    assert clock.session().pauses_s == pytest.approx({"sampling": 3.0})
    with pytest.raises(RuntimeError, match="not started"):
        clock.read()


def test_an_error_inside_a_pause_leaves_the_clock_usable() -> None:
    time = Time()
    clock = Clock(time.synchronize, now=time)
    clock.start()
    with pytest.raises(OSError), clock.paused("saving"):
        time.pass_(9.0)
        raise OSError("disk full")
    time.pass_(1.0)
    clock.stepped(images=1)
    assert clock.read().wall_s == pytest.approx(1.0)
