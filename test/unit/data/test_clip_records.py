"""Clips as data: which windows of a video are samples, what is rejected, and what is decoded of them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clip_files import SIZE_WH, numbered, numbered_bytes, numbers_of
from PIL import Image
from refusals import is_about

from difftrain.cache.manifest.content_hash import picture_contents
from difftrain.config import TrainConfig
from difftrain.config.datasets.clips import clip_buckets
from difftrain.config.parse_keys import parse
from difftrain.contracts import ClipFacts, ConfigFault, Draw
from difftrain.contracts.family import Feature, FeatureSpec
from difftrain.data.plan.plan import RankShare
from difftrain.data.prepare import Data, global_batches, make_plan, open_data, prepare
from difftrain.data.samples import SampleMaker

FPS = 8


def config(folder: Path, cache: Path, held_out: float = 0.0, **data: Any) -> TrainConfig:
    """Return what reads the clips of a folder at FPS, in their own size."""
    section = {
        "dirs": (str(folder),), "resolution": SIZE_WH, "frame_buckets": (1, 5, 9), "framerate": FPS,
        "cache_dir": str(cache), "workers": 0, **data,
    }  # fmt: skip
    return TrainConfig.model_validate(
        {
            "model": {"family": "wan"},
            "data": section,
            "training": {"seed": 1},
            "validation": {"split": held_out},
        }
    )


def prepared(folder: Path, **data: Any) -> tuple[Data, TrainConfig]:
    cfg = config(folder, folder.parent / "cache", **data)
    return open_data(cfg, prepare(cfg, log=lambda line: None)), cfg


def shown(data: Data, record_id: int = 0, occurrence: int = 0) -> list[int]:
    """Decode a record as training does and return the numbers of its frames."""
    maker = SampleMaker(
        data.index, data.recipes, FeatureSpec({"latents": Feature(4, 8, frames=4)}, {}), lambda c: {}, 1
    )
    record = data.index.record(record_id)
    sample = maker.sample(record, Draw(record.id, record.key, occurrence), 0)
    assert sample.pixels is not None
    frames = sample.pixels if sample.pixels.ndim == 4 else sample.pixels[:, None]
    return numbers_of(frames.transpose(1, 2, 3, 0))


def write(folder: Path, name: str, count: int, caption: str | None = "words", **options: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(numbered_bytes(count, **{"fps": FPS, **options}))
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption)


def clips(data: Data) -> dict[str, tuple[int, int]]:
    """Return the first frame and the frames of every record, by its name below the folder."""
    records = [data.index.record(i) for i in range(data.index.count)]
    return {
        one.name.rpartition("/")[2]: (one.clip.first if one.clip else 0, one.frames)
        for one in sorted(records, key=lambda one: one.name)
    }


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("single_beginning", {"long.mp4": (0, 9), "short.mp4": (0, 5)}),
        ("single_middle", {"long.mp4": (5, 9), "short.mp4": (1, 5)}),
        ("multiple_overlapping", {
            "long.mp4": (0, 9), "long.mp4#1": (5, 9), "long.mp4#2": (11, 9), "short.mp4": (0, 5), "short.mp4#1": (3, 5),
        }),
    ],
)  # fmt: skip
def test_a_video_is_cut_into_the_largest_bucket_that_it_fills(mode: str, expected: dict, tmp_path: Path) -> None:
    write(tmp_path / "a", "long.mp4", 20)
    write(tmp_path / "a", "short.mp4", 8)
    data, cfg = prepared(tmp_path / "a", video_clip_mode=mode)
    assert clips(data) == expected
    for number in range(data.index.count):
        clip = data.index.record(number).clip
        assert clip is not None and shown(data, number) == list(range(clip.first, clip.first + clip.frames))
    buckets = {str(rows.bucket): rows.uses for rows in data.tables.training}
    assert buckets == {
        "64x48x9": sum(n == 9 for _, n in expected.values()),
        "64x48x5": sum(n == 5 for _, n in expected.values()),
    }
    again = open_data(cfg, prepare(cfg, log=lambda line: None))
    assert again.index.folder == data.index.folder  # nothing has changed, and nothing is read again


def test_a_random_clip_is_another_at_every_use_and_always_the_same_one(tmp_path: Path) -> None:
    write(tmp_path / "a", "long.mp4", 30)
    data, _ = prepared(tmp_path / "a", video_clip_mode="random")
    firsts = [shown(data, 0, occurrence) for occurrence in range(12)]
    assert all(frames == list(range(frames[0], frames[0] + 9)) for frames in firsts)
    assert len({frames[0] for frames in firsts}) > 4 and max(frames[0] for frames in firsts) <= 21
    assert firsts == [shown(data, 0, occurrence) for occurrence in range(12)]


def test_images_stand_among_clips_in_a_bucket_of_one_frame(tmp_path: Path) -> None:
    write(tmp_path / "a", "clip.mp4", 12)
    Image.fromarray(numbered(3)).save(tmp_path / "a" / "still.png")
    (tmp_path / "a" / "still.txt").write_text("a still")
    pictures = [Image.fromarray(numbered(number)) for number in range(10)]
    pictures[0].save(
        tmp_path / "a" / "moves.webp", save_all=True, append_images=pictures[1:], duration=1000 // FPS, lossless=True
    )
    pictures[0].save(tmp_path / "a" / "one.gif")
    for name in ("moves", "one"):
        (tmp_path / "a" / f"{name}.txt").write_text(name)
    data, _ = prepared(tmp_path / "a")
    assert clips(data) == {"clip.mp4": (0, 9), "moves.webp": (0, 9), "one.gif": (0, 1), "still.png": (0, 1)}
    assert {str(rows.bucket): rows.records for rows in data.tables.training} == {"64x48": 2, "64x48x9": 2}
    numbers = {one.name.rpartition("/")[2]: one.id for one in map(data.index.record, range(4))}
    assert shown(data, numbers["still.png"]) == [3] and shown(data, numbers["moves.webp"]) == list(range(9))


def test_side_files_name_captions_parts_and_rates(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write(folder, "parts.mp4", 40, None)
    parts = [{"start": 1, "end": 2, "caption": "second"}, {"start": 2.5, "caption": ["third", "or so"]}]
    (folder / "parts.json").write_text(json.dumps({"clips": parts}))
    write(folder, "part.mp4", 40, "of the text")
    (folder / "part.json").write_text(json.dumps({"start": 3}))
    frames = folder / "drawn.FRAMES"
    frames.mkdir()
    for number in range(20):
        Image.fromarray(numbered(number)).save(frames / f"{number}.png")
    (folder / "drawn.json").write_text(json.dumps({"caption": "drawn", "fps": 2 * FPS}))
    data, _ = prepared(folder)
    records = {one.name.rpartition("/")[2]: one for one in map(data.index.record, range(data.index.count))}
    assert {name: one.captions for name, one in records.items()} == {
        "parts.mp4#1000-2000": ("second",), "parts.mp4#2500-5000": ("third", "or so"),
        "part.mp4#3000-5000": ("of the text",), "drawn.FRAMES": ("drawn",),
    }  # fmt: skip
    assert shown(data, records["parts.mp4#1000-2000"].id) == [8, 9, 10, 11, 12]
    assert shown(data, records["parts.mp4#2500-5000"].id) == list(range(20, 29))
    assert shown(data, records["part.mp4#3000-5000"].id) == list(range(24, 33))
    assert shown(data, records["drawn.FRAMES"].id) == list(range(0, 18, 2))


def test_kohyas_metadata_names_videos_with_a_suffix_or_without(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    for name in ("one", "two"):
        write(folder, f"{name}.mp4", 12, None)
    (tmp_path / "all.json").write_text(json.dumps({"one": {"caption": "first"}, "two.mp4": {"tags": "second"}}))
    data, _ = prepared(folder, in_json=str(tmp_path / "all.json"))
    records = map(data.index.record, range(data.index.count))
    assert {record.captions for record in records} == {("first",), ("second",)} and clips(data) == {
        "all.json!one": (0, 9), "all.json!two.mp4": (0, 9),
    }  # fmt: skip


def test_tars_and_parquet_hold_videos(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "tars"
    folder.mkdir()
    files = {"a.mp4": numbered_bytes(12, fps=FPS), "a.txt": b"in a tar", "b.mp4": numbered_bytes(6, fps=FPS),
             "b.txt": b"of the text", "b.json": json.dumps({"caption": "cut", "start": 0.125}).encode()}  # fmt: skip
    with tarfile.open(folder / "0.tar", "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data, _ = prepared(folder)
    assert clips(data) == {"0.tar!a.mp4": (0, 9), "0.tar!b.mp4#125-750": (0, 5)}
    assert {"in a tar", "cut"} == {data.index.record(i).captions[0] for i in range(2)}
    by_name = {one.name.rpartition("!")[2]: one.id for one in map(data.index.record, range(2))}
    assert shown(data, by_name["a.mp4"]) == list(range(9)) and shown(data, by_name["b.mp4#125-750"]) == [1, 2, 3, 4, 5]

    folder = tmp_path / "rows"
    (folder / "videos").mkdir(parents=True)
    (folder / "videos" / "c.webm").write_bytes(numbered_bytes(9, fps=FPS, form="webm", codec="libvpx-vp9"))
    rows = {"video": [files["b.mp4"]], "caption": ["bytes"]}, {"video_path": ["videos/c.webm"], "caption": ["a path"]}
    for number, columns in enumerate(rows):
        parquet.write_table(pyarrow.table(columns), folder / f"{number}.parquet")
    data, _ = prepared(folder)
    assert sorted(shown(data, number) for number in range(2)) == [[0, 1, 2, 3, 4], list(range(9))]


def test_what_cannot_be_a_clip_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write(folder, "good.mp4", 9)
    write(folder, "brief.mp4", 4)
    write(folder, "uncaptioned.mp4", 9, None)
    write(folder, "behind.mp4", 9, None)
    (folder / "behind.json").write_text(json.dumps({"caption": "c", "start": 7}))
    write(folder, "backwards.mp4", 9, None)
    (folder / "backwards.json").write_text(json.dumps({"caption": "c", "start": 2, "end": 1}))
    (folder / "cut.mp4").write_bytes(numbered_bytes(9, fps=FPS)[:300])
    (folder / "named.mp4").write_bytes(Path(__file__).read_bytes()[:2000])
    (folder / "none.frames").mkdir()
    for name in ("cut", "named", "none"):
        (folder / f"{name}.txt").write_text("words")
    data, _ = prepared(folder, max_rejected_share=1.0)
    reasons = {Path(one.path).name: one.reason for one in data.rejects()}
    assert clips(data) == {"good.mp4": (0, 9)}
    expected = {
        "brief.mp4": ("too short", "4 frames", "8 a second", "5"), "uncaptioned.mp4": ("no caption",),
        "behind.mp4#7000-": ("7 s", "1.125 s"), "backwards.mp4": ("broken sidecar", "2 s", "1 s"), "cut.mp4": (),
        "named.mp4": ("no video",), "none.frames": ("no frames",),
    }  # fmt: skip
    assert reasons.keys() == expected.keys()
    assert [name for name, facts in expected.items() for fact in facts if fact not in reasons[name]] == []


@pytest.mark.parametrize("epoch_batches", ["whole", "every"])
def test_images_among_clips_may_have_a_batch_of_their_own(epoch_batches: str, tmp_path: Path) -> None:
    for number in range(6):
        write(tmp_path / "a", f"{number}.mp4", 9)
        Image.fromarray(numbered(number)).save(tmp_path / "a" / f"still{number}.png")
        (tmp_path / "a" / f"still{number}.txt").write_text("a still")
    cfg = config(tmp_path / "a", tmp_path / "cache", epoch_batches=epoch_batches)
    cfg = cfg.model_copy(
        update={"training": cfg.training.model_copy(update={"batch_size": 1, "image_batch_size": 3, "accumulation": 2})}
    )
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    plan = make_plan(data, cfg, global_batches(cfg, 1))
    share = RankShare(0, 1, cfg.batch_sizes, 2)
    sizes = {1: set[int](), 9: set[int]()}
    for step in range(plan.steps(0)):
        for number in range(2):
            if uses := plan.micro_batch(step, number, share):
                sizes[uses.bucket.bucket.frames].add(len(uses.rows))
    assert sizes == {1: {3}, 9: {1}} and cfg.batch_sizes == (1, 3)


def test_parts_of_a_video_stand_each_by_itself(tmp_path: Path) -> None:
    """What is wrong with one takes nothing from the others, nor from an image with a JSON of its own."""
    folder = tmp_path / "a"
    write(folder, "v.mp4", 40, None)
    parts = [
        {"start": 0, "end": 2, "caption": "good"}, {"start": 1}, {"start": 4.9, "caption": "brief"},
        {"start": 2, "caption": "rest"}, {"start": 2, "end": 100, "caption": "the same"}, {"start": 9, "caption": "behind"},
    ]  # fmt: skip
    (folder / "v.json").write_text(json.dumps({"clips": parts}))
    Image.fromarray(numbered(1)).save(folder / "i.png")
    (folder / "i.json").write_text(json.dumps([{"start": "2020-01-01"}]))
    (folder / "i.txt").write_text("an image")
    data, _ = prepared(folder, max_rejected_share=1.0)
    captions = {one.name.rpartition("/")[2]: one.captions for one in map(data.index.record, range(data.index.count))}
    assert captions == {"v.mp4#0-2000": ("good",), "v.mp4#2000-5000": ("rest",), "i.png": ("an image",)}
    assert {Path(one.path).name for one in data.rejects()} == {
        "v.mp4#1000-", "v.mp4#4900-", "v.mp4#2000-100000", "v.mp4#9000-",
    }  # fmt: skip


def test_what_lies_beside_a_video_is_watched(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write(folder, "v.mp4", 20, "first words")
    (folder / "v.json").write_text(json.dumps({"start": 0}))
    data, _ = prepared(folder)
    assert data.index.record(0).captions == ("first words",)
    (folder / "v.txt").write_text("other words")
    data, _ = prepared(folder)
    assert data.index.record(0).captions == ("other words",)
    (folder / "v.json").write_text(json.dumps({"start": 0.5, "caption": "of the JSON"}))
    data, _ = prepared(folder)
    clip = data.index.record(0).clip
    assert data.index.record(0).captions == ("of the JSON",) and clip is not None and clip.start_ms == 500


def test_folders_of_frames_are_clips_in_kohyas_folders_too(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for name in ("10_cat/x.frames", "001_dance.frames"):
        (root / name).mkdir(parents=True)
        for number in range(10):
            Image.fromarray(numbered(number)).save(root / name / f"{number}.png")
    data, _ = prepared(root, max_rejected_share=1.0)
    assert clips(data) == {"x.frames": (0, 9)} and data.index.record(0).captions == ("cat",)
    assert data.index.sources[0].repeats == 10
    assert [Path(one.path).name for one in data.rejects()] == ["001_dance.frames"]

    # the bytes of all, and how many are shown a second, name what is cached of them
    contents, passed = picture_contents(data.index, np.array([0]), look=True, log=print)
    assert contents[0].any() and not passed
    (root / "10_cat" / "x.json").write_text(json.dumps({"fps": 2 * FPS}))
    again, _ = prepared(root, max_rejected_share=1.0)
    others, _ = picture_contents(again.index, np.array([0]), look=True, log=print)
    assert clips(again) == {"x.frames": (0, 5)} and (others[0] != contents[0]).any()


def test_one_rate_counts_for_all_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(
        f"resolutions = [64]\nframe_buckets = [9]\nframerate = 12\n[[directory]]\npath = '{tmp_path}'\n"
    )
    (tmp_path / "run.toml").write_text("")
    line = [f"--config={tmp_path / 'run.toml'}", f"--dataset={tmp_path / 'd.toml'}", "--model.type=ltx_video", "--model.init_from_config=tiny",
            "--training.max_steps=1", f"--output.output_dir={tmp_path}"]  # fmt: skip
    cfg = parse(line).config
    assert cfg.data.framerate == 12 and cfg.data.datasets[0].framerate == 12
    with (tmp_path / "d.toml").open("a") as file:
        file.write(f"framerate = 24\n[[directory]]\npath = '{tmp_path}'\n")
    with pytest.raises(ConfigFault) as caught:
        parse(line)
    assert any(is_about(fault, "--data.framerate", "12", "24") for fault in caught.value.faults)


def test_the_clips_of_a_video_are_held_out_together(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path / "a", f"{number}.mp4", 20)
    cfg = config(tmp_path / "a", tmp_path / "cache", video_clip_mode="multiple_overlapping", held_out=0.4)
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    parts = []
    for rows in (data.tables.training, data.tables.validation):
        ids = [int(i) for one in rows for i in data.tables.ids()[one.first : one.first + one.records]]
        parts.append({data.index.record(i).media.path for i in ids})
    assert len(parts[0]) + len(parts[1]) == 12 and not parts[0] & parts[1] and min(map(len, parts)) > 1


def test_frames_come_down_to_what_the_family_takes() -> None:
    assert clip_buckets((33, 32, 6, 3), ClipFacts(16, 4)) == (
        (1, 5, 29, 33), ["3: 1 is used, of 4 n + 1 frames", "6: 5 is used, of 4 n + 1 frames", "32: 29 is used, of 4 n + 1 frames"],
    )  # fmt: skip
    assert np.all([ClipFacts(25, 8).frames(n) % 8 == 1 for n in range(1, 60)])
