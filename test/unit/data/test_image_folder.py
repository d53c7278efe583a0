"""Hugging Face's imagefolder: metadata files beside pictures, splits by name, and so many records of all."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from rejects import kind

from difftrain.config import TrainConfig
from difftrain.contracts import DataFault
from difftrain.data.index.build import build_index
from difftrain.data.index.index import Index
from difftrain.data.prepare import make_tables, open_data, prepare
from difftrain.data.sources.base import split_of
from difftrain.testing.pictures import picture


def write(folder: Path, captions: dict[str, Any], *, column: str = "text", name: str = "metadata.jsonl") -> Path:
    """Write pictures and the file that captions them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(captions):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(picture(number + len(str(folder)), (40, 30)))
    rows = [{"file_name": path, column: caption} for path, caption in captions.items()]
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    elif name.endswith(".csv"):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["file_name", column])
            writer.writeheader()
            writer.writerows(rows)
    else:
        (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def config(folder: Path, **data: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "data": {"dirs": (str(folder),), "resolution": (32, 32), "caption_column": "text"} | data,
            "training": {"seed": 3},
        }
    )


def built(folder: Path, **data: Any) -> Index:
    cfg = config(folder, **data)
    summary = build_index(cfg.data, cfg.captions, folder.with_suffix(".index"), log=lambda line: None, workers=1)
    return Index(Path(summary.folder))


def captions(index: Index) -> dict[str, tuple[str, ...]]:
    return {record.media.path: record.captions for record in index.records(range(index.count))}


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
def test_a_file_captions_its_folder_and_what_lies_below(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "a", {"one.png": "a cat, of two words", "sub/two.png": 'say "dog"'}, name=name)
    (folder / "one.txt").write_text("not this one")
    assert captions(built(folder)) == {"one.png": ("a cat, of two words",), "sub/two.png": ('say "dog"',)}


def test_a_nearer_file_is_the_one_that_counts(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"one.png": "outer"})
    write(folder / "sub", {"two.png": ["inner", "or so"]})
    index = built(folder)
    assert captions(index) == {"one.png": ("outer",), "sub/two.png": ("inner", "or so")} and not index.summary.rejected


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"one.png": "one", "two.png": 5, "three.png": None})
    (folder / "four.png").write_bytes(picture(4, (40, 30)))
    with (folder / "metadata.jsonl").open("a") as file:
        for row in ({"file_name": "../out.png", "text": "x"}, {"file_name": "gone.png", "text": "x"}, {"text": "x"},
                    {"file_name": "one.png", "text": "again"}):  # fmt: skip
            file.write(json.dumps(row) + "\n")
    index = built(folder, max_rejected_share=1.0)
    assert captions(index) == {"one.png": ("one",)}
    assert Counter(kind(reject.reason) for reject in index.rejects()) == {
        "caption text": 1, "no caption": 2, "outside folder": 1, "no image": 2, "same twice": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.jsonl", "{no json"), ("metadata.jsonl", "[1, 2]"), ("metadata.parquet", "no table"),
        ("metadata.jsonl", '{"file_name": "one.png", "words": "x"}'),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_or_lacks_the_column_stops_the_run(tmp_path: Path, name: str, content: str) -> None:
    folder = write(tmp_path / "a", {"one.png": "one"}, name=name)
    (folder / name).write_text(content)
    with pytest.raises(DataFault, match=name):
        built(folder)


def test_a_picture_that_came_or_changed_is_seen(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"one.png": "one"})
    assert built(folder).summary.rejected == 0
    (folder / "two.png").write_bytes(picture(9, (40, 30)))
    assert built(folder).summary.rejected == 1
    (folder / "one.png").write_bytes(picture(8, (64, 48)))
    assert built(folder).record(0).size_hw == (48, 64)


def test_without_the_column_a_folder_is_read_as_before(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"one.png": "one"})
    (folder / "one.txt").write_text("of the caption file")
    assert captions(built(folder, caption_column=None)) == {"one.png": ("of the caption file",)}


@pytest.mark.parametrize(
    ("path", "by_file", "split"),
    [
        ("train/cat.png", False, "train"), ("data/Validation/x.png", False, "validation"), ("test_images/x.png", False, "test"),
        ("a/b/x.png", False, ""), ("latest/x.png", False, ""), ("test.png", False, ""), ("contest/dev-1/x.png", False, "validation"),
        ("train-00000-of-00002.parquet", True, "train"), ("data/test-00000.parquet", True, "test"), ("x.parquet", True, ""),
        ("train/test.parquet", True, "train"),
    ],
)  # fmt: skip
def test_splits_go_by_names(path: str, by_file: bool, split: str) -> None:
    assert split_of(path, by_file=by_file) == split


def test_of_a_split_nothing_else_is_read(tmp_path: Path) -> None:
    root = tmp_path / "a"
    write(root / "train", {"one.png": "one", "two.png": "two"})
    write(root / "test", {"three.png": "three"})
    assert set(captions(built(root, split="train"))) == {"train/one.png", "train/two.png"}
    assert set(captions(built(root, split="test"))) == {"test/three.png"}
    assert len(captions(built(root))) == 3


def test_of_parquet_files_those_of_the_split_are_read(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "a").mkdir()
    for name, count in (("train-00000-of-00001", 2), ("validation-00000-of-00001", 3)):
        rows = [{"bytes": picture(number, (40, 30)), "path": None} for number in range(count)]
        parquet.write_table(pyarrow.table({"image": rows, "text": ["x"] * count}), tmp_path / "a" / f"{name}.parquet")
    assert built(tmp_path / "a", split="train", image_column="image").count == 2
    assert built(tmp_path / "a", split="validation", image_column="image").count == 3


def test_so_many_samples_are_chosen_by_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write(tmp_path / "a", {f"{number}.png": f"caption {number}" for number in range(12)})

    def trained(seed: int, number: int | None) -> frozenset[int]:
        cfg = config(folder, max_samples=number)
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"seed": seed})})
        data = open_data(cfg, prepare(cfg, log=lambda line: None))
        assert not make_tables(cfg, data.index)
        uses = sum(rows.uses for rows in data.tables.training)
        return frozenset(data.tables.ids()[:uses].tolist())

    some, again, others = trained(1, 5), trained(1, 5), [trained(seed, 5) for seed in (2, 3, 4)]
    assert len(some) == 5 and some == again and any(other != some for other in others)
    assert len(trained(1, None)) == len(trained(1, 99)) == 12
    assert some < trained(1, 7)
