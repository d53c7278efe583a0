"""The training commands are the entry points of sd_scripts_xl/ under another name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from refusals import is_about, names

import difftrain
from difftrain.cli import COMMANDS, main, train
from difftrain.config import paths

ROOT = Path(__file__).parents[3]
SCRIPTS = {"train": "train.py", "sdxl": "sdxl_pretrain.py", "sdxl_network": "sdxl_train_network.py", "sd3_light": "sd3_light_pretrain.py",
           "text_to_image": "train_text_to_image.py"}  # fmt: skip


def test_every_script_is_a_command() -> None:
    assert {path.name for path in (ROOT / "sd_scripts_xl").glob("*.py")} == set(SCRIPTS.values())
    for command, script in SCRIPTS.items():
        function = COMMANDS[command][0].partition(":")[2]
        text = (ROOT / "sd_scripts_xl" / script).read_text(encoding="utf-8")
        assert f'sys.exit({function}(sys.argv[1:], "{script}"))' in text


@pytest.mark.parametrize("command", SCRIPTS)
def test_help_and_faults_are_those_of_the_script(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    function = getattr(train, COMMANDS[command][0].partition(":")[2])
    for argv, code in ((["--help"], 0), (["--no_such_flag=1"], 2)):
        assert main([command, *argv]) == code == function(argv, SCRIPTS[command])
        printed = capsys.readouterr()
        mine, its = re.split(
            rf"(?:^|(?<=\n))(?:usage: )?(?=difftrain {command}|{SCRIPTS[command]})", printed.out + printed.err
        )[1:]
        assert mine.replace(f"difftrain {command}", SCRIPTS[command], 1) == its


def test_sd3_light_refuses_other_families(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[model]\ntype = "flux"\n')
    assert main(["sd3_light", f"--config={file}"]) == 2
    assert names(text := capsys.readouterr().err, "flux", "sd3") and text.startswith("difftrain sd3_light:")


def test_patches_are_those_of_the_checkout() -> None:
    assert train.apply_patches("native", "adamw") == []
    assert Path(sys.modules["third_patch"].__file__ or "").is_relative_to(ROOT)


@pytest.mark.parametrize(("word", "meant"), [("pretrain", "train"), ("sdxl_pretrain.py", "sdxl"), ("tran", "train"),
                                              ("recipe", "recipes"), ("--config=x.toml", "train --config")])  # fmt: skip
def test_what_may_have_been_meant(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert is_about(capsys.readouterr().err.splitlines()[1], f"'{word}'", meant)


def test_help_of_a_command_by_the_word_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "recipes"]) == 0 and capsys.readouterr().out.startswith("usage: difftrain recipes")
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")][2:] == list(COMMANDS)  # behind the example


def test_an_installed_package_is_told_from_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.checkout() == ROOT and paths.recipes_dir() == ROOT / "configs"
    assert "train.py" in paths.toml_entry_point() and "configs" in paths.recipes_named()
    for packages in ("site-packages", "library"):  # a folder of that name is not enough
        package = tmp_path / packages / "difftrain"
        package.mkdir(parents=True)
        monkeypatch.setattr(difftrain, "__file__", str(package / "__init__.py"))
        assert paths.checkout() is None and paths.recipes_dir() == package / "recipes"
        assert "difftrain train" in paths.toml_entry_point() and "difftrain recipes" in paths.recipes_named()
