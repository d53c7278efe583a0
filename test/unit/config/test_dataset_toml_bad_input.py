"""Data set TOMLs over bad folders: what cannot be used ends with words that help, what is passed over is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from looking import looked_at  # noqa: F401
from PIL import Image
from refusals import is_about, names

from difftrain.config import TrainConfig
from difftrain.config.datasets.datasets import Resolved, applied
from difftrain.config.datasets.diffusion_pipe import resolve
from difftrain.config.schema.sections import EvalSetSection
from difftrain.contracts import DataFault
from difftrain.data.evaluation_sets import common_records, open_set
from difftrain.data.media.media import Unusable
from difftrain.data.prepare import open_data, prepare
from difftrain.testing.pictures import write_folder

pytestmark = pytest.mark.usefixtures("looked")
ONE = "resolutions = [64]\n[[directory]]\npath = 'a'\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_folder(tmp_path / "a", [(64, 64)] * 4)
    return tmp_path


def read(place: Path, text: str) -> tuple[TrainConfig, Resolved]:
    (place / "data.toml").write_text(text)
    cfg = TrainConfig.model_validate(
        {"data": {"cache_dir": str(place / "cache"), "workers": 0}, "training": {"seed": 1}}
    )
    return cfg, resolve(place / "data.toml", cfg, multiple=16)


def resolved(place: Path, text: str) -> TrainConfig:
    cfg, found = read(place, text)
    assert not found.faults, "\n".join(map(str, found.faults))
    cfg = applied(cfg, found)
    return cfg.model_copy(update={"loss": cfg.loss.model_copy(update={"masked": found.masked})})


def said(place: Path, text: str = ONE) -> str:
    lines: list[str] = []
    prepare(resolved(place, text), log=lines.append)
    return "\n".join(lines)


def fault(place: Path, text: str = ONE) -> str:
    with pytest.raises(DataFault) as caught:
        said(place, text)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_captions_json_counts_pictures_and_names_what_is_none(place: Path) -> None:
    named: dict[str, Any] = {
        "0000.png": ["x", "", " "],
        "0001.png": "y",
        "gone.png": "z",
        "also.png": ["z"],
        "0002.png": [""],
    }
    (place / "a" / "captions.json").write_text(json.dumps(named))
    found = said(place)
    assert "captions: 3 from captions.json, 1 none" in found
    named_lines = [line for line in found.splitlines() if "captions.json: 2" in line]
    assert len(named_lines) == 2 and names(named_lines[0], "'also.png'") and names(named_lines[1], "empty")
    assert "not read: 4 .txt" in found and ".json" not in found.partition("not read:")[2].partition("\n")[0]
    assert "rejected, no caption: 1" in found and "rejected, empty caption: 1" in found


def test_masks_are_counted_where_not_every_picture_has_one(place: Path) -> None:
    masks = place / "a" / "masks"
    masks.mkdir()
    Image.new("L", (64, 64), 255).save(masks / "0001.png")
    found = said(place, f"{ONE}mask_path = 'a/masks'\n")
    assert names(found, "1 of 4", masks)
    Image.new("L", (8, 8), 1).save(place / "all.png")
    both = said(place, f"{ONE}mask_path = 'a/masks'\ndefault_mask_file = 'all.png'\n")
    (whole,), (beside,) = ([line for line in lines.splitlines() if str(masks) in line] for lines in (found, both))
    assert names(beside, "1 of 4") and beside != whole  # the others have one, too
    for n in range(4):
        Image.new("L", (64, 64), 255).save(masks / f"{n:04d}.png")
    assert str(masks) not in said(place, f"{ONE}mask_path = 'a/masks'\n")


def test_a_mask_that_is_none_or_hides_everything(place: Path) -> None:
    Image.new("L", (64, 64), 0).save(place / "black.png")
    assert names(fault(place, f"{ONE}default_mask_file = 'black.png'\n"), place / "black.png", "black")
    (place / "a" / "m").mkdir()
    (place / "a" / "m" / "0000.png").write_text("no mask")
    cfg = resolved(place, f"{ONE}mask_path = 'a/m'\n")
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    record = next(each for each in data.index.records(range(4)) if each.name.endswith("0000.png"))
    masks = data.recipes[0].masks
    assert masks is not None
    with pytest.raises(Unusable) as caught:
        masks.read(record)
    assert names(caught.value, "mask", "m/0000.png", "text")


def test_links_in_a_circle_are_no_folders(place: Path) -> None:
    (place / "a" / "circle").symlink_to("circle")
    (place / "a" / "up").symlink_to(place / "a")
    (place / "a" / "round.png").symlink_to("round.png")
    found = said(place)
    assert "index: 4 records, 1 rejected" in found
    deep = place / "deep" / "3_cats"
    deep.parent.mkdir()
    (place / "a").rename(deep)
    (deep.parent / "circle").symlink_to("circle")
    assert "index: 12 records, 3 rejected" in said(place, "resolutions = [32, 64, 96]\n[[directory]]\npath = 'deep'\n")


def test_nothing_left_offers_no_share_to_raise(place: Path) -> None:
    for picture in (place / "a").glob("*.png"):
        picture.write_text("no picture")
    found = fault(place)
    assert names(found, "4 of 4", "rejected") and "--max_rejected_share" not in found
    (place / "a" / "0000.txt").unlink()
    assert "--allow_empty_caption" in fault(place)


def test_a_share_that_leaves_nothing_is_named(place: Path) -> None:
    found = fault(place, f"{ONE}subsample_ratio = 0.000001\n")
    assert names(found, "subsample_ratio = 1e-06", "4") and "validation" not in found


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("ar_buckets = [0]", ["ar_buckets", "[0]", "0.01", "100"]),
        ("ar_buckets = [1e9]", ["ar_buckets", "[1000000000.0]", "0.01", "100"]),
        ("ar_buckets = [[1, 900]]", ["ar_buckets", "[[1, 900]]", "0.01", "100"]),
        ("ar_buckets = ['1:1']", ["ar_buckets", "['1:1']"]),
        ("min_ar = 0.001\nmax_ar = 2\nnum_ar_buckets = 3", ["min_ar", "0.001", "0.01", "100"]),
        ("resolutions = [100000]", ["resolutions", "[100000]", "16384"]),
        ("resolutions = [[64, 100000]]", ["resolutions", "[[64, 100000]]", "16384"]),
    ],
)  # fmt: skip
def test_sizes_out_of_all_bounds_are_one_fault(place: Path, line: str, facts: list[str]) -> None:
    given = "" if line.startswith("resolutions") else "resolutions = [64]\n"
    _, found = read(
        place,
        f"enable_ar_bucket = {str(not line.startswith('res')).lower()}\n{given}{line}\n[[directory]]\npath = 'a'\n",
    )
    assert len(found.faults) == 1 and is_about(found.faults[0], *facts)


def test_a_path_that_is_a_file_and_a_file_of_nothing(place: Path) -> None:
    _, found = read(place, "resolutions = [64]\n[[directory]]\npath = 'a/0000.png'\n")
    (given,) = found.faults
    assert is_about(given, f"{place / 'data.toml'} [[directory]] 1 path", f"{str(place / 'a' / '0000.png')!r}")
    assert names(given.remedy, ".tar", ".parquet")
    subset = f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{place / 'a'}'\n"
    kohya = f"[general]\nresolution = 64\n{subset}num_repeats = 0\n"
    _, found = read(place, kohya)
    assert len(found.faults) == 1 and is_about(found.faults[0], "[[datasets]]", "num_repeats = 0")


@pytest.mark.parametrize("verify", ["full", "quick"])
def test_pictures_of_an_evaluation_set_that_are_trained_on_are_counted(place: Path, verify: str) -> None:
    write_folder(place / "b", [(64, 64)] * 3, start=20)
    cfg = resolved(place, ONE.replace("[64]", "[64, 32]"))
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"verify": verify})})
    trained = open_data(cfg, prepare(cfg, log=lambda line: None))
    (place / "b" / "0020.png").write_bytes((place / "a" / "0001.png").read_bytes())  # known by its bytes alone

    def common(folder: str) -> int:
        other = resolved(place, ONE.replace("'a'", f"'{folder}'"))
        section = EvalSetSection(name="held", config="data.toml", datasets=other.data.datasets)
        return common_records(trained.index, open_set(cfg, section, lambda line: None).data.index)

    assert common("a") == 4
    assert common("b") == (1 if verify == "full" else 0)
