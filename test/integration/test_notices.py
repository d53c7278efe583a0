"""Notices at the door: a run that finishes, one that fails, and one whose webhook is away."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from doors import Door, losses, wait_for
from hooks import Webhook, webhook

SECRET = "very-secret-word"


@pytest.fixture(scope="module")
def hook() -> Iterator[Webhook]:
    with webhook() as served:
        yield served


def test_a_run_that_finishes_and_leaves_no_trace_of_the_address(door: Door, hook: Webhook, tmp_path: Path) -> None:
    hook.notices.clear()
    out = tmp_path / "out"
    said = door.run(door.flags(out, f"--webhook_url={hook.url}", steps=4))
    saved = [notice for notice in hook.notices if notice["event"] == "saved"]
    assert hook.events[0] == "started" and hook.events[-1] == "finished" and len(saved) == len(hook.events) - 2
    assert {next(key for key in ("checkpoint", "export") if key in notice) for notice in saved} == {
        "checkpoint",
        "export",
    }
    assert all(notice["run"] == "out" and notice["total_steps"] == 4 for notice in hook.notices)
    assert hook.notices[-1]["step"] == 4 and hook.notices[-1]["loss"] == pytest.approx(losses(out)[-1])
    files = [path for path in out.rglob("*") if path.is_file()]
    assert SECRET not in said and not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_run_that_fails_says_why(door: Door, hook: Webhook, tmp_path: Path) -> None:
    hook.notices.clear()
    flags = door.flags(
        tmp_path / "out", "--learning_rate=1e30", "--max_skipped_steps=3", "--optimizer_type=SGDNesterov"
    )
    said = door.run(flags, expect=None, DIFFTRAIN_WEBHOOK_URL=hook.url)
    assert hook.events[0] == "started" and "non_finite" in hook.events and hook.events[-1] == "failed"
    assert hook.notices[-1]["error"] in said and hook.notices[-1]["kind"] == "TrainingFault"


def test_a_webhook_that_is_away_is_named_once_and_the_run_is_the_same(
    door: Door, straight: Path, hook: Webhook, tmp_path: Path
) -> None:
    hook.notices.clear()
    hook.status = 500
    out = tmp_path / "out"
    process = door.start(door.flags(out), DIFFTRAIN_WEBHOOK_URL=hook.url)
    wait_for(lambda: (out / "metrics.jsonl").is_file() and len(losses(out)) >= 5)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    hook.status = 200
    assert process.returncode in (0, 128 + signal.SIGTERM)
    assert hook.events[-1] in ("stopped", "finished")
    assert sum("127.0.0.1" in line and " 500" in line for line in said.splitlines()) == 1 and SECRET not in said
    assert losses(out) == losses(straight)[: len(losses(out))]
