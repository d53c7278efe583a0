"""difftrain recipes: every recipe is listed and can be copied whole, and no file of the user's is lost."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from refusals import names

from difftrain.cli import main, recipes
from difftrain.config.layers import read_file

CONFIGS = Path(__file__).parents[3] / "configs"
ALL = sorted(recipes.shipped())


def test_the_list_has_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ALL
    listed = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert listed["sd3_light/tiny"][0] == "sd3" and listed["sdxl/base"][0] == "sdxl"
    assert all(len(about) > 20 for _, about in listed.values())
    files = set(CONFIGS.rglob("*.toml"))
    data = {path for path in files if b"[[directory]]" in path.read_bytes()}
    assert {CONFIGS / f"{name}.toml" for name in ALL} == files - data


@pytest.mark.parametrize("name", ALL)
def test_a_copy_says_the_same_and_names_what_is_installed(name: str, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "new" / "folder"
    assert main(["recipes", "copy", name, str(folder)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(written) == sorted(folder.iterdir()) and written[0].name == Path(name).name + ".toml"
    for copy in written:
        source = CONFIGS / Path(name).parent / copy.name
        text = copy.read_text(encoding="utf-8")
        assert tomllib.loads(text) == tomllib.loads(source.read_text(encoding="utf-8"))
        assert "sd_scripts_xl/" not in text and "configs/" not in text


def test_a_copy_finds_its_dataset_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "sdxl/train", "mine"]) == 0
    layer = read_file(Path("mine/train.toml"))
    assert not layer.faults and layer.values["data.dataset_config"] == "mine/pictures.toml"


def test_files_of_the_user_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["recipes", "copy", "sdxl/train", str(tmp_path)]
    assert main(line) == 0 == main(line)  # what it would write anyway is in nobody's way
    mine, data = tmp_path / "train.toml", tmp_path / "pictures.toml"
    mine.write_text("# mine")
    data.write_text("# mine too")
    capsys.readouterr()
    assert main(line) == 2
    refusal = capsys.readouterr().err
    assert names(refusal, mine, data, "--overwrite") and mine.read_text() == "# mine"
    assert main([*line, "--overwrite"]) == 0
    assert "[model]" in mine.read_text() and "[[directory]]" in data.read_text()


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["copy"], ["NAME"]),
        (["copy", "sd3_light/tinny"], ["sd3_light/tiny"]),
        (["copy", "tiny"], ["sdxl/tiny", "sd3_light/tiny"]),
        (["copy", "sdxl"], ["sdxl/base", "sdxl/train"]),
        (["copy", "sdxl/tiny", "my.toml"], ["my.toml"]),
        (["copy", "nothing/like/it", "a", "b", "--owerwrite"], ["nothing/like/it", "b", "--owerwrite"]),
        (["cpy", "sdxl/tiny"], ["cpy", "copy"]),
        (["--all"], ["--all"]),
    ],
)
def test_what_is_refused(
    words: list[str], facts: list[str], tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", *words]) == 2
    refusal = capsys.readouterr().err
    assert all(fact in refusal for fact in facts) and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["recipes", "copy", "sdxl/tiny", str(tmp_path / "file" / "x")]) == 1
    assert names(text := capsys.readouterr().err, tmp_path / "file") and "Traceback" not in text


def test_recipes_that_were_edited_badly_hide_no_other(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(recipes, "recipes_dir", lambda: tmp_path)
    assert main(["recipes"]) == 2 and str(tmp_path) in capsys.readouterr().err
    for name, text in (("broken", "[model\n"), ("odd", "# about\nmodel = 3\n"), ("good", "[model]\ntype = 'flux'\n")):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / f"{name}.toml").write_text(text)
    assert main(["recipes"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert rows == [["x/broken", "x"], ["x/good", "flux"], ["x/odd", "x"]]


def test_a_copy_may_have_its_schemas_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "sdxl/24gb", str(tmp_path), "--schema"]) == 0
    printed = capsys.readouterr()
    assert set(printed.out.split()) >= {str(tmp_path / "schemas" / name) for name in ("run.json", "dataset.json")}
    assert "--schema" not in printed.err
    for file in tmp_path.glob("*.toml"):
        (named,) = re.findall(r"\A#:schema (\S+)\n", file.read_text())
        assert json.loads((tmp_path / named).read_text())["properties"]

    # --- a later copy finds them, one elsewhere says how to have them
    assert main(["recipes", "copy", "sd3_light/tiny", str(tmp_path)]) == 0
    assert (tmp_path / "tiny.toml").read_text().startswith("#:schema schemas/run.json\n")
    capsys.readouterr()
    assert main(["recipes", "copy", "sd3_light/tiny", str(tmp_path / "x")]) == 0
    assert "--schema" in capsys.readouterr().err and "#:schema" not in (tmp_path / "x" / "tiny.toml").read_text()


def test_a_copy_refers_to_no_schema_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("#:schema ../schemas/run.json\n# about\nseed = 1\n")
    assert recipes.installed_text(file, tmp_path / "x") == "# about\nseed = 1\n"
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "run.json").write_text("{}")
    (tmp_path / "x").mkdir()
    assert recipes.installed_text(file, tmp_path / "x") == file.read_text()
    file.write_text(address := "#:schema http://localhost/run.json\nseed = 1\n")
    assert recipes.installed_text(file, tmp_path / "y") == address
