"""Training from the cache gives the losses of training online with the same draws; no change meets a stale entry."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded import encoded
from safetensors.torch import load_file, save_file

from difftrain.cache.build import deferred_parts, with_cache
from difftrain.config import TrainConfig
from difftrain.contracts import Batch, ConfigFault, Parts
from difftrain.data.loader import make_loader
from difftrain.data.prepare import Data, make_plan, open_data, prepare
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.weights import fingerprints
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.pictures import write_folder

SIZES = [(64, 64), (96, 40), (64, 64), (40, 96), (64, 64), (96, 40), (64, 66), (130, 130)]
DISK, MEMORY = {"latents_to_disk": True, "text_to_disk": True}, {"latents": True, "text": True}
FROZEN = {"vae", "text_encoder_1", "text_encoder_2"}
STEPS = 5


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pictures of several shapes."""
    folder = write_folder(tmp_path_factory.mktemp("losses") / "pictures", SIZES)
    (folder / "0001.txt").write_text("a (heavy:1.5) picture, with (light:0.6) words, third")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is remembered of weights here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


def config(pictures: Path, out: Path, cache: dict[str, Any] | None = None, **sections: Any) -> TrainConfig:
    data = {
        "dirs": (str(pictures),),
        "resolution": (64, 64),
        "enable_bucket": True,
        "min_bucket_reso": 32,
        "max_bucket_reso": 128,
        "bucket_reso_steps": 32,
        "flip": True,
        "workers": 0,
        "cache_dir": str(out / "cache"),
    } | sections.pop("data", {})
    training = {"batch_size": 2, "seed": 1, "device": "cpu"} | sections.pop("training", {})
    cache = {"latents_as": sections.pop("latents_as", "moments")} | (cache or {})
    cache |= {"shuffle_num": num} if (num := sections.pop("shuffle_num", None)) else {}
    sections = {"model": {"init_from_config": "tiny"}} | sections
    return TrainConfig.model_validate({"data": data, "training": training, "cache": cache} | sections)


class Made:
    """A configuration as a run has it when it begins."""

    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg, self.family = cfg, SDXLFamily(cfg)
        self.parts: Parts = self.family.load(deferred=deferred_parts(cfg, self.family))
        self.data: Data = open_data(cfg, prepare(cfg, log=lambda line: None))
        self.data = with_cache(cfg, choose("cpu"), Ranks(), self.family, self.parts, self.data).data

    def steps(self) -> Iterator[list[Batch]]:
        plan = make_plan(self.data, self.cfg, 2)
        yield from make_loader(
            self.data, plan, self.family.features, self.family.tokenizer(self.parts), self.cfg,
            dp_rank=0, dp_size=1, first_step=0, last_step=STEPS,
        )  # fmt: skip

    def losses(self) -> list[float]:
        engine = make_engine(self.cfg, choose("cpu"), Ranks())
        engine.build(
            self.family,
            self.parts,
            lambda groups: make_optimizer(self.cfg.optimizer, groups),
            lambda optimizer: make_schedule(self.cfg.optimizer, optimizer, STEPS),
            [],
        )
        return [float(engine.step(micro, {"samples": 2.0}).sums["loss"]) for micro in self.steps()]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"latents_as": "mean"},
    "shuffled": {"captions": {"shuffle": True, "tag_dropout_rate": 0.2, "dropout_rate": 0.2}, "shuffle_num": 3},
    "weighted": {"captions": {"weighted": True}},
    "long": {"model": {"init_from_config": "tiny", "max_token_length": 150, "clip_skip": 1}},
}


@functools.cache
def online_losses(pictures: Path, way: str) -> list[float]:
    """Train online, once for all tests."""
    return Made(config(pictures, pictures.parent, **dict(WAYS[way]))).losses()


@pytest.mark.parametrize("way", WAYS)
def test_losses_from_the_cache_are_those_of_online_training(pictures: Path, tmp_path: Path, way: str) -> None:
    online = online_losses(pictures, way)
    for where in (DISK, MEMORY):
        cached = Made(config(pictures, tmp_path, where, **dict(WAYS[way])))
        assert not any(map(cached.parts.is_loaded, FROZEN))
        assert not any("pixels" in batch.features for micro in cached.steps() for batch in micro)
        assert cached.losses() == pytest.approx(online, rel=1e-6)
        assert not any(map(cached.parts.is_loaded, FROZEN))
    assert len(set(online)) == STEPS


def test_the_ways_are_told_apart(pictures: Path, tmp_path: Path) -> None:
    """Else equal losses would prove nothing of flips, variants, weights and means."""
    ways = {name: online_losses(pictures, name) for name in WAYS}
    ways["never mirrored"] = Made(config(pictures, tmp_path, data={"flip": False})).losses()
    ways["another variant"] = Made(config(pictures, tmp_path, **WAYS["shuffled"] | {"shuffle_num": 4})).losses()
    for name, losses in ways.items():
        others = [found for other, found in ways.items() if other != name]
        assert all(losses != pytest.approx(found, rel=1e-4) for found in others), name


def test_a_sample_is_kept_for_every_run(pictures: Path, tmp_path: Path) -> None:
    first = Made(config(pictures, tmp_path, DISK, latents_as="sample"))
    again = Made(config(pictures, tmp_path / "elsewhere", DISK, latents_as="sample"))
    assert again.losses() == pytest.approx(first.losses(), rel=1e-6)
    latents = [batch.features["latents"] for micro in first.steps() for batch in micro]
    means = Made(config(pictures, tmp_path, latents_as="mean"))
    online = [means.family.latents(batch, means.parts) for micro in means.steps() for batch in micro]
    scale = float(first.parts.frozen["vae"].config.scaling_factor)
    assert all(0.01 < float((a * scale - b).abs().mean()) < 1 for a, b in zip(latents, online, strict=True))


@functools.cache
def built(pictures: Path) -> Path:
    """A whole cache, from which each test begins with a copy."""
    Made(config(pictures, pictures.parent / "built", DISK))
    return pictures.parent / "built" / "cache"


def compare(pictures: Path, tmp_path: Path, cache: dict[str, Any], near: float = 1e-5, **sections: Any) -> None:
    """Compare what a step gets from the cache with what it gets online."""
    cached = Made(config(pictures, tmp_path, DISK | cache, **dict(sections)))
    online = Made(config(pictures, tmp_path, **dict(sections)))
    precision = cached.cfg.training.mixed_precision
    for (ours,), (theirs,) in zip(cached.steps(), online.steps(), strict=True):
        with choose("cpu").autocast(precision):
            a = cached.family.inputs(ours, cached.parts)
            b = online.family.inputs(theirs, online.parts)
        assert torch.allclose(a.x_t, b.x_t, atol=near, rtol=near)
        for name, value in b.conditions.items():
            assert torch.allclose(a.conditions[name].float(), value.float(), atol=near, rtol=near), name


PICTURES, FIRST, SECOND = "latents", "text_encoder_1", "text_encoder_2"
CHANGES: list[tuple[dict[str, Any], set[str], float]] = [
    ({}, set(), 1e-5),
    ({"data": {"resize_interpolation": "nearest"}}, {PICTURES}, 1e-5),
    ({"data": {"bucket_reso_steps": 64}}, {PICTURES}, 1e-5),
    ({"data": {"flip": False}}, set(), 1e-5),
    ({"latents_as": "mean"}, {PICTURES}, 1e-5),
    ({"cache": {"latents_dtype": "bf16"}}, {PICTURES}, 4e-2),
    ({"cache": {"text_dtype": "fp8"}}, {FIRST, SECOND}, 2e-1),
    ({"cache": {"dtypes": {"hidden_2": "bf16"}}}, {SECOND}, 4e-2),
    ({"model": {"init_from_config": "tiny", "clip_skip": 1}}, {FIRST, SECOND}, 1e-5),
    ({"model": {"init_from_config": "tiny", "max_token_length": 150}}, {FIRST, SECOND}, 1e-5),
    ({"training": {"mixed_precision": "bf16"}}, {FIRST, SECOND}, 4e-2),
    ({"training": {"seed": 2}}, {FIRST, SECOND}, 1e-5),  # the small VAE is the same for every seed
    ({"captions": {"prefix": "of"}}, {FIRST, SECOND}, 1e-5),
    ({"captions": {"weighted": True}}, {FIRST, SECOND}, 1e-5),
]


@pytest.mark.parametrize(("change", "anew", "near"), CHANGES)
def test_no_change_meets_a_stale_entry(
    pictures: Path, tmp_path: Path, change: dict[str, Any], anew: set[str], near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(built(pictures), tmp_path / "cache")
    counts, change = encoded(monkeypatch), dict(change)
    compare(pictures, tmp_path, change.pop("cache", {}), near, **change)
    assert set(counts) == anew
    before = dict(counts)
    compare(pictures, tmp_path, {})  # the first entries are there as they were
    assert counts == before


# of each encoder's fingerprint alone: test/unit/models/test_fingerprints.py
@pytest.mark.parametrize(
    ("part", "encoder"), [("vae", PICTURES), pytest.param("text_encoder_2", SECOND, marks=pytest.mark.nightly)]
)
def test_other_weights_of_the_same_name_size_and_date_are_noticed(
    pictures: Path, tmp_path: Path, part: str, encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "_SETTLED_NS", 0)
    family = SDXLFamily(config(pictures, tmp_path))
    model = family.export([], family.load(), "diffusers_safetensors", tmp_path / "model")
    sections = {"model": {"pretrained": str(model)}}
    time.sleep(0.05)
    counts = encoded(monkeypatch)
    compare(pictures, tmp_path, {}, **sections)
    assert set(counts) == {PICTURES, FIRST, SECOND}
    counts.clear()
    compare(pictures, tmp_path, {"trust": True}, **sections)
    assert not counts
    (file,) = (model / part).glob("*.safetensors")
    told, content = file.stat(), load_file(file)
    scaled = {name: value * 1.5 if name.endswith("layer_norm1.weight") else value for name, value in content.items()}
    scaled |= {name: -value for name, value in content.items() if name == "quant_conv.weight"}
    save_file(scaled, file, {"format": "pt"})
    os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert file.stat().st_size == told.st_size
    with pytest.raises(ConfigFault, match=f"--trust_cache: .* another encoder .* of {model}"):
        compare(pictures, tmp_path, {"trust": True}, **sections)
    assert not counts
    compare(pictures, tmp_path, {}, **sections)
    assert set(counts) == {encoder}
