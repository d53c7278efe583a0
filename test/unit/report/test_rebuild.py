"""`difftrain report`: a page from whatever a run has left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from refusals import names
from reports import config, facts

from difftrain.cli import main
from difftrain.config.toml import dump
from difftrain.io import process
from difftrain.report.metrics import JsonLines, step_records
from difftrain.report.rebuild import rebuild
from difftrain.report.report import make_report, write_report
from difftrain.report.sessions import NO_END, SILENT_S, Sessions, status_of

GONE = process.this_process().rsplit(":", 1)[0] + ":1"  # this number, begun at another time


def line(step: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step": step, "epoch": 1, "step_loss": 1.0 / step, "avr_loss": 1.0, "lr": 1e-4, "grad_norm": 1.0, "fps": 8.0,
        "compute_fps": 9.0, "data_wait_s": 0.0, "peak_memory_gib": 2.0, "samples_seen": 64 * step, "step_s": 8.0,
        "skipped": 0, "session": 1, "elapsed_s": 8.0 * step,
    }  # fmt: skip
    return {**values, **changes}


def begun(folder: Path, steps: int = 0, *, is_gone: bool = False, **facts_of_session: Any) -> Sessions:
    """Leave what a run has written by a step."""
    (folder / "config.toml").write_text(dump(config()))
    sessions = Sessions(folder, step=0, command="train.py", world_size=8, planned_steps=90, **facts_of_session)
    if is_gone:
        sessions._this["process"] = GONE
        sessions.note(0, 0.0)
    lines = JsonLines(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        lines.write(line(step))
    lines.close()
    return sessions


def reported(folder: Path) -> dict[str, Any]:
    assert rebuild(folder) == folder / "report.html"
    assert "<html" in (folder / "report.html").read_text()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    begun(tmp_path, 7)
    report = reported(tmp_path)
    assert (report["status"], report["last_error"], report["finished"]) == ("running", "", False)
    assert (report["steps"], report["planned_steps"], report["world_size"]) == (7, 90, 8)
    assert report["samples_seen"] == 448 and report["fps"] == pytest.approx(8.0) and report["case_name"]
    assert report["final_loss"] == pytest.approx(1 / 7) and report["command"] == "train.py"


def test_its_own_report_is_left_to_it(tmp_path: Path) -> None:
    begun(tmp_path, 3)
    write_report(tmp_path, make_report(config(), facts(tmp_path, steps=2)))
    before = (tmp_path / "report.json").read_bytes()
    page = rebuild(tmp_path)
    assert (tmp_path / "report.json").read_bytes() == before and "3 of 90" in page.read_text()


def test_a_killed_run_keeps_what_its_last_report_knew(tmp_path: Path) -> None:
    sessions = begun(tmp_path, 5, is_gone=True)
    write_report(tmp_path, make_report(config(), facts(tmp_path, steps=2)))
    report = reported(tmp_path)
    assert (report["status"], report["last_error"]) == ("killed", NO_END)
    assert report["steps"] == 5 and report["device"]["name"] == "Ascend910B3"
    (session,) = report["sessions"]
    assert (session["outcome"], session["steps_done"], session["elapsed_s"]) == ("killed", 5, 40.0)
    assert "process" not in session and report["e2e_training_time_s"] == 40.0
    assert "running" not in " ".join(report["notes"]["report"]) and "goes on" not in " ".join(report["notes"]["report"])
    assert sessions.number == 1


def test_a_failed_run_names_its_error(tmp_path: Path) -> None:
    begun(tmp_path, 2).note(2, 9.0, "failed", "the <disk> is full")
    report = reported(tmp_path)
    assert (report["status"], report["last_error"]) == ("failed", "the <disk> is full")


def test_a_finished_run_keeps_its_report(tmp_path: Path) -> None:
    begun(tmp_path, 20).note(20, 99.0, "finished")
    written = make_report(config(), facts(tmp_path))
    write_report(tmp_path, written)
    report = reported(tmp_path)
    assert report["status"] == "finished" and report["finished"] and report["fps"] == written["fps"]
    assert report["written"] == written["written"]


@pytest.mark.parametrize("kind", ["no file", "empty", "half", "torn", "two runs", "rubbish"])
def test_whatever_is_left_of_the_lines(tmp_path: Path, kind: str) -> None:
    begun(tmp_path, 0 if kind in ("no file", "empty") else 8, is_gone=True)
    path, steps = tmp_path / "metrics.jsonl", 8
    raw = path.read_bytes()
    if kind == "no file":
        path.unlink()
    elif kind == "half":
        path.write_bytes(raw[len(raw) // 2 :])
    elif kind == "torn":
        path.write_bytes(raw[:-20])
        steps = 7
    elif kind == "two runs":  # one wrote into the other's file: a step that stands twice counts once
        path.write_bytes(raw + raw)
    elif kind == "rubbish":
        bad = [{"step": "9"}, {"step": 9, "step_loss": "x"}, line(10**40), line(9, fps="fast", lrs=[1], step_loss=None)]
        path.write_bytes(raw + b"\0\xff{\n[]\n" + b"".join(json.dumps(each).encode() + b"\n" for each in bad))
        (tmp_path / "validation.jsonl").write_text('{"loss": 1}\n{"step": 4, "loss": 0.5}\n')
        steps = 9
    report = reported(tmp_path)
    assert report["status"] == "killed"
    assert report["steps"] == (0 if kind in ("no file", "empty") else steps)
    if path.exists():
        found = [record["step"] for record in step_records(path)]
        assert found == sorted(set(found)) and len(found) == (3 if kind == "half" else report["steps"])


def test_a_damaged_report_and_configuration_are_no_reason_to_fail(tmp_path: Path) -> None:
    begun(tmp_path, 3, is_gone=True)
    (tmp_path / "report.json").write_text('{"steps": 2, "fps"')
    (tmp_path / "config.toml").write_text("[training\nx")
    assert reported(tmp_path)["steps"] == 3


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    begun(tmp_path / "run", 3)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    assert main(["report", str(tmp_path / "none")]) != 0
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_a_folder_of_runs_names_those_below_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "output" / "sd3" / "runs" / "now"
    run.mkdir(parents=True)
    begun(run, 3)
    for folder in (tmp_path, tmp_path / "output", run.parent):
        assert main(["report", str(folder)]) == 2
        refused = capsys.readouterr().err
        assert names(refused, str(run)) and "RUN_DIR" in refused


def test_status_by_session() -> None:
    def of(silent_s: float = 0.0, **session: Any) -> str:
        return status_of([session], silent_s)[0]

    assert of(outcome="running", process=process.this_process(), silent_s=10 * SILENT_S) == "running"
    assert of(outcome="running", process=GONE) == "killed"
    elsewhere = f"elsewhere:{os.getpid()}:1"
    assert of(outcome="running", process=elsewhere) == "running"
    assert of(outcome="running", process=elsewhere, silent_s=SILENT_S + 1) == "killed"
    assert of(outcome="killed") == "killed" and of(outcome="failed", error="x") == "failed"
    assert status_of([]) == ("unknown", "")
