"""Faults of a file name their line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from difftrain.config.toml_lines import lines_of, with_line

RUN = """# a run
[model]
type = "sdxl"      # a comment = not a key
'quoted' = 1
note = \"\"\"
[training]
lr = 1
\"\"\"
sizes = [
  [512],
  [1024]
]

[training]
epochs = "many"
inner.key = 3
"""
DATA = """resolution = 512
[[datasets]]
batch_size = 1
[[datasets.subsets]]
image_dir = "a"
[[datasets.subsets]]
image_dir = "b"
num_repeats = 0
[[datasets]]
[[datasets.subsets]]
image_dir = "c"
"""


@pytest.mark.parametrize(
    "inside, line",
    [
        ("[model] type", 3), ("[model] quoted", 4), ("[model] note", 5), ("[model] sizes", 9), ("[training] epochs", 15),
        ("[training]", 14), ("[training] inner.key", 16), ("[model]", 2), ("[training] nothing", 14),
    ],
)  # fmt: skip
def test_of_a_run(tmp_path: Path, inside: str, line: int) -> None:
    tomllib.loads(RUN)
    file = tmp_path / "a run.toml"
    file.write_text(RUN)
    assert with_line(f"{file} {inside}") == f"{file}:{line} {inside}"


@pytest.mark.parametrize(
    "inside, line",
    [
        ("resolution", 1), ("[[datasets]] 1 batch_size", 3), ("[[datasets]] 2", 9),
        ("[[datasets]] 1 [[datasets.subsets]] 2 num_repeats", 8), ("[[datasets]] 2 [[datasets.subsets]] 1 image_dir", 11),
        ("[[datasets]] 1 [[datasets.subsets]] 1 num_repeats", 4),
    ],
)  # fmt: skip
def test_of_lists_of_tables(tmp_path: Path, inside: str, line: int) -> None:
    tomllib.loads(DATA)
    file = tmp_path / "data.toml"
    file.write_text(DATA)
    assert with_line(f"{file} {inside}") == f"{file}:{line} {inside}"


def test_what_has_no_line_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe[model]\n")
    for where in (
        "--seed",
        "[model] type",
        f"{tmp_path}/none.toml [model] x",
        f"{tmp_path}/x.toml [model]",
        f"{tmp_path}",
    ):
        assert with_line(where) == where


def test_every_recipe_can_be_looked_up() -> None:
    for path in (Path(__file__).parents[3] / "configs").rglob("*.toml"):
        text = path.read_text(encoding="utf-8")
        tables = {f"[{name}]" for name, value in tomllib.loads(text).items() if isinstance(value, dict)}
        assert tables <= set(lines_of(text)), path
