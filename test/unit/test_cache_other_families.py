"""Clips, masked texts and a third encoder in the same files as pictures and CLIP's texts: built, read, trained from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Bucket, Parts
from difftrain.data.cache.folder import CacheFolder
from difftrain.data.cache.format import ROW, read_header
from difftrain.data.cache.metadata import Metadata
from difftrain.data.loader import make_loader
from difftrain.data.prepare import Data, make_plan, open_data, prepare
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.clips import FROZEN, LENGTH, WIDTH, ClipFamily
from difftrain.testing.pictures import write_folder
from difftrain.train.caching import with_cache

SIZES = [(64, 64), (96, 40), (64, 64), (40, 96), (64, 64), (96, 40), (64, 66)]
FRAMES_OF_A_CLIP, LATENT_FRAMES = 9, 3
ON_DISK = {"latents_to_disk": True, "text_to_disk": True}
LONG = "a clip of many words that say what is to be seen in it from its first frame to its last"


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven pictures, of which clips of nine frames are made: no source has clips yet."""
    monkeypatch.setattr(Bucket.__new__, "__defaults__", (FRAMES_OF_A_CLIP,))
    folder = write_folder(tmp_path / "pictures", SIZES)
    (folder / "0002.txt").write_text(LONG)
    return folder


def config(pictures: Path, cache: dict[str, Any] | None = None) -> TrainConfig:
    data = {
        "dirs": (str(pictures),),
        "resolution": (64, 64),
        "enable_bucket": True,
        "min_bucket_reso": 32,
        "max_bucket_reso": 128,
        "bucket_reso_steps": 32,
        "flip": True,
        "workers": 0,
        "cache_dir": str(pictures.parent / "cache"),
    }
    training = {"batch_size": 2, "seed": 1, "device": "cpu"}
    captions = {"dropout_rate": 0.2}
    return TrainConfig.model_validate({"data": data, "training": training, "captions": captions, "cache": cache or {}})


def batches(cfg: TrainConfig, family: ClipFamily, parts: Parts, data: Data) -> Iterator[list[Batch]]:
    plan = make_plan(data, cfg, 2)
    yield from make_loader(
        data, plan, family.features, family.tokenizer(parts), cfg,
        dp_rank=0, dp_size=1, first_step=0, last_step=plan.total_steps(2),
    )  # fmt: skip


def losses(cfg: TrainConfig, family: ClipFamily, parts: Parts, data: Data) -> list[float]:
    engine = make_engine(cfg, choose("cpu"), Ranks())
    engine.build(
        family,  # type: ignore[arg-type]
        parts,
        lambda groups: make_optimizer(cfg.optimizer, groups),
        lambda optimizer: make_schedule(cfg.optimizer, optimizer, 20),
        [],
    )
    counts = {"samples": 2.0}
    return [float(engine.step(micro, counts).sums["loss"]) for micro in batches(cfg, family, parts, data)]


def opened(cfg: TrainConfig, parts: Parts) -> Data:
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    return with_cache(cfg, choose("cpu"), Ranks(), ClipFamily(seed=1), parts, data).data  # type: ignore[arg-type]


@pytest.mark.parametrize("where", [ON_DISK, {"latents": True, "text": True}])
def test_clips_are_trained_from_the_cache_as_they_are_online(pictures: Path, where: dict[str, Any]) -> None:
    family = ClipFamily(seed=1)
    online_parts, parts = family.load(), family.load(lazy=FROZEN)
    online = opened(config(pictures), online_parts)
    cached = opened(config(pictures, where), parts)
    assert parts.resting == set(FROZEN) and all(map(parts.sleeps, FROZEN))
    pairs = list(
        zip(
            batches(config(pictures, where), family, parts, cached),
            batches(config(pictures), family, online_parts, online),
            strict=True,
        )
    )
    assert len(pairs) > 5
    for (ours,), (theirs,) in pairs:
        shape = Bucket(*ours.bucket[:2], FRAMES_OF_A_CLIP)
        assert ours.bucket == shape and "pixels" not in ours.features
        assert ours.features["moments"].shape == (2, 12, LATENT_FRAMES, shape.height // 8, shape.width // 8)
        assert ours.features["depth"].shape == (2, 1, shape.height // 16, shape.width // 16)
        assert ours.features["t5_hidden"].shape == (2, LENGTH, WIDTH)
        assert ours.features["t5_hidden"].dtype == torch.bfloat16
        assert not ours.features["t5_hidden"][theirs.features["t5_mask"] == 0].any()
        a, b = family.inputs(ours, parts), family.inputs(theirs, online_parts)
        assert torch.allclose(a.x_t, b.x_t, atol=1e-6) and torch.allclose(a.target, b.target, atol=1e-6)
        assert a.conditions.keys() == b.conditions.keys()
        for name, value in b.conditions.items():
            assert torch.allclose(a.conditions[name].float(), value.float(), atol=1e-6), name
    found = losses(config(pictures, where), family, parts, cached)
    wanted = losses(config(pictures), family, online_parts, online)
    assert found == pytest.approx(wanted, rel=1e-6) and len(set(found)) > 5


def test_a_whole_cache_of_another_family_wakes_nothing(pictures: Path) -> None:
    family, cfg = ClipFamily(seed=1), config(pictures, ON_DISK)
    parts = family.load(lazy=FROZEN)
    woken: list[str] = []
    parts.lazy = {name: lambda name=name, fill=fill: (woken.append(name), fill()) for name, fill in parts.lazy.items()}
    opened(cfg, parts)
    assert sorted(woken) == sorted(FROZEN)
    woken.clear()
    opened(cfg, parts)
    assert not woken


def test_rows_behind_the_mask_take_no_room(pictures: Path) -> None:
    cfg = config(pictures, ON_DISK)
    opened(cfg, ClipFamily(seed=1).load())
    folder = CacheFolder.open(pictures.parent / "cache", create=False)
    (segment,) = [each.name for each in Metadata(folder.database).segments() if each.header["encoder"] == "t5"]
    journal = folder.file(segment, ".idx").read_bytes()
    lengths = sorted(np.frombuffer(journal[read_header(journal)[1] :], ROW)["length"].tolist())
    assert len(lengths) == len(SIZES) + 1  # each its own, and the empty one
    words = len(LONG.split()) - 4  # and all others have four
    assert lengths[-1] - lengths[-2] == pytest.approx(words * WIDTH * 2, abs=128)  # pieces are aligned
    assert lengths[-1] < LENGTH * WIDTH * 2 + 256 and lengths[0] < 512
