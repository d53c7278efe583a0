"""metrics.jsonl and sessions.json over kills and restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from difftrain.report.metrics import JsonLines, read_lines
from difftrain.report.sessions import Sessions, read_sessions


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_lines_beyond_the_resume_step_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in range(1, 8):
        first.write({"step": step, "step_loss": step / 3})
    second = JsonLines(path, resume_step=4)  # the first was killed: never closed
    for step in range(5, 11):
        second.write({"step": step, "step_loss": step / 3})
    second.close()
    assert steps(path) == list(range(1, 11))
    assert [line["step_loss"] for line in read_lines(path)] == [step / 3 for step in range(1, 11)]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_torn_last_line_and_a_repeated_step_are_mended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": 1}\n{"step": 2, "x": 1}\n{"step": 2, "x": 2}\n{"step": 3, "na\xc3')
    JsonLines(path, resume_step=3).close()
    assert list(read_lines(path)) == [{"step": 1, "x": 1}, {"step": 2, "x": 2}]


def test_a_fresh_run_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonLines(path).close()
    assert path.read_text() == ""


def test_kill_9_loses_no_line_that_was_written(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from difftrain.report.metrics import JsonLines\n"
        "lines = JsonLines(Path(sys.argv[1]))\n"
        "for step in range(1, 6): lines.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "metrics.jsonl"
    library = str(Path(__file__).parents[3] / "library")
    done = subprocess.run([sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONPATH": library})
    assert done.returncode == -signal.SIGKILL
    assert steps(path) == [1, 2, 3, 4, 5]


def test_a_killed_session_is_settled_from_its_metric_lines(tmp_path: Path) -> None:
    first = Sessions(tmp_path, step=0, command="train")
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, 31):
        lines.write({"step": step, "session": first.number, "elapsed_s": 2.0 * step})
    second = Sessions(tmp_path, step=20, command="train --resume=auto")
    assert second.number == 2 and second.run_id == first.run_id and second.started == first.started
    killed = second.history[0]
    assert (killed["outcome"], killed["steps_done"], killed["elapsed_s"]) == ("killed", 30, 60.0)
    JsonLines(tmp_path / "metrics.jsonl", 20)
    second.note(100, 170.0, "finished")
    assert second.total_s == pytest.approx(230.0)
    stored = read_sessions(tmp_path)["sessions"]
    assert [s["outcome"] for s in stored] == ["killed", "finished"] and stored[1]["from_step"] == 20
    third = Sessions(tmp_path, step=100)
    assert [s["outcome"] for s in third.history] == ["killed", "finished", "running"] and third.number == 3


def test_a_run_that_goes_on_in_another_folder_keeps_its_time(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, step=8, earlier_s=50.0)
    sessions.note(12, 20.0, "finished")
    assert sessions.total_s == pytest.approx(70.0) and sessions.number == 1
    assert sessions.history[0]["outcome"].endswith("another folder")


def test_a_broken_sessions_file_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "sessions.json").write_text('{"run_id": ')
    assert Sessions(tmp_path, step=0).number == 1
    json.loads((tmp_path / "sessions.json").read_text())
