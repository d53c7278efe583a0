"""SD3 from the cache has the losses of online training, on any number of ranks; no change meets a stale entry."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import ROOT
from encoded import encoded
from sd3 import T5_LENGTH, config

from difftrain.cache.build import deferred_parts, with_cache
from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Parts
from difftrain.data.loader import make_loader
from difftrain.data.prepare import Data, make_plan, open_data, prepare
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.families.sd3.family import SD3Family
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.pictures import write_folder
from difftrain.testing.spawn import run_ranks

SIZES = [(64, 64), (96, 40), (64, 64), (40, 96), (64, 64), (96, 40), (64, 66), (130, 130)]
DISK, MEMORY = {"latents_to_disk": True, "text_to_disk": True}, {"latents": True, "text": True}
FROZEN = {"vae", "text_encoder_1", "text_encoder_2", "text_encoder_3"}
STEPS = 6
GLOBAL = 4  # pictures a step
LR = 1e-4


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pictures of several shapes."""
    return write_folder(tmp_path_factory.mktemp("sd3") / "pictures", SIZES)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is remembered of weights here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


def settings(pictures: Path, out: Path, cache: dict[str, Any] | None = None, **sections: Any) -> TrainConfig:
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
    }
    model = sections.pop("model", {})
    training = {"batch_size": GLOBAL, "seed": 1, "device": "cpu"} | sections.pop("training", {})
    rates = {"learning_rate": LR}
    cache = sections.pop("cached", {}) | (cache or {})
    every = {"data": data, "training": training, "optimizer": rates, "cache": cache} | sections
    return config(every, **model)


class Made:
    """A configuration as a run has it when it begins."""

    def __init__(self, cfg: TrainConfig, ranks: Ranks | None = None) -> None:
        self.cfg, self.family, self.ranks = cfg, SD3Family(cfg), ranks or Ranks()
        self.parts: Parts = self.family.load(deferred=deferred_parts(cfg, self.family))
        self.data: Data = open_data(cfg, prepare(cfg, log=lambda line: None))
        self.data = with_cache(cfg, choose("cpu"), self.ranks, self.family, self.parts, self.data).data

    def steps(self, last: int = STEPS) -> Iterator[list[Batch]]:
        plan = make_plan(self.data, self.cfg, GLOBAL)
        yield from make_loader(
            self.data, plan, self.family.features, self.family.tokenizer(self.parts), self.cfg,
            dp_rank=self.ranks.rank, dp_size=self.ranks.size, first_step=0, last_step=last,
        )  # fmt: skip

    def train(self) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """Return every step's sums, and the weights at the end."""
        engine = make_engine(self.cfg, choose("cpu"), self.ranks)
        engine.build(
            self.family,
            self.parts,
            lambda groups: make_optimizer(self.cfg.optimizer, groups),
            lambda optimizer: make_schedule(self.cfg.optimizer, optimizer, STEPS),
            next(iter(self.steps(1)))[:1],
        )
        sums = [engine.step(micro, {"samples": float(GLOBAL)}).sums for micro in self.steps()]
        return [{name: float(each) for name, each in one.items()} for one in sums], dict(engine.full_weights())

    def losses(self) -> list[float]:
        return [sums["loss"] for sums in self.train()[0]]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"model": {"t5_attention_mask": True}},
    "mean": {"cached": {"latents_as": "mean"}},
    "everything": {
        "model": {"enable_uncond_text_dropout": True, "t5_attention_mask": True},
        "loss": {"text_recon_gamma": 0.1},
        "flow": {"flux_shift": True},
        "captions": {"dropout_rate": 0.3},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_from_the_cache_are_those_of_online_training(pictures: Path, tmp_path: Path, way: str) -> None:
    online = Made(settings(pictures, tmp_path, **dict(WAYS[way]))).losses()
    for where in (DISK, MEMORY):
        cached = Made(settings(pictures, tmp_path, where, **dict(WAYS[way])))
        assert not any(map(cached.parts.is_loaded, FROZEN))
        assert not any("pixels" in batch.features for micro in cached.steps() for batch in micro)
        assert cached.losses() == pytest.approx(online, rel=1e-6)
        assert not any(map(cached.parts.is_loaded, FROZEN))
    assert len(set(online)) == STEPS


@functools.cache
def built(pictures: Path) -> Path:
    """A whole cache, from which each test begins with a copy."""
    Made(settings(pictures, pictures.parent / "built", DISK))
    return pictures.parent / "built" / "cache"


TEXTS = {"text_encoder_1", "text_encoder_2", "text_encoder_3"}
CHANGES: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"model": {"t5_max_length": T5_LENGTH + 1}}, {"text_encoder_3"}),
    ({"model": {"t5_attention_mask": True}}, {"text_encoder_3"}),
    ({"model": {"enable_uncond_text_dropout": True}, "flow": {"shift": 3.0}}, set()),
    ({"loss": {"text_recon_gamma": 0.1}}, set()),
    ({"training": {"mixed_precision": "bf16"}}, TEXTS),
    ({"captions": {"prefix": "of"}}, TEXTS),
    ({"cached": {"latents_as": "mean"}}, {"latents"}),
]


@pytest.mark.parametrize(
    ("change", "anew"), CHANGES, ids=[str(change) for change, _ in CHANGES]
)  # a set is written otherwise in each process
def test_no_change_meets_a_stale_entry(
    pictures: Path, tmp_path: Path, change: dict[str, Any], anew: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(built(pictures), tmp_path / "cache")
    counts = encoded(monkeypatch)
    cached = Made(settings(pictures, tmp_path, DISK, **dict(change)))
    online = Made(settings(pictures, tmp_path, **dict(change)))
    near = 4e-2 if cached.cfg.training.mixed_precision == "bf16" else 1e-5
    for (ours,), (theirs,) in zip(cached.steps(), online.steps(), strict=True):
        with choose("cpu").autocast(cached.cfg.training.mixed_precision):
            a, b = (each.family.inputs(batch, each.parts) for each, batch in ((cached, ours), (online, theirs)))
        assert torch.allclose(a.x_t, b.x_t, atol=near, rtol=near)
        for name, value in b.conditions.items():
            assert torch.allclose(a.conditions[name], value, atol=near, rtol=near), name
    assert set(counts) == anew


def test_masked_rows_of_t5_take_no_room(pictures: Path, tmp_path: Path) -> None:
    sizes = []
    for masked in (False, True):
        made = settings(
            pictures, tmp_path / str(masked), DISK, model={"t5_attention_mask": masked, "t5_max_length": 200}
        )
        Made(made)
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(masked)).rglob("*.bin")))
    assert sizes[0] - sizes[1] > 8 * 150 * 64 * 4


def rank(pictures: str, out: str, way: str) -> None:
    """Train on one of several ranks."""
    torch.set_num_threads(1)
    cfg = settings(Path(pictures), Path(out), DISK, **dict(WAYS[way]))
    with Ranks.open(Launch.from_environment(), choose("cpu"), 1.0) as ranks:
        mine = {"batch_size": GLOBAL // ranks.size}
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update=mine)})
        torch.save(Made(cfg, ranks).train(), Path(out) / f"{ranks.rank}.pt")


@pytest.mark.parametrize(
    ("way", "size"), [("plain", 2), ("everything", 2), pytest.param("everything", 4, marks=pytest.mark.nightly)]
)
def test_several_ranks_train_as_one(pictures: Path, tmp_path: Path, way: str, size: int) -> None:
    """Losses, what is measured beside them, and weights, to the tolerances of a re-split."""
    sums, weights = Made(settings(pictures, tmp_path, DISK, **dict(WAYS[way]))).train()
    paths = os.pathsep.join(map(str, (ROOT / "library", ROOT, ROOT / "test" / "support")))
    run_ranks(size, f"{__file__}::rank", pictures, tmp_path, way, env={"PYTHONPATH": paths}, timeout_s=240)
    several = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(size)]
    for found, ours in several:
        assert [one.keys() for one in found] == [one.keys() for one in sums]
        for one, other in zip(found, sums, strict=True):
            assert one == pytest.approx(other, rel=1e-6)
        assert all((ours[name] - weights[name]).abs().max() <= LR for name in weights)
    first, *others = several
    for sums_there, weights_there in others:
        assert sums_there == first[0] and all(weights_there[name].equal(first[1][name]) for name in weights)
    names = {"loss", "metric/denoise_loss"} | (
        {"denoise", "text_recon", "metric/text_recon_loss"} if way != "plain" else set()
    )
    assert set(sums[0]) == names
