"""Which runs there are below a folder, and what their files tell of them: whole, half written, damaged or hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from watched import line, older, run_folder

from difftrain.watch.runs import ask, find_runs, log_end, newest_samples, sample_picture, status_of


def test_runs_are_found_down_to_six_folders_the_newest_first(tmp_path: Path) -> None:
    run_folder(tmp_path / "a")
    old = run_folder(tmp_path / "output" / "sd3_light" / "tiny" / "runs" / "20260101_000000")  # as train.py lays it
    for name in ("metrics.jsonl", "sessions.json", "run.json"):
        older(old / name, 100)
    run_folder(tmp_path / "1/2/3/4/5/6/too_deep")
    run_folder(tmp_path / ".hidden" / "c")
    run_folder(tmp_path / "a" / "inside")  # what a run holds is its own
    assert list(find_runs(tmp_path)) == ["a", "output/sd3_light/tiny/runs/20260101_000000"]
    assert set(find_runs(tmp_path / "a")) == {".", "inside"}


def test_a_run_is_called_by_its_folder_even_where_that_is_watched_itself(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(run_folder(tmp_path / "mine"))
    assert status_of(".", Path()).title == "mine" and status_of("x/y", tmp_path / "mine").title == "x/y"


def test_a_link_is_no_run_and_shows_no_file(tmp_path: Path) -> None:
    outside = run_folder(tmp_path / "outside")
    (outside / "secret.log").write_text("secret")
    root = tmp_path / "root"
    run = run_folder(root / "run")
    (root / "link").symlink_to(outside)
    assert list(find_runs(root)) == ["run"]

    (run / "console.log").unlink()
    (run / "console.log").symlink_to(outside / "secret.log")
    assert log_end(run)[1] == ""
    (run / "sample" / "link.png").symlink_to(outside / "sample" / "grid_000030.png")
    assert newest_samples(run) == ["grid_000030.png"] and not sample_picture(run, "link.png")
    os.mkfifo(run / "pipe.log")  # would be waited for
    assert log_end(run)[1] == ""

    (run / "save").symlink_to(outside / "made")
    ask(run, "save")
    assert not (outside / "made").exists()


@pytest.mark.parametrize(
    "name", ["../console.log", "/etc/passwd", "..", "", ".png", "a/b.png", "grid\0.png", "none.png"]
)
def test_a_sample_is_a_picture_of_the_sample_folder(tmp_path: Path, name: str) -> None:
    run = run_folder(tmp_path)
    (run / "sample" / "text.png").write_text("no picture")
    assert sample_picture(run, name) == b"" and sample_picture(run, "text.png") == b""
    assert sample_picture(run, "grid_000030.png").startswith(b"\x89PNG")


def test_progress_and_time_left(tmp_path: Path) -> None:
    status = status_of("r", run_folder(tmp_path))
    assert (status.state, status.step, status.total_steps, status.share) == ("running", 30, 100, 0.3)
    assert (status.loss, status.fps, status.step_s, status.left_s) == (0.25, 8.5, 2.0, 140.0)
    assert status.requested == () and status.epoch == 1
    ask(tmp_path, "stop")
    ask(tmp_path, "stop")  # asked for twice is asked for
    assert (tmp_path / "save_quit").is_file() and status_of("r", tmp_path).requested == ("stop",)


@pytest.mark.parametrize(
    ("outcome", "alive", "state"),
    [
        ("running", True, "running"),
        ("running", False, "killed"),
        ("finished", True, "finished"),
        ("stopped", False, "stopped"),
        ("failed", False, "failed"),
    ],
)
def test_states(tmp_path: Path, outcome: str, alive: bool, state: str) -> None:
    status = status_of("r", run_folder(tmp_path, outcome=outcome, alive=alive))
    assert status.state == state and (status.left_s is not None) == (state == "running")


def test_a_run_of_another_machine_lives_as_long_as_its_heartbeat(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    claim = run / ".claim" / "00000002.json"
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "boot": "elsewhere"}))
    assert status_of("r", run).state == "running"
    older(claim, 61)
    assert status_of("r", run).state == "killed"
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "released": True}))
    assert status_of("r", run).state == "killed"


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 20_000, b"[1, 2]", b'{"sessions": 7}', b"null", b'{"step": 4']
)
def test_damaged_files_are_read_as_far_as_they_go(tmp_path: Path, content: bytes) -> None:
    run = run_folder(tmp_path)
    for name in ("sessions.json", "run.json", "report.json", "config.toml", ".claim/00000002.json"):
        (run / name).write_bytes(content)
    (run / "metrics.jsonl").write_bytes(
        line(7).encode() + b'{"step": "8"}\n' + b'{"step": 9, "step_loss": "x"}\n' + content
    )
    status = status_of("r", run)
    assert status.step == 9 and status.loss is None and status.total_steps is None
    assert status.state in ("running", "unknown")


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    status = status_of("r", tmp_path)
    assert (status.state, status.step, status.share, status.changed) == ("unknown", 0, None, 0.0)


def test_the_end_of_the_log_is_the_consoles_and_not_the_summary(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    (run / "report.json").write_text('{"case_name": "Net_bs1_1p_acc"}')
    (run / "Net_bs1_1p_acc.log").write_text("Network = Net\n")
    name, text = log_end(run)
    assert name == "console.log" and text.splitlines()[0] == "step=29"
    (run / "console.log").write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert len(log_end(run)[1].splitlines()) == 200 and log_end(run)[1].endswith("line 99999")
