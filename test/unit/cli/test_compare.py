"""difftrain compare: exit codes, what is written where, and every fault of a command line."""

from __future__ import annotations

import json
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
    assert compare(runs, "a", "same", f"--json={tmp_path / 'file' / 'x.json'}") == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
