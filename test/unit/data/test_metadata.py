"""kohya's metadata json as a source: which picture an entry means, its caption, and what is said of the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rejects import kind

from difftrain.config import TrainConfig
from difftrain.config.schema.sections import CaptionSection, DataSection
from difftrain.contracts import DataFault, Draw
from difftrain.data.index.build import build_index
from difftrain.data.index.index import Index
from difftrain.data.media.crop import crop_window
from difftrain.data.media.masks import find_mask
from difftrain.data.plan.buckets import BucketTable
from difftrain.data.recipe import Recipe
from difftrain.data.sources.base import picture_name
from difftrain.data.sources.metadata import combined
from difftrain.testing.pictures import write_folder


def built(folder: Path, entries: Any, pictures: Path | None = None, **sections: Any) -> Index:
    """Write an index of a metadata file in `folder`, of the one that is there for None; its pictures lie in folder/imgs."""
    file = folder / "meta.json"
    if entries is not None:
        file.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    data = {"dirs": (str(pictures or folder / "imgs"),), "in_json": str(file), "resolution": (64, 64)}
    cfg = TrainConfig.model_validate({"data": data | sections.pop("data", {})} | sections)
    summary = build_index(cfg.data, cfg.captions, folder / "index", log=lambda line: None, workers=1)
    return Index(Path(summary.folder))


def captions(index: Index) -> dict[str, str]:
    return {record.media.path: record.captions[0] for record in index.records(range(index.count))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "imgs" / "sub", [(40, 30)], start=7)
    write_folder(tmp_path / "imgs", [(64, 64), (48, 64), (64, 32)])
    for text in (tmp_path / "imgs").rglob("*.txt"):
        text.write_text("not this one")
    return tmp_path


@pytest.mark.flags("in_json")
def test_names_paths_and_whole_paths_with_caption_and_tags(folder: Path) -> None:
    write_folder(folder / "elsewhere", [(32, 32)], start=9)
    index = built(
        folder,
        {
            "0000": {"caption": "a cat", "tags": "1cat, sitting", "train_resolution": [64, 64]},
            "0001.png": {"caption": "", "tags": "only, tags"},
            str(folder / "imgs" / "0002.png"): {"caption": "whole"},
            "sub/0007": {"tags": "below"},
            str(folder / "elsewhere" / "0009.png"): {"caption": "outside"},
        },
    )
    assert captions(index) == {
        "0000.png": "a cat,1cat, sitting",
        "0001.png": "only, tags",
        "0002.png": "whole",
        "sub/0007.png": "below",
        "../elsewhere/0009.png": "outside",
    }
    assert {record.size_hw for record in index.records(range(5))} >= {(30, 40), (32, 32)}
    assert all(index.read(record.media)[:4] == b"\x89PNG" for record in index.records(range(5)))


def test_a_picture_has_one_key_however_it_is_named(folder: Path) -> None:
    whole = built(folder, {str(folder / "imgs" / "0000.png"): {"caption": "x"}})
    [key] = [record.key for record in whole.records(range(1))]
    assert [record.key for record in built(folder, {"0000": {"caption": "y"}}).records(range(1))] == [key]
    data = {"dirs": (str(folder / "imgs"),)}
    cfg = TrainConfig.model_validate({"data": data})
    plain = Index(Path(build_index(cfg.data, cfg.captions, folder / "i2", log=lambda line: None, workers=1).folder))
    assert key in {record.key for record in plain.records(range(plain.count))}, "as in a folder without the file"


def test_what_cannot_be_used_is_named(folder: Path) -> None:
    (folder / "imgs" / "torn.png").write_bytes(b"\x89PNG")
    index = built(
        folder,
        {
            "0000": {"caption": "good"},
            "0001": {"caption": "good too"},
            "0001.png": {"caption": "again"},
            "0002": {"caption": "good as well"},
            "gone": {"caption": "x"},
            "torn": {"caption": "x"},
            "sub/0007": {},
        },
        data={"max_rejected_share": 0.9},
    )
    said = {reject.path.partition("!")[2]: reject.reason for reject in index.rejects()}
    assert set(captions(index)) == {"0000.png", "0001.png", "0002.png"}
    assert kind(said["gone"]) == "no image" and str(folder) in said["gone"]
    assert kind(said["0001.png"]) == "same twice" and "'0001'" in said["0001.png"]
    assert kind(said["sub/0007"]) == "no caption"
    assert "torn" in said and len(said) == 4


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"caption": 3}, r"caption .*text: caption .* number"),
        ({"caption": "x", "tags": ["a", "b"]}, r"caption .*text: tags .* list"),
        ("x", r"caption .*text: .* entry .* text, .* object"),
    ],
)
def test_captions_that_are_none(folder: Path, entry: Any, reason: str) -> None:
    index = built(folder, {"0000": {"caption": "good"}, "0001": entry})
    assert re.match(reason, next(reject.reason for reject in index.rejects())) and index.count == 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1]", "object, .*list"),
        ("{", "no JSON in UTF-8"),
        ('{"a":' + "[" * 100_000, "no JSON in UTF-8"),
        ("{}", "name"),
        ('"\udcff"', "no JSON in UTF-8"),
    ],
)
def test_files_that_are_no_metadata(folder: Path, text: str, what: str) -> None:
    file = folder / "meta.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    data = {"dirs": (str(folder / "imgs"),), "in_json": str(file), "resolution": (64, 64)}
    cfg = TrainConfig.model_validate({"data": data})
    with pytest.raises(DataFault, match=what) as caught:
        build_index(cfg.data, cfg.captions, folder / "index", log=lambda line: None, workers=1)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("caption", "tags", "multi_line", "expected"),
    [
        ("a", "b, c", False, "a;b, c"),
        (None, "b, c", False, "b, c"),
        ("a", None, False, "a"),
        ("a", "", False, "a"),
        (None, None, False, ""),
        ("one\ntwo", "t", False, "one"),  # kohya: the first line, and the tags stand in the last
        ("one\n\ntwo", "t, u", True, "one;t, u\ntwo;t, u"),
        ("one", "t\nu", True, "one;t;u"),
        (None, "t\nu", True, "t\nu"),
    ],
)
def test_caption_and_tags_are_put_together_as_kohya_does(
    caption: str | None, tags: str | None, multi_line: bool, expected: str
) -> None:
    assert combined(caption, tags, ";", multi_line=multi_line) == expected


def test_the_separator_and_lines_are_those_of_the_captions(folder: Path) -> None:
    entries = {"0000": {"caption": "a\nb", "tags": "t"}}
    told = captions(built(folder, entries, captions={"separator": " | ", "enable_wildcard": True}))
    assert told == {"0000.png": "a | t\nb | t"}


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(folder: Path) -> None:
    entries = {"0000": {"caption": "old"}, "0001": {"caption": "same"}}
    assert built(folder, entries).summary.read == 1
    cfg = TrainConfig.model_validate(
        {"data": {"dirs": (str(folder / "imgs"),), "in_json": str(folder / "meta.json"), "resolution": (64, 64)}}
    )
    again = build_index(cfg.data, cfg.captions, folder / "index", log=lambda line: None, workers=1)
    assert (again.read, again.reused) == (0, 1)
    entries["0000"]["caption"] = "new!"
    assert captions(built(folder, entries))["0000.png"] == "new!"


@pytest.mark.flags("in_json")
def test_pictures_that_come_change_or_go_are_noticed_though_the_file_stays(folder: Path) -> None:
    entries = json.dumps({name: {"caption": name} for name in ("0000", "0001", "0002", "late")})
    data = {"max_rejected_share": 1.0}
    assert built(folder, entries, data=data).count == 3
    was = (folder / "meta.json").stat()
    write_folder(folder / "imgs", [(72, 56)])  # 0000 is another picture
    (folder / "imgs" / "0001.png").unlink()
    (folder / "imgs" / "0002.png").rename(folder / "imgs" / "late.png")
    index = built(folder, None, data=data)
    now = (folder / "meta.json").stat()
    assert (now.st_mtime_ns, now.st_size) == (was.st_mtime_ns, was.st_size)
    assert captions(index) == {"0000.png": "0000", "late.png": "late"}
    assert {record.media.path: record.size_hw for record in index.records(range(2))}["0000.png"] == (56, 72)


def test_a_name_that_no_disk_takes_ends_nothing(folder: Path) -> None:
    index = built(folder, {"0000": {"caption": "a"}, "q" * 400: {"caption": "b"}, "0001": {"caption": "c"}})
    assert set(captions(index)) == {"0000.png", "0001.png"}
    assert [reject.reason[:8] for reject in index.rejects()] == ["no image"]


@pytest.mark.flags("in_json", "conditioning_data_dir")
def test_a_picture_elsewhere_is_not_its_own_mask(folder: Path) -> None:
    write_folder(folder / "elsewhere", [(32, 32), (32, 32)], start=5)
    write_folder(folder / "masks", [(32, 32)], start=6)
    names = [str(folder / "elsewhere" / f"000{n}.png") for n in (5, 6)]
    data = {"conditioning_dir": str(folder / "masks")}
    index = built(folder, {name: {"caption": "x"} for name in names}, data=data)
    [record] = index.records(range(index.count))
    assert record.media.path == "../elsewhere/0006.png"
    assert find_mask(folder / "masks", picture_name(record)) == folder / "masks" / "0006.png"
    assert [reject.reason[:7] for reject in index.rejects()] == ["no mask"]


@pytest.mark.flags("in_json", "face_crop_aug_range")
def test_a_face_is_that_of_the_picture_however_it_is_named(folder: Path) -> None:
    (folder / "imgs" / "0000.png").rename(folder / "imgs" / "a_30_20_8_10.png")
    for name in ("a_30_20_8_10", "a_30_20_8_10.png"):
        index = built(folder, {name: {"caption": "x"}})
        table = BucketTable.of(DataSection(resolution=(32, 32)))
        recipe = Recipe(CaptionSection(), table, 1, face_crop_range=(1.0, 1.0))
        record = index.record(0)
        assert crop_window(recipe, record, Draw(0, record.key, 0), 1).native, name


@pytest.mark.flags("in_json")
def test_a_picture_a_line(folder: Path) -> None:
    lines = [
        {"image_path": "0000.png", "caption": "a cat", "image_size": [64, 64]},
        {"image_path": "0001", "tags": "x, y"},
    ]
    (folder / "meta.jsonl").write_text("".join(f"{json.dumps(line)}\n\n" for line in lines))
    index = built(folder, None, data={"in_json": str(folder / "meta.jsonl")})
    assert captions(index) == {"0000.png": "a cat", "0001.png": "x, y"}
    (folder / "meta.jsonl").write_text('{"image_path": "0000.png"}\n[1]\n')
    with pytest.raises(DataFault, match=r"meta\.jsonl, line 2"):
        built(folder, None, data={"in_json": str(folder / "meta.jsonl")})
