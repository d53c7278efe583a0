"""difftrain compare: exit codes, what is written where, and every fault of a command line."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from pathlib import Path

import pytest
from compared import made_run

from difftrain.cli import main


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    late = {step: {"step_loss": 3.0} for step in range(12, 21)}
    return {
        "a": made_run(tmp_path / "a"),
        "same": made_run(tmp_path / "same"),
        "apart": made_run(tmp_path / "apart", change=late),
        "other": made_run(tmp_path / "other", training={"seed": 2}),
        "nothing": tmp_path / "nothing",
    }


def compare(runs: dict[str, Path], *words: str) -> int:
    return main(["compare", *(str(runs.get(word, word)) for word in words)])


def test_exit_codes(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs, "a", "same") == 0
    capsys.readouterr()
    assert compare(runs, "a", "apart") == 1 and " step 12: " in capsys.readouterr().out
    assert compare(runs, "a", "other") == 2 and "--seed" in capsys.readouterr().out
    assert compare(runs, "a", "same", "apart") == 1
    assert compare(runs, "a", "same", "other", "apart") == 2, "each against the first: the worst counts"


def test_a_bad_run_among_three_does_not_keep_the_others_from_being_compared(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(runs, "a", "nothing", "apart") == 2
    out = capsys.readouterr().out
    assert str(runs["nothing"]) in out and " step 12: " in out
    for words in (("nothing", "a"), ("a", "nothing")):
        assert compare(runs, *words) == 2
        assert str(runs["nothing"]) in capsys.readouterr().err


def test_the_same_run_twice_and_too_few(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    link = runs["a"].parent / "link"
    link.symlink_to(runs["a"])
    assert compare(runs, "a", str(link)) == 2 and str(link) in capsys.readouterr().err
    assert compare(runs, "a") == 2 and "RUN_B" in capsys.readouterr().err
    assert compare(runs) == 2 and "RUN_A" in capsys.readouterr().err


def test_json_and_page(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, page = tmp_path / "out" / "found.json", tmp_path / "out" / "page.html"
    assert compare(runs, "a", "apart", "nothing", "--json", str(found), f"--html={page}") == 2
    assert capsys.readouterr().out.splitlines()[-2:] == [str(found), str(page)]
    content = json.loads(found.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert content["exit_code"] == 2 and set(content["runs"]) == {"A", "B", "C"} and "fault" in content["runs"]["C"]
    (only,) = content["comparisons"]
    assert (only["run"], only["against"], only["verdict"]) == ("B", "A", "part")
    assert only["first_divergence"]["step"] == 12 and len(only["errors"]["loss"]) == 20
    assert content["published_baselines"]["rows"] and page.read_text().startswith("<!DOCTYPE html>")


def test_losses_without_a_number_are_null(runs: dict[str, Path], tmp_path: Path) -> None:
    nan = made_run(tmp_path / "nan", change={step: {"step_loss": None} for step in range(5, 21)})
    assert compare(runs, "a", str(nan), f"--json={tmp_path / 'x.json'}") == 1
    content = json.loads((tmp_path / "x.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert content["runs"]["B"]["first_step_without_loss"] == 5
    assert content["comparisons"][0]["first_divergence"]["b"] is None


def test_thresholds_of_a_file(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("mean_relative_error = 1000\nstep_relative_error = 1000\n")
    assert compare(runs, "a", "apart", f"--thresholds={limits}") == 0
    limits.write_text("min_fps_ratio = 1.5\n")
    assert compare(runs, "a", "same", f"--thresholds={limits}") == 1
    limits.write_text("min_fps = 1.5\n")
    capsys.readouterr()
    assert compare(runs, "a", "same", f"--thresholds={limits}") == 2 and "min_fps_ratio" in capsys.readouterr().err


def test_nothing_of_a_run_is_written_over(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = (runs["a"] / "report.json").read_bytes()
    assert compare(runs, "a", "same", f"--json={runs['a'] / 'report.json'}") == 2
    assert compare(runs, "a", "same", f"--html={runs['a']}") == 2
    assert (runs["a"] / "report.json").read_bytes() == before and "--html" in capsys.readouterr().err
    twice = runs["a"].parent / "x"
    assert compare(runs, "a", "same", f"--html={twice}", f"--json={twice}") == 2 and not twice.exists()


def test_all_faults_at_once(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs, "--htm=x", "--json") == 2
    err = capsys.readouterr().err
    assert all(word in err for word in ("RUN_A", "RUN_B", "--htm", "--html", "--json"))


def test_output_that_cannot_be_written(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert compare(runs, "a", "same", f"--json={tmp_path / 'file' / 'x.json'}") == 2, "1 is a verdict"
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_an_output_that_fails_is_named_as_it_was_given(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path.with_name(f".{path.name}.1234abcd.tmp")))

    monkeypatch.setattr("difftrain.io.files.write_text", full)
    assert compare(runs, "a", "same", f"--json={tmp_path / 'x.json'}") == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "x.json") in said and ".tmp" not in said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_standard_output_that_fails_is_no_verdict(
    runs: dict[str, Path], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, os.strerror(number))

        def fileno(self) -> int:  # not that of the tests
            return os.open(os.devnull, os.O_WRONLY)

    monkeypatch.setattr("sys.stdout", Full())
    assert compare(runs, "a", "same") == (2 if number == errno.ENOSPC else 141)


def test_a_bug_is_no_verdict(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difftrain.report.compare.comparison.compare_runs", lambda *_: 1 / 0)
    assert compare(runs, "a", "same") == 2


def test_a_pipe_stays_a_pipe_and_a_link_a_link(runs: dict[str, Path], tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "target.json"
    os.mkfifo(pipe)
    target.write_text("old")
    link.symlink_to(target)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert compare(runs, "a", "same", f"--json={pipe}") == 0
    reader.join(timeout=10)
    assert json.loads(read[0])["exit_code"] == 0 and pipe.is_fifo()
    assert compare(runs, "a", "same", f"--json={link}") == 0
    assert link.is_symlink() and json.loads(target.read_text())["exit_code"] == 0


def test_a_folder_with_one_run_is_that_run(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "out" / "20260101_00-00-00")
    assert compare(runs, "a", str(tmp_path / "out")) == 0
    assert "20260101_00-00-00" in capsys.readouterr().err
    made_run(tmp_path / "out" / "20260102_00-00-00")
    assert compare(runs, "a", str(tmp_path / "out")) == 2  # which of them is not known


def test_a_run_that_ended_early_can_be_refused(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    died = made_run(tmp_path / "died", last=1, report=False)
    assert compare(runs, "a", str(died)) == 0 and "1 of 20" in capsys.readouterr().out
    limits = tmp_path / "limits.toml"
    limits.write_text("min_common_steps = 20\n")
    assert compare(runs, "a", str(died), f"--thresholds={limits}") == 1
    assert "min_common_steps" in capsys.readouterr().out
    assert compare(runs, "a", "same", f"--thresholds={limits}") == 0
