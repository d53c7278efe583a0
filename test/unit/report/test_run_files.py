"""What the files of a run's folder tell, whole, torn, damaged or missing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from compared import made_run

from difftrain.contracts import DataFault
from difftrain.report.compare.comparison import compare_runs
from difftrain.report.compare.thresholds import Thresholds
from difftrain.report.run_files import read_run, read_steps


def agree(tmp_path: Path, folder: Path) -> bool:
    """Tell whether a run agrees with a whole one."""
    return compare_runs(read_run(made_run(tmp_path / "whole")), read_run(folder), Thresholds()).verdict == "agree"


def test_a_whole_run_leaves_nothing_to_say(tmp_path: Path) -> None:
    run = read_run(made_run(tmp_path / "a"))
    assert (run.notes, run.state, run.last_step, run.seed, run.global_batch) == ((), "finished", 20, 1, 2)
    assert run.figures()["fps"] == 20.0 and run.plan_digests == {"abc"} and run.door == "kohya"


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "step_lo')
    run = read_run(folder)
    assert run.last_step == 20 and len(run.notes) == 1 and agree(tmp_path, folder)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x00\xff\xfe\n", b"[]\n", b'{"step": 4}\n', b'{"step": "x", "step_loss": 1}\n', b'{"step": true, "step_loss": 1}\n',
        b'{"step": 4, "step_loss": "1.0"}\n', b"[" * 100_000 + b"\n", b"\n", b'{"step": -3, "step_loss": 1.0}\n',
    ],
)  # fmt: skip
def test_damaged_lines_are_counted_and_the_rest_is_compared(tmp_path: Path, rubbish: bytes) -> None:
    folder = made_run(tmp_path / "a")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([*lines[:3], rubbish, *lines[4:]]))
    run = read_run(folder)
    assert len(run.steps) == 19 and 4 not in run.steps and len(run.notes) == 1 and "4" in run.notes[0]
    assert agree(tmp_path, folder)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "step_loss": NaN}\n{"step": 2, "step_loss": null, "fps": "x", "session": []}\n'
                    f'{{"step": 3, "step_loss": 1{"0" * 400}}}\n{{"step": 3, "step_loss": 2}}\n')  # fmt: skip
    steps, notes = read_steps(path)
    assert notes == [] and [math.isnan(line.loss) for line in steps.values()] == [True, True, False]
    assert steps[3].loss == 2.0, "of a step that stands twice the later line"


@pytest.mark.parametrize("name", ["report.json", "sessions.json", "run.json", "config.toml"])
@pytest.mark.parametrize("content", [b"\x00\x01\xff", b"", b"[1, 2]", b'{"torn": '])
def test_each_file_may_be_damaged(tmp_path: Path, name: str, content: bytes) -> None:
    folder = made_run(tmp_path / "a")
    (folder / name).write_bytes(content)
    run = read_run(folder)
    empty_toml = name == "config.toml" and content == b""
    assert empty_toml or any(name in note for note in run.notes)
    assert empty_toml or agree(tmp_path, folder), "what the others say is enough"


WRONG: list[dict[str, Any]] = [
    {"sessions": 3}, {"sessions": [3, {"outcome": 7, "plan_digest": [], "from_step": "x"}]}, {"run_id": []},
]  # fmt: skip


@pytest.mark.parametrize("content", WRONG)
def test_values_of_other_types_are_none(tmp_path: Path, content: dict[str, Any]) -> None:
    folder = made_run(tmp_path / "a")
    (folder / "sessions.json").write_text(json.dumps(content))
    (folder / "report.json").write_text(
        json.dumps({"steps": "x", "fps": [1], "dataset": 4, "device": 1, "versions": []})
    )
    run = read_run(folder)
    assert len(run.steps) == 20 and run.figures()["e2e_training_time_s"] in (None, 0.0)


def test_a_run_that_goes_on_or_was_killed(tmp_path: Path) -> None:
    """No report, and a session without an end: speeds come from the lines, and the losses are compared."""
    folder = made_run(tmp_path / "a", report=False, outcome="running", last=15)
    run = read_run(folder)
    assert run.state == "running" and len(run.notes) == 2
    assert run.figures()["fps"] == pytest.approx(20.0) and run.figures()["e2e_training_time_s"] is None
    assert run.figures()["peak_memory_gib"] == 20.0 and run.figures()["mfu"] is None
    found = compare_runs(read_run(made_run(tmp_path / "whole")), run, Thresholds())
    assert found.verdict == "agree" and found.errors is not None and found.errors.steps == tuple(range(1, 16))


def test_a_report_of_an_earlier_session_is_not_taken_for_the_run(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a", figures={"fps": 1.0})
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps(report | {"steps": 12}))
    run = read_run(folder)
    assert not run.is_report_current and run.figures()["fps"] == pytest.approx(20.0) and len(run.notes) == 1


def test_a_run_of_before_sessions_named_the_plan_has_it_in_its_checkpoints(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a", plan_digest=None, fingerprint=None)
    (folder / "global_step10").mkdir()
    (folder / "global_step10" / "manifest.json").write_text(json.dumps({"meta": {"step": 10, "plan_digest": "abc"}}))
    assert read_run(folder).plan_digests == {"abc"} and agree(tmp_path, folder)


def test_without_what_it_was_asked_to_do_a_run_is_compared_by_speed_alone(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a", report=False)
    for name in ("run.json", "config.toml"):
        (folder / name).unlink()
    found = compare_runs(read_run(made_run(tmp_path / "whole")), read_run(folder), Thresholds())
    assert found.exit_code == 2 and found.ratios()["fps"] == pytest.approx(1.0)


def test_the_identity_is_made_of_the_configuration_where_run_json_is_lost(tmp_path: Path) -> None:
    a, b = made_run(tmp_path / "a"), made_run(tmp_path / "b")
    (a / "run.json").unlink()
    assert read_run(a).identity == read_run(b).identity


def test_a_report_alone_tells_of_speed(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    found = compare_runs(read_run(made_run(tmp_path / "whole")), read_run(folder), Thresholds())
    assert found.exit_code == 2 and found.ratios()["fps"] == 1.0


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    made_run(tmp_path / "runs" / "20260102_14-30-05")
    rubbish = tmp_path / "rubbish"
    rubbish.mkdir()
    (rubbish / "metrics.jsonl").write_bytes(bytes(range(256)) * 5000)
    for name, says in (("file", "file"), ("empty", "report.json"), ("nowhere", "nowhere"), ("rubbish", "metrics.jsonl"),
                       ("runs", "20260102_14-30-05")):  # fmt: skip
        with pytest.raises(DataFault, match=says):
            read_run(tmp_path / name)


def test_sessions_of_a_resumed_run_are_said(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a")
    stored = json.loads((folder / "sessions.json").read_text())
    again = {**stored["sessions"][0], "session": 2, "from_step": 8}
    (folder / "sessions.json").write_text(json.dumps({**stored, "sessions": [*stored["sessions"], again]}))
    assert any("8" in note for note in read_run(folder).notes) and agree(tmp_path, folder)
