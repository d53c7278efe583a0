"""console.log in the run's folder."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from difftrain.contracts import ConfigFault, Fault, TrainingFault
from difftrain.train.run_log import CONSOLE_LOG, RunLog, error_text

SECRET = "hf_" + "a1B2" * 6


def said(run_log: RunLog, text: str) -> None:
    run_log.handle(logging.LogRecord("difftrain", logging.INFO, "", 0, text, None, None))


def test_lines_of_every_session_without_secrets(tmp_path: Path) -> None:
    for number in (1, 2):
        run_log = RunLog()
        said(run_log, f"early {number}")
        with run_log.kept_in(tmp_path, f"train --token={SECRET}"):
            said(run_log, f"late {number} {SECRET}")
        said(run_log, "after its end")
    lines = (tmp_path / CONSOLE_LOG).read_text().splitlines()
    assert [line.split()[2] + line.split()[3][0] for line in lines if "early" in line or "late" in line] == [
        "early1", "late1", "early2", "late2",
    ]  # fmt: skip
    assert len(lines) == 6 and SECRET not in "".join(lines)


def test_the_error_is_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(TrainingFault), RunLog().kept_in(tmp_path, "train"):
        raise TrainingFault(f"too hot, {SECRET}")
    last = (tmp_path / CONSOLE_LOG).read_text().splitlines()[-1]
    assert "too hot" in last and SECRET not in last


def test_a_refused_session_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigFault), RunLog().kept_in(tmp_path, "train"):
        raise ConfigFault([Fault("--x", "is wrong")])
    assert not any(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / CONSOLE_LOG).mkdir()
    run_log = RunLog()
    with caplog.at_level("WARNING", "difftrain"), run_log.kept_in(tmp_path, "train"):
        said(run_log, "hello")
    assert len(caplog.records) == 1


def test_errors_as_people_read_them() -> None:
    assert "15" in error_text(SystemExit(128 + 15)) and error_text(TrainingFault("no")) == "no"
    assert error_text(ValueError("x")).startswith("ValueError")
