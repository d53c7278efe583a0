"""The schemas that editors read: files of schemas/ are what the code says, and recipes name theirs and are valid."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from json_schema import misfits

from difftrain.cli.documents import schema_text
from difftrain.config.render.schema import SCHEMAS, schema

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "schemas"
RECIPES = sorted((ROOT / "configs").rglob("*.toml"))
EXAMPLES = sorted((ROOT / "test/unit/files").glob("train_example_*.toml"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_what_its_file_says(name: str, update_golden: bool) -> None:
    file, text = FOLDER / f"{name}.json", schema_text(name)
    if update_golden:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, "pytest test/golden/test_schemas.py --update-golden writes it anew"


def test_no_other_file_is_there() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.json" for name in SCHEMAS}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_names_its_schema_and_fits_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.match(r"#:schema (\S+)\n", text)
    assert named, "its first line names the schema: #:schema ../../schemas/run.json"
    file = (path.parent / named[1]).resolve()
    assert file.parent == FOLDER
    assert list(misfits(json.loads(file.read_text(encoding="utf-8")), tomllib.loads(text))) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_files_of_other_trainers_fit_theirs(path: Path) -> None:
    value = tomllib.loads(path.read_text(encoding="utf-8"))
    name = "dataset" if "datasets" in value or "directory" in value else "run"
    assert list(misfits(schema(name), value)) == []
