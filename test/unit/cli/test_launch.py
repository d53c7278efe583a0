"""`difftrain launch`: its two words in any order, and what is said where one is missing or misspelt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.cli import launch
from difftrain.launch import flags, main
from difftrain.launch.machines import Devices


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(main, "launch", lambda *words: calls.append(words) or 0)
    return calls


@pytest.mark.parametrize(
    "argv",
    [
        ["np", "sdxl", "--batch_size=2", "--sdpa"],
        ["sdxl", "np", "--batch_size=2", "--sdpa"],
        ["--batch_size=2", "--sdpa", "np", "sdxl"],
    ],
)
def test_the_words_in_any_order(argv: list[str], launched: list[tuple[object, ...]]) -> None:
    if argv[1] == "--sdpa":  # a flag of the entry point: nobody knows here that it takes no value
        argv = [argv[0], *argv[2:], argv[1]]
    assert launch.main(argv) == 0
    recipe, layout, rest, command, caller = launched[0]
    assert (recipe, layout, rest) == ("sdxl", "1m_np", ["--batch_size=2", "--sdpa"])
    assert str(command).split() == [*launch.PROG.split(), "np", "sdxl"] and caller is flags.COMMAND


def test_a_flags_value_is_no_word_of_the_command(launched: list[tuple[object, ...]]) -> None:
    assert launch.main(["1p", "--performance", "text_to_image", "--dataset_name", "sdxl"]) == 0
    assert launched[0][:3] == ("text_to_image_sd1-4", "1m_1p", ["--performance", "--dataset_name", "sdxl"])


@pytest.mark.parametrize(
    ("argv", "where", "fact"),
    [
        (["np"], "RECIPE", "sd3_light"),
        (["--batch_size=2"], "LAYOUT", "nm"),
        (["np", "sdxll"], "RECIPE", "mean sdxl"),
        (["np", "sdxl", "sd3_light"], "'sd3_light'", "LAYOUT"),
    ],
)
def test_a_word_that_is_missing_wrong_or_too_many(
    argv: list[str], where: str, fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(argv) == 2
    assert any(is_about(line, where) and fact in line for line in capsys.readouterr().err.splitlines())


def test_help_of_the_command_and_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--help"]) == 0 and launch.main(["sdxl", "-h"]) == 0
    assert names(capsys.readouterr().out, *launch.LAYOUTS, *launch.RECIPES)
    assert launch.main(["nm", "sd3_light", "--help"]) == 0
    assert names(capsys.readouterr().out, f"{launch.PROG} nm sd3_light", "difftrain train")


def test_files_go_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main.machines, "find_devices", lambda: Devices("cpu", 2))
    plan = main.decide("sdxl", "1m_np", flags.read([], {}), {}, flags.COMMAND)
    assert plan.output == tmp_path / "output" / "0"
    several = ["--nnodes=2", "--node_rank=1", "--master_ip=127.0.0.1", f"--output_dir={tmp_path / 'mine'}"]
    plan = main.decide("sdxl", "nm_np", flags.read(several, {}), dict(os.environ), flags.COMMAND)
    assert (plan.folder, plan.output) == (tmp_path / "mine", tmp_path / "mine" / "node1")
    assert plan.words[-1] == f"--output_dir={plan.output}"


def test_an_installed_package_runs_its_own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.entry_point("sdxl_pretrain.py")[0].endswith("sd_scripts_xl/sdxl_pretrain.py")
    monkeypatch.setattr(main, "checkout", lambda: None)
    from difftrain.cli import COMMANDS

    for door, command in main.recipes.COMMANDS.items():
        assert main.entry_point(door) == ["-m", "difftrain", command] and command in COMMANDS


@pytest.mark.parametrize(
    ("recipe", "unknown"),
    [("sdxl", "--batchsize"), ("sd3_light", "--training.epoch"), ("text_to_image", "--batchsize")],
)
def test_faults_of_launcher_and_training_come_together(
    recipe: str, unknown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for flag, lacks in (("--model_name", "--dataset_name"), ("--dataset_name", "--model_name")):
        assert launch.main(["1p", recipe, f"{unknown}=4", f"{flag}=nope"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert any(is_about(line, lacks, "missing") for line in lines)
        assert any(is_about(line, unknown) for line in lines) and any("nope" in line for line in lines)
        assert sum("is missing" in line for line in lines) == 1, lines
