"""The sectioned TOML: what is written is what is read; a file with faults names all of them."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import is_about

from difftrain.config.parse_flags import parse
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import build, choices_of, default_of, fields
from difftrain.config.toml import dump, load, read
from difftrain.contracts import ConfigFault

RECIPES = sorted((Path(__file__).parents[3] / "configs").rglob("*.toml"))
CONFIGS = [path for path in RECIPES if "sdxl_pretrain.py" in path.read_text(encoding="utf-8")]  # train.py has others


def values_for(path: str) -> st.SearchStrategy[Any]:
    """Return values of a field's own type; some are out of its range."""
    default, choices = default_of(path), choices_of(path)
    if choices:
        return st.sampled_from(choices)
    if isinstance(default, bool):
        return st.booleans()
    if path in ("data.dirs", "optimizer.args", "optimizer.scheduler_args"):
        return st.lists(st.text()).map(tuple)
    if path == "data.repeats":
        return st.lists(st.integers(1, 9), min_size=1).map(tuple)
    if path == "data.resolution":
        return st.tuples(st.integers(1, 4096), st.integers(1, 4096))
    return st.one_of(st.text(), st.integers(0, 2**62), st.floats(0, 1e6))


@st.composite
def configurations(draw: st.DrawFn) -> TrainConfig:
    """Draw whole configurations: fields at random, those that do not fit left at their default."""
    values: dict[str, dict[str, Any]] = {}
    for path in draw(st.lists(st.sampled_from(sorted(fields())), max_size=12, unique=True)):
        section, _, field = path.partition(".")
        values.setdefault(section, {})[field] = draw(values_for(path))
    return build(values)[0]


@given(configurations())
@settings(max_examples=150, deadline=None)
def test_reading_what_was_written_gives_the_same(tmp_path_factory: pytest.TempPathFactory, cfg: TrainConfig) -> None:
    for only_changed in (False, True):
        path = tmp_path_factory.getbasetemp() / "round.toml"
        path.write_text(dump(cfg, only_changed=only_changed), encoding="utf-8")
        assert load(path) == cfg


def test_every_field_with_a_value_is_written() -> None:
    written = tomllib.loads(dump(TrainConfig()))
    expected = {path for path in fields() if default_of(path) is not None}
    assert {f"{section}.{field}" for section, table in written.items() for field in table} == expected


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_committed_recipes_parse_with_what_a_user_adds(path: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    argv = [f"--config={path}", f"--train_data_dir={tmp_path / 'data'}", f"--output_dir={tmp_path / 'out'}"]
    if "init_from_config" not in load(path).model.model_fields_set:
        argv.append("--init_from_config=base")
    parsed = parse(argv)
    assert parsed.notes == ()
    assert parsed.config.training == load(path).training


def test_there_are_recipes() -> None:
    assert {"base", "pretrain_tiny"} <= {path.stem for path in CONFIGS}


@pytest.mark.flags("config")
def test_flags_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    recipe = next(path for path in CONFIGS if path.stem == "pretrain_tiny")
    argv = [f"--config={recipe}", f"--train_data_dir={tmp_path / 'data'}", f"--output_dir={tmp_path}"]
    assert parse([*argv, "--train_batch_size=7"]).config.training.batch_size == 7
    assert parse(argv).config.training.batch_size == 2


FAULTY = """
[training]
batch_size = "2"
max_stepz = 5
max_steps = 0
seed = 1979-05-27
mixed_precision = "fp61"

[data]
dirs = ["a", 3]
resolution = [64]

[trainning]
x = 1

[ema]
enable = 1
"""


def test_all_faults_of_a_file_at_once_with_file_table_and_key(tmp_path: Path) -> None:
    path = tmp_path / "faulty.toml"
    path.write_text("model = 3\n" + FAULTY)
    with pytest.raises(ConfigFault) as caught:
        load(path)
    said = {fault.where.removeprefix(str(path)).strip(): str(fault) for fault in caught.value.faults}
    assert set(said) == {
        "model", "[training] batch_size", "[training] max_stepz", "[training] max_steps", "[training] seed",
        "[training] mixed_precision", "[data] dirs", "[data] resolution", "[trainning]", "[ema] enable",
    }  # fmt: skip
    assert is_about(said["[training] max_stepz"], "[training] max_stepz", "max_steps")
    assert is_about(said["[trainning]"], "[trainning]", "training")
    assert "at least 1, got 0" in said["[training] max_steps"]
    assert is_about(said["[training] mixed_precision"], "[training] mixed_precision", "fp16?")
    assert "date" in said["[training] seed"]


def test_faults_of_file_and_flags_come_together(tmp_path: Path) -> None:
    path = tmp_path / "faulty.toml"
    path.write_text("[training]\nbatch_size = 0\n[ema]\ndecay = 0.5\n")
    with pytest.raises(ConfigFault) as caught:
        parse([f"--config={path}", "--seed=x"])
    where = [fault.where for fault in caught.value.faults]
    assert {f"{path} [training] batch_size", f"{path} [ema] decay", "--seed", "--output_dir"} <= set(where)


@pytest.mark.parametrize("content", [b"[training", b"\xff\xfe", None], ids=["torn", "not utf-8", "missing"])
def test_a_file_that_is_no_toml(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    values, faults = read(path)
    assert not values and len(faults) == 1 and str(path) in str(faults[0])


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[optimizer]\nlearning_rate = nan\npower = inf\n")
    _, faults = read(path)
    assert len(faults) == 2 and all("finite" in str(fault) for fault in faults)


def test_the_schema_knows_every_field() -> None:
    schema = TrainConfig.model_json_schema()
    names = {
        f"{section}.{field}"
        for section, ref in schema["properties"].items()
        for field in schema["$defs"][ref["$ref"].rsplit("/", 1)[1]]["properties"]
    }
    assert names == set(fields()) and json.dumps(schema)
    assert all(definition["additionalProperties"] is False for definition in schema["$defs"].values())
    assert math.isclose(schema["$defs"]["OptimizerSection"]["properties"]["learning_rate"]["default"], 2e-6)
