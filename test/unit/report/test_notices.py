"""Notices to a webhook: what is sent when, and that nothing of it reaches the run."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hooks import Webhook, webhook
from refusals import names

from difftrain.config.secrets import WEBHOOK
from difftrain.contracts import ConfigFault, TrainingFault
from difftrain.report import notices as module
from difftrain.report.line import StepMetrics
from difftrain.report.notices import Notices, Pace, open_notices


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setattr(logging.getLogger("difftrain"), "propagate", True)
    with webhook() as served:
        monkeypatch.setenv(WEBHOOK, served.url)
        yield served


def metrics(step: int, *, step_s: float = 1.0, skipped: int = 0, loss: float = 0.5) -> StepMetrics:
    return StepMetrics(
        step=step, epoch=1, step_loss=loss, avr_loss=0.5, lr=1e-4, grad_norm=1.0, fps=8.0, compute_fps=9.0, data_wait_s=0.0,
        peak_memory_gib=1.0, samples_seen=8 * step, step_s=step_s, skipped=skipped,
    )  # fmt: skip


def test_a_notice_says_what_and_of_which_run(hook: Webhook, tmp_path: Path) -> None:
    with open_notices(True) as notices:
        notices.describe(tmp_path / "night run", 100)
        notices.send("started", "begins", step=0)
        notices.line(metrics(7, loss=math.nan))
        notices.send("saved", "checkpoint c", checkpoint="c")
    assert hook.events == ["started", "saved"]
    first, second = hook.notices
    assert first["run"] == "night run" and first["total_steps"] == 100 and first["host"] == socket.gethostname()
    assert names(first["text"], "night run") and first["content"] == first["text"] and first["step"] == 0
    assert (second["step"], second["loss"], second["fps"], second["checkpoint"]) == (7, None, 8.0, "c")


def test_without_an_address_and_on_other_ranks_nothing_is_sent(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_notices(False) as notices:
        notices.send("started", "begins")
    monkeypatch.delenv(WEBHOOK)
    with open_notices(True) as notices:
        notices.send("started", "begins")
        notices.line(metrics(1))
    assert hook.paths == []


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (TrainingFault("the disk is full"), "failed"),
        (ValueError(), "failed"),
        (SystemExit(143), "stopped"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_how_a_run_ends_by_an_error(hook: Webhook, error: BaseException, event: str) -> None:
    with pytest.raises(type(error)), open_notices(True):
        raise error
    (notice,) = hook.notices
    assert notice["event"] == event and notice.get("error", "") == (
        str(error) or "ValueError" if event == "failed" else ""
    )


def test_secrets_stay_out_of_notices(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "tok-en-of-a-hub-77")
    with pytest.raises(ValueError), open_notices(True):
        raise ValueError(f"cannot reach tok-en-of-a-hub-77 by {hook.url}")
    assert "tok-en" not in str(hook.notices) and "very-secret" not in str(hook.notices)


@pytest.mark.parametrize("status", [404, 500, 302])
def test_a_refusal_is_said_once_without_the_address(
    hook: Webhook, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    hook.status = status
    with open_notices(True) as notices:
        for _ in range(3):
            notices.send("saved", "x")
    (record,) = caplog.records
    assert names(record.getMessage(), status) and "secret" not in record.getMessage()
    assert len(hook.paths) == 6 and {method for method, _ in hook.paths} == {"POST"}, (
        "each is tried twice, nowhere else"
    )


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setattr(logging.getLogger("difftrain"), "propagate", True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    notices = Notices(f"http://127.0.0.1:{port}/secret")
    notices.send("started", "x")
    notices.close()
    (record,) = caplog.records
    assert "secret" not in record.getMessage()


def test_a_slow_service_delays_nothing(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 5)
    hook.delay_s = 0.5
    notices = Notices(hook.url)
    began = time.monotonic()
    for _ in range(50):
        notices.send("saved", "x")
    sent = time.monotonic() - began
    notices.close(limit_s=0.2)
    assert sent < 0.2 and time.monotonic() - began < 1.0 and len(hook.paths) <= 2


def test_an_address_that_is_none_is_a_fault_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEBHOOK, "hooks.example/secret")
    with pytest.raises(ConfigFault) as caught, open_notices(True):
        pass
    assert names(caught.value, WEBHOOK) and "secret" not in str(caught.value)


def test_skipped_updates_are_sent_at_most_every_ten_minutes(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    notices = Notices(hook.url)
    for step, skipped in enumerate([4, 4, 5, 6, 6], 1):  # a resumed run begins with what was skipped before
        notices.line(metrics(step, skipped=skipped))
        clock[0] += 60
    clock[0] += 600
    notices.line(metrics(6, skipped=7))
    notices.close()
    assert [(notice["event"], notice["skipped"], notice["step"]) for notice in hook.notices] == [
        ("non_finite", 5, 3),
        ("non_finite", 7, 6),
    ]


def test_slow_is_three_lines_of_twice_the_usual_time_and_is_said_once(hook: Webhook) -> None:
    notices = Notices(hook.url)
    took = [1.0] * 20 + [2.5, 2.5, 1.0] + [2.5] * 30 + [1.0] * 5 + [2.5] * 3
    for step, step_s in enumerate(took, 1):
        notices.line(metrics(step, step_s=step_s))
    notices.close()
    assert hook.events == ["slow", "slow"]
    assert [(notice["step"], notice["usual_step_s"]) for notice in hook.notices] == [(26, 1.0), (61, 1.0)]


def test_the_first_steps_and_what_is_no_time_are_not_slow() -> None:
    pace = Pace()
    assert not any(pace.slowed(step_s) for step_s in [9.0, 5.0, 1.0, 9.0, math.nan, 0.0, 9.0, 9.0, 9.0])
