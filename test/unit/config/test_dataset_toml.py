"""diffusion-pipe's data set TOML: every key, every fault at once, and what comes of resolutions and aspect ratios."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import is_about, names

from difftrain.config.datasets.datasets import Resolved, applied
from difftrain.config.datasets.diffusion_pipe import DirectoryReader, resolve, sizes_of
from difftrain.config.datasets.keys import DIFFUSION_PIPE, KEYS
from difftrain.config.datasets.kohya import resolve as resolve_kohyas
from difftrain.config.rules import outputs
from difftrain.config.schema.sections import (
    CaptionSection,
    DataSection,
    DatasetSection,
    LossSection,
    SubsetSection,
    TrainConfig,
)
from difftrain.config.schema.validate import fields
from difftrain.models.registry import FAMILIES
from difftrain.testing.pictures import write_folder

PUBLISHED = """
[[datasets]]
root = '/data/of/pictures'
caption_prefix = ''
shuffle_capitalization = false
shuffle_delimiter = ', '
shuffle_count = 0

[[datasets]]
root = '/data/of/clips'
support_video = true
framerate = 16
video_clip_mode = 'single_beginning'
caption_prefix = ''
"""
EVERYTHING = """
resolutions = [64, [80, 60]]
enable_ar_bucket = true
min_ar = 0.5
max_ar = 2.0
num_ar_buckets = 3
frame_buckets = [1, 33]
cache_shuffle_num = 2
cache_shuffle_delimiter = '; '
skip_empty_caption = false
subsample_ratio = 0.5
[[directory]]
path = 'a'
num_repeats = 1.5
caption_prefix = 'a photo, '
mask_path = 'a/masks'
default_mask_file = 'a/masks/0000.png'
shuffle_capitalization = true
[[directory]]
path = 'b'
shuffle_tags = false
cache_shuffle_num = 0
resolutions = [64]
ar_buckets = [[2, 1], [1, 1], [1, 2]]
caption_extension = '.txt'
online_captions = true
shuffle_metadata = false
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_folder(tmp_path / "a", [(64, 64)])
    write_folder(tmp_path / "a" / "masks", [(64, 64)])
    write_folder(tmp_path / "b", [(64, 64)])
    (tmp_path / "b" / "captions.json").write_text('{"0000.png": ["one", "two"]}')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def found(place: Path, text: str, **sections: Any) -> Resolved:
    (place / "data.toml").write_text(text)
    return resolve(place / "data.toml", TrainConfig.model_validate(sections), multiple=16)


def said(result: Resolved) -> str:
    return "\n".join(map(str, result.faults))


def test_the_published_example_parses_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(PUBLISHED)
    reader = DirectoryReader(tmp_path / "d.toml", TrainConfig())
    directories = reader.directories(reader.tables("d.toml") or {})
    assert not reader.out.faults and [each.values["path"] for each in directories] == [
        "/data/of/pictures",
        "/data/of/clips",
    ]
    assert directories[1].values["framerate"] == 16 and directories[0].values["cache_shuffle_num"] == 0


@pytest.mark.parametrize("family", ["sdxl", "sd3"])
def test_a_run_without_clips_refuses_their_directory_by_name(place: Path, family: str) -> None:
    text = PUBLISHED.replace("/data/of/pictures", "a").replace("/data/of/clips", "b")
    result = found(place, text, model={"family": family}, data={"resolution": (64, 64)})
    (fault,) = result.faults
    assert is_about(fault, "[[datasets]] 2 support_video", "clips", f"'{family}'")


def test_every_key_that_is_known(place: Path) -> None:
    result = found(place, EVERYTHING)
    assert not result.faults, said(result)
    sixty_four, others = result.datasets
    assert sixty_four.sizes == ((48, 96), (64, 64), (96, 48)) and sixty_four.enable_bucket
    assert len(sixty_four.subsets) == 2 and others.resolution == (64, 64)
    (a,) = others.subsets
    assert (a.repeats, a.share, a.image_dir) == (1.5, 0.5, str(place / "a"))
    assert a.conditioning_dir == str(place / "a/masks") and a.default_mask == str(place / "a/masks/0000.png")
    assert a.masks_optional and a.flat and result.masked and a.captions_file is None
    told = a.captions
    assert (told.dialect, told.prefix, told.separator, told.variants) == ("diffusion_pipe", "a photo, ", "; ", 2)
    assert told.shuffle and told.shuffle_capitalization and told.allow_empty
    b = sixty_four.subsets[1]
    assert (b.repeats, b.captions.shuffle, b.captions.prefix, b.captions.extension) == (1, False, None, ".txt")
    assert b.captions_file == "captions.json" and b.conditioning_dir is None
    for name, fact in (("shuffle_metadata", "false"), ("frame_buckets", "1")):
        assert any(is_about(note, name, fact) for note in result.notes), result.notes
    cfg = applied(TrainConfig(), result)
    assert cfg.loss.masked and cfg.data.datasets == result.datasets


def test_one_mask_for_all_is_a_mask(place: Path) -> None:
    """As a run's own config.toml has it, which says loss.masked too: nothing is said to have no effect."""
    result = found(place, "resolutions = [64]\n[[directory]]\npath = 'a'\ndefault_mask_file = 'a/masks/0000.png'\n")
    assert not list(outputs.sample_companions(applied(TrainConfig(), result), {"loss.masked"}))
    assert list(outputs.sample_companions(TrainConfig(loss=LossSection(masked=True)), {"loss.masked"}))


def test_directories_of_one_resolution_and_one_list_of_buckets_share_a_data_set(place: Path) -> None:
    text = "resolutions = [64, 128]\n[[directory]]\npath = 'a'\n[[directory]]\npath = 'b'\nresolutions = [128]\n"
    result = found(place, text)
    assert [(each.resolution, len(each.subsets)) for each in result.datasets] == [((64, 64), 1), ((128, 128), 2)]
    assert not result.datasets[0].enable_bucket and result.datasets[0].sizes == ((64, 64),)


def test_batches_follow_the_resolution(place: Path) -> None:
    (place / "d.toml").write_text("resolutions = [64, 128]\n[[directory]]\npath = 'a'\n")
    batch_of = {64: 8, 128: 2}.__getitem__
    result = resolve(place / "d.toml", TrainConfig(), multiple=16, batch_of=batch_of)
    assert [each.batch_size for each in result.datasets] == [8, 2]
    assert applied(TrainConfig(), result).training.batch_size == 8


def test_all_that_is_wrong_is_said_at_once(place: Path) -> None:
    text = """
resolution = [64]
num_repeats = 'two'
min_ar = 2.0
max_ar = 0.5
num_ar_buckets = 3
enable_ar_bucket = 1
path = 'a'
[[directory]]
path = 'a'
root = 'b'
enable_ar_bucket = true
resolutions = [[64, 64, 1]]
subsample_ratio = 1.5
video_clip_mode = 'single_end'
shuffle_delimiter = ''
control_path = 'b'
mask_path = 'nowhere'
default_mask_file = 'nowhere.png'
caption_prefx = 'x'
[[directory]]
num_repeats = 0
"""
    result = found(place, text)
    top = str(place / "data.toml")
    for where, *facts in (
        (f"{top} resolution", "resolutions"),
        (f"{top} num_repeats", "'two'", "0.0001"),
        (f"{top} enable_ar_bucket", "1", "true", "false"),
        (f"{top} path", "[[directory]]"),
        ("[[directory]] 1 root", "contradicts", "path", "'b'", "'a'"),
        ("[[directory]] 1 resolutions", "[[64, 64, 1]]", "sides"),
        ("[[directory]] 1 subsample_ratio", "1.5", "0", "1"),
        ("[[directory]] 1 video_clip_mode", "single_end", "multiple_overlapping"),
        ("[[directory]] 1 shuffle_delimiter", "''"),
        ("[[directory]] 1 control_path", "'sdxl'"),
        ("[[directory]] 1 mask_path", "folder", "'nowhere'"),
        ("[[directory]] 1 default_mask_file", "file", "'nowhere.png'"),
        ("[[directory]] 1 caption_prefx", "caption_prefix"),
        ("min_ar", "max_ar", "2 > 0.5"),
        ("[[directory]] 2 num_repeats", "0"),
    ):
        assert any(is_about(fault, where, *facts) for fault in result.faults), (where, facts, said(result))
    assert not result.datasets


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("resolutions = [64]", ["data.toml", "[[directory]]"]),
        ("[[directory]]\npath = 'a'\n[[datasets]]\nroot = 'b'", ["data.toml", "[[directory]]", "[[datasets]]"]),
        ("[[directory]]\npath = 'a'", ["[[directory]] 1", "resolutions", "missing"]),
        ("resolutions = [64]\n[[directory]]\nnum_repeats = 2", ["[[directory]] 1 path", "missing"]),
        ("resolutions = [64]\n[[directory]]\npath = 'nothing'", ["[[directory]] 1 path", "folder", "'nothing'"]),
        ("resolutions = [64]\nenable_ar_bucket = true\n[[directory]]\npath = 'a'", ["[[directory]] 1", "min_ar", "max_ar", "num_ar_buckets", "missing"]),
        ("resolutions = [64]\n[[directory]]\npath = 'a'\nonline_captions = true", ["online_captions", "captions.json", "a"]),
        ("size_buckets = [[64, 64, 33]]\n[[directory]]\npath = 'a'", ["size_buckets", "frame_buckets", "1"]),
        ("resolutions = []\n[[directory]]\npath = 'a'", ["resolutions", "[]"]),
        ("this is no TOML", ["data.toml", "TOML"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(place: Path, text: str, facts: list[str]) -> None:
    result = found(place, text)
    assert any(is_about(fault, *facts) for fault in result.faults), said(result)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (fault,) = resolve(tmp_path / "none.toml", TrainConfig(), multiple=8).faults
    assert names(fault, tmp_path / "none.toml")


def test_kohyas_file_is_known_by_its_tables(place: Path) -> None:
    text = f"[general]\nresolution = 64\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{place / 'a'}'\nnum_repeats = 3\n"
    (dataset,) = found(place, text).datasets
    assert dataset.subsets[0].repeats == 3 and dataset.subsets[0].captions.dialect == "kohya"


def test_paths_are_of_the_working_directory_then_of_the_file(place: Path) -> None:
    text = "resolutions = [64]\n[[directory]]\npath = 'a'\n"
    assert found(place, text).datasets[0].subsets[0].image_dir == str(place / "a")
    (Path.cwd() / "a").symlink_to(place / "a")
    assert found(place, text).datasets[0].subsets[0].image_dir == "a"
    (Path.cwd() / "a").unlink()
    write_folder(Path.cwd() / "a", [(64, 64)])
    (fault,) = found(place, text).faults
    assert is_about(fault, "[[directory]] 1 path", "'a'", Path.cwd(), place)


def test_a_folder_without_data_of_its_own_is_read_at_any_depth(place: Path) -> None:
    (place / "b").rename(place / "elsewhere" / "b")
    text = "resolutions = [64]\n[[directory]]\npath = 'elsewhere'\n[[directory]]\npath = 'a'\n"
    deep, flat = found(place, text).datasets[0].subsets
    assert not deep.flat and flat.flat


@given(
    sides=st.lists(st.integers(64, 2048), min_size=1, max_size=3),
    low=st.floats(0.2, 1.0),
    high=st.floats(1.0, 5.0),
    count=st.integers(1, 11),
    multiple=st.sampled_from((8, 16, 32)),
)
def test_buckets_have_the_area_of_their_resolution_and_ratios_evenly_in_log_space(
    sides: list[int], low: float, high: float, count: int, multiple: int
) -> None:
    values = {"resolutions": sides, "enable_ar_bucket": True, "min_ar": low, "max_ar": high, "num_ar_buckets": count}
    made = sizes_of(values, multiple)
    assert [each.side for each in made] == sorted(set(sides))
    for each in made:
        assert len(each.sizes) <= count and each.nominal == (each.nominal[0],) * 2
        for width, height in each.sizes:
            assert width % multiple == 0 == height % multiple and min(width, height) >= multiple
        steps = (math.log(high) - math.log(low)) / max(1, count - 1)
        wanted = [math.exp(math.log(low) + n * steps) for n in range(count)] if count > 1 else [low]
        exact = [(each.side * math.sqrt(ratio), each.side / math.sqrt(ratio)) for ratio in wanted]
        for width, height in exact:
            near = [s for s in each.sizes if abs(s[0] - width) <= multiple / 2 + 1e-6 or s[0] == multiple]
            assert any(abs(s[1] - height) <= multiple / 2 + 1e-6 or s[1] == multiple for s in near)


def test_buckets_that_are_listed(place: Path) -> None:
    text = "size_buckets = [[100, 60, 1], [64, 64, 1]]\nresolutions = [512]\n[[directory]]\npath = 'a'\n"
    result = found(place, text)
    assert result.datasets[0].sizes == ((64, 64), (96, 64)) and is_about(result.notes[0], "resolutions", "size_buckets")


@pytest.mark.parametrize(
    ("keys", "cache", "expected"),
    [
        ("shuffle_tags = true", {}, (True, None)),
        ("shuffle_tags = true", {"text_to_disk": True}, (True, 1)),
        ("cache_shuffle_num = 5", {}, (True, 5)),
        ("shuffle_count = 3", {"text": True}, (True, 3)),
        ("shuffle_capitalization = true", {"text": True}, (False, 2)),
        ("shuffle_capitalization = true", {}, (False, None)),
        ("", {"text": True}, (False, None)),
    ],
)
def test_how_often_captions_are_drawn_anew(place: Path, keys: str, cache: dict[str, Any], expected: Any) -> None:
    result = found(place, f"resolutions = [64]\n{keys}\n[[directory]]\npath = 'a'\n", cache=cache)
    told = result.datasets[0].subsets[0].captions
    assert (told.shuffle, told.variants) == expected


def test_what_the_run_says_of_captions_holds_where_the_file_says_nothing(place: Path) -> None:
    text = "resolutions = [64]\n[[directory]]\npath = 'a'\n"
    told = found(place, text, captions={"dropout_rate": 0.1}).datasets[0].subsets[0].captions
    assert told.dropout_rate == 0.1


ONE = "[[directory]]\npath = 'a'\n"
# a value other than the default, of every field of [data]; None: of the run as a whole, so that it holds for any data
GIVEN: dict[str, Any] = {
    "resolution": (96, 64), "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512, "bucket_reso_steps": 32,
    "bucket_no_upscale": True, "sizes": ((64, 64),), "resize_interpolation": "area", "flip": True, "random_crop": True,
    "color_aug": True, "face_crop_range": (1.0, 2.0), "alpha_mask": True, "conditioning_dir": "a/masks", "control_dirs": ("a/masks",), "repeats": (2,),
    **dict.fromkeys(("dirs", "reg_dirs", "in_json", "dataset_class", "dataset_config", "datasets")),  # the data themselves
    **dict.fromkeys(("tar_order", "tar_streams", "tar_window", "image_column", "caption_column", "verify",
                     "max_rejected_share", "shard_size", "prefetch", "workers", "image_decoder", "cache_dir", "split",
                     "max_samples", "epoch_batches", "num_control", "control_columns", "control_dropout", "control_size",
                     "frame_buckets", "framerate", "video_clip_mode")),
}  # fmt: skip


def test_every_field_of_data_is_inherited_or_said_to_have_no_effect(place: Path) -> None:
    assert set(GIVEN) == set(DataSection.model_fields), "say what a new field means to such a file"
    for name, value in GIVEN.items():
        if value is None:
            continue
        result = found(place, f"resolutions = [64]\n{ONE}", data={name: value})
        inherited = getattr(result.datasets[0].subsets[0], name, None) == value
        assert inherited != (f"data.{name}" in result.overridden), name
    assert "data.resolution" not in found(place, ONE, data={"resolution": (64, 64)}).overridden


def test_a_side_below_what_the_family_takes_is_no_bucket(place: Path) -> None:
    for key in ("resolutions = [512, 5]", "size_buckets = [[64, 5, 1]]"):
        (fault,) = found(place, f"{key}\n{ONE}").faults
        assert is_about(fault, key.split()[0], "5", "16", "sdxl")
    assert not found(place, f"resolutions = [16]\n{ONE}").faults


def test_the_page_says_of_every_key_what_the_table_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "dataset_toml.md").read_text(encoding="utf-8")
    told: dict[str, set[str]] = {}
    for key in DIFFUSION_PIPE.values():
        told.setdefault(DIFFUSION_PIPE[key.spells].help if key.spells else key.help, set()).add(key.name)
    rows = [line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| `")]
    assert {help: set(re.findall(r"`(\w+)`", names)) for names, help in rows} == told and len(rows) == len(told)


def test_every_row_leads_to_fields_that_are_there_and_says_what_it_means() -> None:
    owners = {"dataset": DatasetSection, "subset": SubsetSection, "captions": CaptionSection}
    for key in KEYS:
        section, _, name = key.to.partition(".")
        owner = owners.get(section, TrainConfig.model_fields.get(section))
        assert not key.to or name in getattr(owner, "annotation", owner).model_fields, key  # type: ignore[union-attr]
        assert not key.run or key.run in set(fields()), key
        assert key.help or key.run or key.spells in DIFFUSION_PIPE, key
        assert key.kind or key.to, key
        assert (key.status in ("later", "refused")) == bool(key.why and key.remedy), key
        assert (key.status == "later") == hasattr(FAMILIES["sdxl"], key.needs or "?"), key


def test_the_door_of_kohyas_files_says_where_this_kind_is_taken(place: Path) -> None:
    (place / "d.toml").write_text("[[directory]]\npath = 'a'\n")
    first = resolve_kohyas(place / "d.toml", TrainConfig()).faults[0]
    assert "diffusion-pipe's" in first.what and "train.py" in first.remedy
