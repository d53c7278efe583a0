"""When evaluation sets are looked at, what their numbers are called, and which pictures are drawn."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from difftrain.config.schema.sections import EvalSection, TrainConfig
from difftrain.contracts import DataFault, FeatureSpec, Parts
from difftrain.data.evaluation_sets import config_of, open_set
from difftrain.testing.pictures import write_folder
from difftrain.train import dry_run
from difftrain.train.evaluating_sets import Due, tags
from difftrain.train.kid import chosen


def due_at(images: int, steps: int, epoch_every: int = 4, begin: int = 0, **fields: Any) -> list[int]:
    """Walk through a run whose steps have so many images; return the steps at which it is due."""
    due = Due(EvalSection(**fields), samples_seen=begin * images)
    found = []
    for step in range(begin + 1, steps + 1):
        run = SimpleNamespace(
            progress=SimpleNamespace(step=step, samples_seen=step * images),
            epoch_end=lambda step=step: None if step % epoch_every else step // epoch_every,
            steps_left=steps - step,
        )
        if due(run):  # type: ignore[arg-type]
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, [4, 8, 10]),
        ({"every_n_epochs": 2}, [8, 10]),
        ({"every_n_steps": 3}, [3, 6, 9, 10]),
        ({"every_n_examples": 16}, [3, 6, 8, 10]),  # the first step that has seen 16, 32, 48 of 6 a step
        ({"every_n_examples": 4}, list(range(1, 11))),
        ({"every_n_steps": 5, "every_n_epochs": 1}, [4, 5, 8, 10]),
    ],
)
def test_when_it_is_due(fields: dict[str, Any], found: list[int]) -> None:
    assert due_at(6, 10, **fields) == found
    for begin in (2, 5, 7):  # a session that begins in between is due at the same steps
        assert due_at(6, 10, begin=begin, **fields) == [step for step in found if step > begin]


def test_numbers_have_the_names_that_were_promised() -> None:
    rows = [
        {"quantile": k / 10, "loss": float(k), "samples": 3, "metrics": {"denoise_loss": 2.0 * k}} for k in range(1, 10)
    ]
    found = tags("held", "ema_", rows)
    assert found["held/ema_loss_quantile_0.10"] == 1.0 and found["held/ema_loss_quantile_0.90"] == 9.0
    assert found["held/ema_loss"] == 5.0 and found["held/ema_denoise_loss"] == 10.0 and len(found) == 20
    assert [found[f"held/ema_denoise_loss_quantile_0.{k}0"] for k in range(1, 10)] == [2.0 * k for k in range(1, 10)]
    assert set(tags("held", "", [{"quantile": 0.5, "loss": 1.0, "samples": 1}])) == {
        "held/loss_quantile_0.50",
        "held/loss",
    }
    rows[8]["metrics"] = {}  # the model's answer was no number there
    found = tags("held", "", rows)
    assert found["held/denoise_loss_quantile_0.80"] == 16.0 and math.isnan(found["held/denoise_loss_quantile_0.90"])
    assert math.isnan(found["held/denoise_loss"]) and found["held/loss"] == 5.0


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    root = tmp_path_factory.mktemp("sets")
    write_folder(root / "held", [(64, 64), (96, 40), (64, 64)] * 7)
    sizes = {"enable_bucket": True, "min_bucket_reso": 32, "max_bucket_reso": 128, "bucket_reso_steps": 32}
    subset = {"image_dir": str(root / "held"), "repeats": 3, "flip": True, "captions": {"shuffle": True}}
    datasets = tuple({**sizes, "resolution": (side, side), "batch_size": 4, "subsets": (subset,)} for side in (64, 96))
    return TrainConfig.model_validate(
        {
            "data": {"resolution": (64, 64), "workers": 0, "cache_dir": str(root / "cache")},
            "training": {"seed": 5},
            "eval": {"sets": ({"name": "held", "config": "held.toml", "datasets": datasets},), "batch_size": 3},
        }
    )


def test_the_same_pictures_are_drawn_by_chance_in_lots_of_one_size(cfg: TrainConfig, tmp_path: Path) -> None:
    section = cfg.eval.sets[0]
    said: list[str] = []
    data = open_set(cfg, section, said.append)
    assert said[-1] == "42 records in 4 buckets, 0 rejected"
    assert not any(recipe.flip or recipe.captions.shuffle for recipe in data.recipes)
    own = config_of(cfg, section)
    assert own.batch_sizes == (3, 3)
    lots = list(chosen(data, 20, own.batch_sizes))
    rows = np.concatenate([rows for _, rows in lots])
    assert len(rows) == len(set(rows.tolist())) == 20 and all(1 <= len(each) <= 3 for _, each in lots)
    assert len({bucket for bucket, _ in lots}) == 4  # by chance, not the first ones
    again = list(chosen(open_set(cfg, section, said.append), 20, own.batch_sizes))
    assert all(a == b and x.tolist() == y.tolist() for (a, x), (b, y) in zip(lots, again, strict=True))
    fewer = np.concatenate([rows for _, rows in chosen(data, 12, own.batch_sizes)])
    assert set(fewer.tolist()) < set(rows.tolist())
    every = np.concatenate([rows for _, rows in chosen(data, 1000, own.batch_sizes)])
    assert sorted(every.tolist()) == list(range(42))


def test_a_dry_run_opens_the_sets_and_says_what_looking_takes(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "packages_missing", lambda: ["one_package"])
    family = SimpleNamespace(features=FeatureSpec({}, {}, size_multiple=32))
    ema = cfg.model_copy(update={"ema": cfg.ema.model_copy(update={"enable": True})})
    kid = ema.model_copy(update={"eval": cfg.eval.model_copy(update={"kid": True})})
    said = list(dry_run.evaluation(kid, family, Parts(nn.Module())))  # type: ignore[arg-type]
    assert "evaluation set held: 42 pictures x 9 quantiles x 2 weights = 756 images forward each time" in said
    assert "one_package not installed, so it would not be measured; pip install" in said[-1]
    family.features = FeatureSpec({}, {}, size_multiple=64)
    with pytest.raises(DataFault, match="multiples of 64"):
        list(dry_run.evaluation(cfg, family, Parts(nn.Module())))  # type: ignore[arg-type]


def test_a_set_of_which_nothing_can_be_made_is_named(cfg: TrainConfig, tmp_path: Path) -> None:
    write_folder(tmp_path, [(64, 64)] * 3)
    for path in tmp_path.glob("*.txt"):
        path.unlink()
    held = cfg.eval.sets[0].datasets[0]
    subset = held.subsets[0].model_copy(update={"image_dir": str(tmp_path)})
    section = cfg.eval.sets[0].model_copy(update={"datasets": (held.model_copy(update={"subsets": (subset,)}),)})
    with pytest.raises(DataFault, match="caption"):
        open_set(cfg, section, lambda line: None)
