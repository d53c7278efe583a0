"""What a data set TOML says is what is trained on: resolutions, repeats, captions, masks, shares, evaluation sets."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import names

from difftrain.config import TrainConfig
from difftrain.config.datasets.datasets import applied
from difftrain.config.datasets.diffusion_pipe import resolve
from difftrain.config.schema.sections import EvalSetSection
from difftrain.config.spellings.spelling import speaking
from difftrain.contracts import Batch, DataFault, DrawSpec, FeatureSpec
from difftrain.data.evaluation_sets import open_set
from difftrain.data.index.build import TooManyRejects
from difftrain.data.loader import make_loader
from difftrain.data.prepare import Data, global_batches, make_plan, open_data, prepare
from difftrain.testing.pictures import write_folder, write_tar

FEATURES = FeatureSpec(
    {}, {"noise": DrawSpec("normal", channels=4, factor=8), "drop": DrawSpec("uniform", trains=True)}
)
SIZES = [(64, 64)] * 6 + [(96, 48)] * 5 + [(48, 100)] * 4
STREAM = {"tar_order": "sequential", "tar_streams": 4, "tar_window": 2, "shard_size": 4}


def tokenize(captions: list[str]) -> dict[str, torch.Tensor]:
    longest = 60
    rows = [[ord(letter) for letter in caption[:longest].ljust(longest)] for caption in captions]
    return {"letters": torch.tensor(rows)}


def words(batch: Batch) -> list[str]:
    return ["".join(map(chr, row)).rstrip() for row in batch.features["letters"].tolist()]


def resolved(place: Path, text: str, multiple: int = 16, **sections: Any) -> TrainConfig:
    (place / "data.toml").write_text(text)
    data = {"cache_dir": str(place / "cache"), "workers": 0} | sections.pop("data", {})
    training = {"seed": 1, "batch_size": 3} | sections.pop("training", {})
    cfg = TrainConfig.model_validate({"data": data, "training": training, **sections})
    found = resolve(place / "data.toml", cfg, multiple=multiple)
    assert not found.faults, "\n".join(map(str, found.faults))
    return applied(cfg, found)


def opened(cfg: TrainConfig) -> Data:
    return open_data(cfg, prepare(cfg, log=lambda line: None))


def batches(
    cfg: TrainConfig, data: Data, rank: int = 0, ranks: int = 1, first: int = 0, last: int | None = None
) -> list[Batch]:
    plan = make_plan(data, cfg, global_batches(cfg, ranks))
    last = plan.total_steps(1) if last is None else last
    where = {"dp_rank": rank, "dp_size": ranks, "first_step": first, "last_step": last, "local_size": 1}
    return [micro for step in make_loader(data, plan, FEATURES, tokenize, cfg, **where) for micro in step]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_folder(tmp_path / "a", SIZES)
    write_folder(tmp_path / "b", [(64, 64)] * 4, start=100)
    return tmp_path


BUCKETS = "enable_ar_bucket = true\nmin_ar = 0.5\nmax_ar = 2.0\nnum_ar_buckets = 3\n"


def test_every_picture_goes_to_every_resolution_with_draws_of_its_own(place: Path) -> None:
    text = f"resolutions = [64, 128]\n{BUCKETS}[[directory]]\npath = 'a'\n[[directory]]\npath = 'b'\nnum_repeats = 2\n"
    cfg = resolved(place, text)
    data = opened(cfg)
    assert data.summary()["draws_per_epoch"] == 2 * (len(SIZES) + 2 * 4) and len(cfg.batch_sizes) == 2
    seen = Counter()
    for batch in batches(cfg, data, last=60):
        height, width = batch.features["pixels"].shape[-2:]
        assert (width, height) in {(64, 64), (96, 48), (48, 96), (128, 128), (176, 96), (96, 176)}
        seen[height * width > 10_000] += len(batch.keys)
    assert abs(seen[True] - seen[False]) < 0.2 * sum(seen.values())
    keys = {bytes(key) for key in np.asarray(data.index.columns().keys)}
    assert len(keys) == 2 * (len(SIZES) + 4)  # a key for each resolution: no two share their noise


def test_fractions_of_repeats_are_what_an_epoch_has_on_average(place: Path) -> None:
    cfg = resolved(
        place, "resolutions = [64]\n[[directory]]\npath = 'a'\nnum_repeats = 0.4\n[[directory]]\npath = 'b'\n"
    )
    data = opened(cfg)
    assert data.summary()["draws_per_epoch"] == len(SIZES) * 0.4 + 4
    assert isinstance(data.summary()["draws_per_epoch"], int)  # 6 and 4: no 10.0 in reports
    json.dumps(data.summary())
    plan = make_plan(data, cfg, 2)
    counts = Counter(draw.record_id for step in range(plan.total_steps(10)) for draw in plan.batch(step)[1])
    assert Counter(counts.values()) == {4: len(SIZES), 10: 4}


def test_another_number_of_repeats_is_other_data(place: Path) -> None:
    one, two = (
        opened(resolved(place, f"resolutions = [64]\n[[directory]]\npath = 'a'\nnum_repeats = {each}\n")).tables
        for each in ("0.5", "0.25")
    )
    assert one.training[0].digest != two.training[0].digest


def test_a_share_of_a_directory(place: Path) -> None:
    write_folder(place / "many", [(16, 16)] * 200)
    text = "resolutions = [64]\n[[directory]]\npath = 'many'\nsubsample_ratio = 0.2\n[[directory]]\npath = 'b'\n"
    cfg = resolved(place, text)
    lines: list[str] = []
    data = open_data(cfg, prepare(cfg, log=lines.append))
    kept = data.tables.training[0].records - 4
    assert 20 < kept < 60 and any(names(line, 200 - kept, "subsample_ratio") for line in lines)


# ---- captions


def test_captions_json_has_several_captions_of_each_picture(place: Path) -> None:
    named = {f"{100 + n:04d}.png": [f"one {n}", f"two {n}"] for n in range(3)} | {"0103.png": "only"}
    (place / "b" / "captions.json").write_text(json.dumps(named))
    cfg = resolved(
        place, "resolutions = [64]\ncaption_prefix = 'x: '\n[[directory]]\npath = 'b'\n", training={"batch_size": 2}
    )
    data = opened(cfg)
    found = {word for batch in batches(cfg, data, last=80) for word in words(batch)}
    assert found == {f"x: {kind} {n}" for kind in ("one", "two") for n in range(3)} | {"x: only"}
    named["0100.png"] = ["changed"]
    (place / "b" / "captions.json").write_text(json.dumps(named))
    again = opened(cfg)
    assert again.index.fingerprint == data.index.fingerprint
    assert "changed" in {text for i in range(4) for text in again.index.record(i).captions}


def test_a_picture_that_captions_json_does_not_name_has_no_caption(place: Path) -> None:
    named = {"0100.png": ["a"], "0101.png": ["b"], "0102.png": [""]}
    (place / "b" / "captions.json").write_text(json.dumps(named))
    text = "resolutions = [64]\n[[directory]]\npath = 'b'\n"
    data = opened(resolved(place, text))
    reasons = [each.reason for each in data.index.rejects()]
    assert data.index.count == 2 == len(reasons)
    assert any(names(reason, "'0103.png'") and not names(reason, "empty") for reason in reasons)
    assert any(names(reason, "'0102.png'", "empty") for reason in reasons)
    cfg = resolved(place, "skip_empty_caption = false\n" + text)
    data = opened(cfg)
    assert data.index.count == 4 and {word for batch in batches(cfg, data) for word in words(batch)} <= {"a", "b", ""}


def test_captions_json_of_tars(tmp_path: Path) -> None:
    write_tar(tmp_path / "t" / "0.tar", [(64, 64)] * 2)
    (tmp_path / "t" / "captions.json").write_text(json.dumps({"00000.png": ["zero"], "00001.png": ["one"]}))
    data = opened(resolved(tmp_path, "resolutions = [64]\n[[directory]]\npath = 't'\n"))
    assert {data.index.record(i).captions for i in range(2)} == {("zero",), ("one",)}


def test_a_captions_json_that_is_none(place: Path) -> None:
    (place / "b" / "captions.json").write_text("[]")
    with pytest.raises(DataFault, match=r"captions\.json.*object"):
        opened(resolved(place, "resolutions = [64]\n[[directory]]\npath = 'b'\n"))


def test_a_data_set_without_one_captioned_picture(place: Path) -> None:
    for path in (place / "b").glob("*.txt"):
        path.unlink()
    with pytest.raises(DataFault, match=r"\b4\b.*caption") as caught:
        opened(resolved(place, "resolutions = [64]\n[[directory]]\npath = 'b'\n"))
    assert caught.value.exit_code == 2


def test_tags_are_shuffled_behind_the_prefix_and_joined_as_they_were_cut(place: Path) -> None:
    for path in (place / "b").glob("*.txt"):
        path.write_text("one;two;\nthree")
    text = "resolutions = [64]\ncaption_prefix = 'p'\nshuffle_tags = true\nshuffle_delimiter = ';'\n[[directory]]\npath = 'b'\n"
    cfg = resolved(place, text)
    found = Counter(word for batch in batches(cfg, opened(cfg), last=60) for word in words(batch))
    assert all(word[0] == "p" and sorted(word[1:].split(";")) == [" three", "one", "two"] for word in found)
    assert len(found) == 6
    few = resolved(place, text.replace("shuffle_tags = true", "cache_shuffle_num = 1"))
    assert len({word for batch in batches(few, opened(few), last=60) for word in words(batch)}) <= 4


def test_so_many_forms_of_every_caption_that_is_written(place: Path) -> None:
    (place / "b" / "captions.json").write_text(
        json.dumps({f"{100 + n:04d}.png": ["a, b, c", "x, y"] for n in range(4)})
    )
    cfg = resolved(place, "resolutions = [64]\ncache_shuffle_num = 2\n[[directory]]\npath = 'b'\n")
    data = opened(cfg)
    (recipe,) = data.recipes
    assert recipe.num_variants == 2 and recipe.variants_of(data.index.record(0)) == 4
    found = Counter(tuple(sorted(w.split(", "))) for batch in batches(cfg, data, last=60) for w in words(batch))
    assert set(found) == {("a", "b", "c"), ("x", "y")} and max(found.values()) < 1.5 * min(found.values())


def test_the_first_letter_is_large_or_small_by_chance(place: Path) -> None:
    cfg = resolved(place, "resolutions = [64]\nshuffle_capitalization = true\n[[directory]]\npath = 'b'\n")
    first = Counter(word[0] for batch in batches(cfg, opened(cfg), last=80) for word in words(batch))
    assert set(first) == {"p", "P"} and max(first.values()) < 1.6 * min(first.values())


def test_a_share_of_uses_has_no_words(place: Path) -> None:
    text = "resolutions = [64]\ncaption_prefix = 'x '\n[[directory]]\npath = 'b'\n"
    cfg = resolved(place, text, captions={"dropout_rate": 0.5})
    found = Counter(bool(word) for batch in batches(cfg, opened(cfg), last=100) for word in words(batch))
    assert abs(found[True] - found[False]) < 80


# ---- masks


def grey(path: Path, size: tuple[int, int], value: int) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, (value, 0, 255)).save(path)


def test_masks_by_name_a_default_one_and_none(place: Path) -> None:
    grey(place / "masks" / "0100.png", (64, 64), 51)
    grey(place / "default.png", (20, 10), 102)  # of any shape
    masked = "resolutions = [64]\n[[directory]]\npath = 'b'\nmask_path = 'masks'\n"
    for text, expected in (
        (masked, {51: 1, 255: 3}),
        (masked + "default_mask_file = 'default.png'\n", {51: 1, 102: 3}),
        (masked.replace("mask_path = 'masks'", "default_mask_file = 'default.png'"), {102: 4}),
    ):
        cfg = resolved(place, text, training={"batch_size": 4})
        assert cfg.loss.masked
        (batch,) = batches(cfg, opened(cfg))
        assert batch.loss_mask is not None
        values = Counter(round(float(mask.mean()) * 255) for mask in batch.loss_mask)
        assert values == expected and all(float(mask.std()) < 1e-6 for mask in batch.loss_mask)


def test_a_default_mask_that_is_no_picture_is_named_at_once(place: Path) -> None:
    (place / "default.png").write_text("no picture")
    with pytest.raises(DataFault, match=r"default\.png: .*mask"):
        opened(resolved(place, "resolutions = [64]\n[[directory]]\npath = 'b'\ndefault_mask_file = 'default.png'\n"))


def test_a_directory_without_masks_beside_one_with(place: Path) -> None:
    grey(place / "masks" / "0100.png", (64, 64), 0)
    text = "resolutions = [64]\n[[directory]]\npath = 'b'\nmask_path = 'masks'\n[[directory]]\npath = 'a'\n"
    cfg = resolved(place, text, training={"batch_size": len(SIZES) + 4})
    (batch,) = batches(cfg, opened(cfg))
    assert sorted(mask.mean() for mask in batch.loss_mask) == [0.0] + [1.0] * (len(SIZES) + 3)


# ---- streams


def stream_of(place: Path) -> str:
    for number in range(5):
        write_tar(place / "tars" / f"{number}.tar", [(64, 64)] * 3 + [(96, 48)] * 2, start=10 * number)
    grey(place / "masks" / "0100.png", (64, 64), 0)
    return (
        f"resolutions = [64]\n{BUCKETS}[[directory]]\npath = 'tars'\nnum_repeats = 1.5\n"
        "[[directory]]\npath = 'a'\n[[directory]]\npath = 'b'\nnum_repeats = 2\nmask_path = 'masks'\n"
    )


def of(batch: Batch) -> list[tuple[bytes, int]]:
    return list(zip(batch.keys, batch.occurrence.tolist(), strict=True))


def test_a_stream_is_the_same_on_any_number_of_ranks_and_goes_on_anywhere(place: Path) -> None:
    text = stream_of(place)
    alone = resolved(place, text, data=STREAM, training={"batch_size": 6})
    data, last = opened(alone), 40
    assert data.tables.shards == 5 + 4 + 1  # tars, and plain files four at a time
    whole = batches(alone, data, last=last)
    for ranks in (2, 3):
        cfg = resolved(place, text, data=STREAM, training={"batch_size": 6 // ranks})
        parts = [batches(cfg, opened(cfg), rank, ranks, last=last) for rank in range(ranks)]
        for step, batch in enumerate(whole):
            together = [of(part[step]) for part in parts]
            assert [together[n % ranks][n // ranks] for n in range(6)] == of(batch)
            noise = [parts[n % ranks][step].draws["noise"][n // ranks] for n in range(6)]
            assert torch.equal(torch.stack(noise), batch.draws["noise"])
    for first in (1, 17, 33):
        again = batches(alone, pickle.loads(pickle.dumps(data)), first=first, last=last)
        for one, other in zip(again, whole[first:], strict=True):
            assert of(one) == of(other) and torch.equal(one.features["pixels"], other.features["pixels"])
            assert (one.loss_mask is None) == (other.loss_mask is None)


def test_a_stream_honours_repeats_in_another_order_each_epoch(place: Path) -> None:
    cfg = resolved(place, stream_of(place), data=STREAM, training={"batch_size": 2})
    data = opened(cfg)
    plan = make_plan(data, cfg, 2)
    names = {"tars": 1.5, "a": 1, "b": 2}
    orders, counts, epochs = [], Counter(), 4
    for epoch in range(epochs):
        ids = [
            d.record_id
            for step in range(plan.total_steps(epoch), plan.total_steps(epoch + 1))
            for d in plan.batch(step)[1]
        ]
        orders.append(ids)
        counts.update(ids)
    assert all(orders[n] != orders[m] for n in range(epochs) for m in range(n))
    by_folder: dict[str, list[int]] = {}
    for record_id in range(data.index.count):
        by_folder.setdefault(data.index.record(record_id).name.split("/")[0], []).append(counts[record_id])
    for name, found in by_folder.items():
        assert sum(found) == pytest.approx(names[name] * epochs * len(found), abs=3)  # a batch of each bucket may wait
        assert max(found) - min(found) <= 2
    masks = [batch.loss_mask for batch in batches(cfg, data, last=plan.total_steps(1))]
    assert any(mask is not None and float(mask.min()) == 0 for mask in masks)


def test_plain_files_of_a_stream_are_read_close_together(place: Path) -> None:
    write_folder(place / "many", [(32, 32)] * 160)
    text = "resolutions = [64]\n[[directory]]\npath = 'many'\n"
    cfg = resolved(place, text, data=STREAM | {"shard_size": 8, "tar_streams": 1}, training={"batch_size": 8})
    data = opened(cfg)
    plan = make_plan(data, cfg, 8)
    spread = []
    for step in range(plan.total_steps(1)):
        numbers = [int(data.index.record(d.record_id).media.path[:4]) for d in plan.batch(step)[1]]
        spread.append(len({number // 8 for number in numbers}))
    assert data.tables.shards == 20 and max(spread) <= 4  # within two windows of two shards


# ---- evaluation sets


def evaluation(place: Path, text: str, **sections: Any) -> tuple[TrainConfig, EvalSetSection]:
    cfg = resolved(place, text, **sections)
    section = EvalSetSection(name="held", config=str(place / "data.toml"), datasets=cfg.data.datasets)
    return resolved(place, "resolutions = [64]\n[[directory]]\npath = 'a'\n", **sections), section


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_evaluation_set_is_the_same_on_any_number_of_ranks(place: Path, ranks: int) -> None:
    grey(place / "masks" / "0100.png", (64, 64), 0)
    text = (
        f"resolutions = [64, 96]\n{BUCKETS}[[directory]]\npath = 'a'\nnum_repeats = 3\nshuffle_tags = true\n"
        "[[directory]]\npath = 'b'\nmask_path = 'masks'\n"
    )
    more = {"eval": {"batch_size": 2}, "captions": {"dropout_rate": 0.9}, "validation": {"split": 0.5}}
    cfg, section = evaluation(place, text, **more)
    held = open_set(cfg, section, lambda line: None)
    assert not held.data.tables.validation and held.cfg.loss.masked
    whole = list(held.batches(tokenize, FEATURES))
    assert sum(len(batch.keys) for batch in whole) == 2 * (len(SIZES) + 4) == len({k for b in whole for k in b.keys})
    assert max(len(batch.keys) for batch in whole) == 2
    assert all("drop" not in batch.draws and "" not in words(batch) for batch in whole)
    assert all(word.startswith("picture ") and word.endswith(", second, third") for b in whole for word in words(b))
    assert any(batch.loss_mask is not None for batch in whole)
    parts = [held.batches(tokenize, FEATURES, rank, ranks) for rank in range(ranks)]
    for number, batch in enumerate(whole):
        other = next(parts[number % ranks])
        assert other.keys == batch.keys and not other.occurrence.any()
        for name in ("pixels", "letters"):
            assert torch.equal(other.features[name], batch.features[name])
        assert torch.equal(other.draws["noise"], batch.draws["noise"])
    assert all(next(part, None) is None for part in parts)


def test_a_share_of_an_evaluation_set(place: Path) -> None:
    write_folder(place / "many", [(16, 16)] * 100)
    cfg, section = evaluation(place, "resolutions = [64]\nsubsample_ratio = 0.3\n[[directory]]\npath = 'many'\n")
    held = open_set(cfg, section, lambda line: None)
    batches_of = [list(held.batches(tokenize, FEATURES)) for _ in range(2)]
    assert [b.keys for b in batches_of[0]] == [b.keys for b in batches_of[1]]
    assert 15 < sum(len(batch.keys) for batch in batches_of[0]) < 50


def test_the_data_moved_elsewhere_are_the_same_data(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = f"resolutions = [64]\n{BUCKETS}[[directory]]\npath = 'a'\nnum_repeats = 0.5\n"
    here = opened(resolved(place, text))
    there = tmp_path_factory.mktemp("there") / "x"
    shutil.copytree(place, there, ignore=shutil.ignore_patterns("cache"))
    moved = opened(resolved(there, text))
    assert [rows.digest for rows in here.tables.training] == [rows.digest for rows in moved.tables.training]


def test_too_many_rejects_are_said_in_the_words_of_the_door(place: Path) -> None:
    for path in (place / "b").glob("*.txt"):
        path.unlink()
    sets = resolved(place, "resolutions = [64]\n[[directory]]\npath = 'b'\n")
    with pytest.raises(TooManyRejects, match=" --allow_empty_caption"):
        opened(sets)
    with speaking("train"), pytest.raises(TooManyRejects, match=r" --captions\.allow_empty=true"):
        opened(sets)
