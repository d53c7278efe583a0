"""Reference images: found by every source, cut and mirrored as their images are, and refused by name where they do not fit."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from difftrain.config import TrainConfig
from difftrain.contracts import DataFault, Draw, FeatureSpec
from difftrain.data.media.control import NO_REFERENCE, TOO_MANY
from difftrain.data.prepare import Data, open_data, prepare
from difftrain.data.samples import SampleMaker
from difftrain.testing.pictures import picture

SIZES = [(96, 64), (64, 64), (64, 96), (64, 64)]
NUMBERS = range(len(SIZES))


def inverse(data: bytes, shift: int = 0) -> bytes:
    """Return what a picture is edited from: its negative, so that a pixel of either tells the other's."""
    pixels = 255 - np.asarray(Image.open(io.BytesIO(data))) + np.uint8(shift)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def targets(place: Path) -> None:
    for number in NUMBERS:
        put(place / "a" / f"{number}.png", picture(number, SIZES[number]))
        (place / "a" / f"{number}.txt").write_text(f"edit {number}")


def one_folder(place: Path) -> dict[str, Any]:
    targets(place)
    for number in NUMBERS:
        put(place / "ref" / f"{number}.webp.png", inverse(picture(number, SIZES[number])))
        (place / "ref" / f"{number}.webp.png").rename(place / "ref" / f"{number}.png")
    return {"dirs": [str(place / "a")], "control_dirs": [str(place / "ref")]}


def two_folders(place: Path) -> dict[str, Any]:
    made = one_folder(place)
    for number in NUMBERS:
        put(place / "other" / f"{number}_0.png", inverse(picture(number, SIZES[number]), shift=1))
    return made | {"control_dirs": [str(place / "ref"), str(place / "other")], "num_control": 2}


def numbered(place: Path) -> dict[str, Any]:
    targets(place)
    for number in NUMBERS:
        for which in (1, 2):
            put(place / "ref" / f"{number}_{which}.png", inverse(picture(number, SIZES[number]), which - 1))
    return {"dirs": [str(place / "a")], "control_dirs": [str(place / "ref")], "num_control": 2}


def in_tars(place: Path) -> dict[str, Any]:
    (place / "t").mkdir()
    with tarfile.open(place / "t" / "0.tar", "w") as tar:
        for number in NUMBERS:
            data = picture(number, SIZES[number])
            files = {".png": data, ".txt": b"edit", ".control.png": inverse(data), ".reference_1.png": inverse(data, 1)}
            for suffix, content in files.items():
                info = tarfile.TarInfo(f"{number:03d}{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return {"dirs": [str(place / "t")], "num_control": 2}


def in_columns(place: Path) -> dict[str, Any]:
    rows = [
        {"image": (data := picture(n, SIZES[n])), "caption": "edit", "control_1": {"bytes": inverse(data)},
         "control_2": {"bytes": inverse(data, 1)}}
        for n in NUMBERS
    ]  # fmt: skip
    (place / "p").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "p" / "0.parquet", row_group_size=3)
    return {"dirs": [str(place / "p")], "num_control": 2}


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a folder": one_folder,
    "two folders": two_folders,
    "numbered": numbered,
    "tars": in_tars,
    "columns": in_columns,
}


def opened(place: Path, data: dict[str, Any]) -> Data:
    more = {"resolution": (64, 64), "cache_dir": str(place / "cache"), "workers": 0, "num_control": 1}
    cfg = TrainConfig.model_validate({"data": more | data, "training": {"seed": 1}})
    return open_data(cfg, prepare(cfg, log=lambda line: None))


def maker(data: Data) -> SampleMaker:
    return SampleMaker(data.index, data.recipes, FeatureSpec({}, {}), lambda captions: {}, 1)


@pytest.mark.parametrize("way", WAYS)
def test_references_are_cut_and_mirrored_as_their_images_are(way: str, tmp_path: Path) -> None:
    data = opened(tmp_path, WAYS[way](tmp_path) | {"flip": True, "random_crop": True})
    assert data.index.count == len(SIZES) and not data.reasons
    windows = set()
    for record in data.index.records(range(data.index.count)):
        for use in range(4):
            draw = Draw(record.id, record.key, use)
            sample = maker(data).sample(record, draw, 0)
            assert sample.pixels is not None and len(sample.control) == data.recipes[0].num_control
            for shift, reference in enumerate(sample.control):
                np.testing.assert_array_equal(reference, 255 - sample.pixels + np.uint8(shift))
            windows.add((sample.crop_top_left, sample.flipped))
    assert len(windows) > 4


def test_a_batch_has_a_feature_for_each(tmp_path: Path) -> None:
    data = opened(tmp_path, in_tars(tmp_path))
    records = data.index.records(range(data.index.count))
    draws = [Draw(record.id, record.key, 0) for record in records]
    samples = [maker(data).sample(record, draw, 0) for record, draw in zip(records, draws, strict=True)]
    batch = maker(data).collate(samples[0].record and data.tables.training[0].bucket, samples, draws, [])
    first, second = batch.features["control_pixels"], batch.features["control_2_pixels"]
    assert torch.equal(first + 1, second) and torch.equal(255 - batch.features["pixels"], first)


SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda ref: ref.unlink(), NO_REFERENCE),
    "empty": (lambda ref: ref.write_bytes(b""), "empty"),
    "broken": (lambda ref: ref.write_bytes(ref.read_bytes()[:200]), "truncated"),
    "no image": (lambda ref: ref.write_bytes(b"a text"), "not an image"),
    "another shape": (lambda ref: put(ref, picture(9, (64, 80))), "other shape"),
    "tiny": (lambda ref: put(ref, picture(9, (8, 8))), "too small"),
    "a series": (lambda ref: [put(ref.with_name(f"1_{n}.png"), ref.read_bytes()) for n in (0, 1)] + [ref.unlink()],
                 TOO_MANY),
}  # fmt: skip


@pytest.mark.parametrize("verify", ["full", "quick"])
@pytest.mark.parametrize("how", SPOILS)
def test_an_image_whose_reference_does_not_do_is_rejected_by_name(how: str, verify: str, tmp_path: Path) -> None:
    spoil, kind = SPOILS[how]
    asked = one_folder(tmp_path) | {"verify": verify}
    spoil(tmp_path / "ref" / "1.png")
    data = opened(tmp_path, asked)
    (reject,) = data.rejects()
    assert reject.path == str(tmp_path / "a" / "1.png") and reject.reason.startswith(f"{kind}: ")
    assert str(tmp_path / "ref") in reject.reason and data.index.count == len(SIZES) - 1


def test_a_reference_that_is_put_right_is_looked_at_again(tmp_path: Path) -> None:
    asked = one_folder(tmp_path)
    good = (tmp_path / "ref" / "1.png").read_bytes()
    (tmp_path / "ref" / "1.png").write_bytes(good[:200])
    assert opened(tmp_path, asked).index.count == len(SIZES) - 1
    (tmp_path / "ref" / "1.png").write_bytes(good)
    assert opened(tmp_path, asked).index.count == len(SIZES)


def test_a_reference_without_its_image_and_a_row_without_one_are_named(tmp_path: Path) -> None:
    asked = in_tars(tmp_path)
    with tarfile.open(tmp_path / "t" / "0.tar", "a") as tar:
        info = tarfile.TarInfo("lone.control.png")
        info.size = len(picture(1, (64, 64)))
        tar.addfile(info, io.BytesIO(picture(1, (64, 64))))
    (reject,) = opened(tmp_path, asked).rejects()
    assert reject.path.endswith("!lone.control.png") and reject.reason.startswith("no image")
    asked = in_columns(tmp_path)
    table = pyarrow.parquet.read_table(tmp_path / "p" / "0.parquet").to_pylist()
    table[2]["control_2"] = None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "p" / "0.parquet")
    (reject,) = opened(tmp_path, asked).rejects()
    assert reject.path.endswith("!2") and reject.reason.startswith("no reference")
    with pytest.raises(DataFault, match="num_control = 3"):
        opened(tmp_path, asked | {"num_control": 3})


def test_references_are_wanted_and_nobody_says_where_they_are(tmp_path: Path) -> None:
    targets(tmp_path)
    with pytest.raises(DataFault, match="control_path"):
        opened(tmp_path, {"dirs": [str(tmp_path / "a")]})


def test_a_tar_of_other_models_is_read_as_before(tmp_path: Path) -> None:
    data = opened(tmp_path, in_tars(tmp_path) | {"num_control": 0, "max_rejected_share": 1.0})
    assert data.index.count == len(SIZES) and data.reasons == {"no caption": 2 * len(SIZES)}
    assert not any(record.control for record in data.index.records(range(len(SIZES))))
