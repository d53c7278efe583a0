"""When evaluation sets are looked at, what their numbers are called, and which pictures are drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import names
from torch import nn

from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import Batch, Bucket, DataFault, DrawSpec, FeatureSpec, Parts
from difftrain.data.evaluation_sets import EvaluationSet, open_set
from difftrain.distributed.ranks import Ranks
from difftrain.testing.pictures import write_folder
from difftrain.train.averages import Averages
from difftrain.train.estimate import dry_run
from difftrain.train.evaluating import Evaluating, due_of, tags
from difftrain.train.kid import DrawnPictures, chosen
from difftrain.train.state import Position, TrainedModel


def due_at(images: int, steps: int, epoch_every: int = 4, begin: int = 0, **fields: Any) -> list[int]:
    """Walk through a run whose steps have so many images; return the steps at which it is due."""
    cfg: Any = TrainConfig.model_validate({"eval": fields})
    due = due_of(EvaluationSet("held", cfg, None, 0))  # type: ignore[arg-type]
    due.begin(begin * images)
    found = []
    for step in range(begin + 1, steps + 1):
        epoch_end = None if step % epoch_every else step // epoch_every
        if due(Position(step, step * images, steps - step, epoch_end=epoch_end)):
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


class Measured:
    """An engine whose loss is 1 under the weights as trained and 2 under averaged ones; it notes nothing else."""

    dp_rank, dp_size, leads, weights = 0, 1, True, 1.0

    def evaluate(self, micro: list[Batch]) -> dict[str, torch.Tensor]:
        return {"loss": torch.tensor(self.weights * sum(batch.counts["samples"] for batch in micro))}

    own_sums = evaluate

    @contextmanager
    def swapped(self, weights: Any) -> Iterator[None]:
        self.weights = 2.0
        yield
        self.weights = 1.0

    def averaged_weights(self) -> Any:
        return nullcontext()

    def shards(self) -> Iterator[tuple[str, torch.Tensor, None]]:
        yield "w", torch.ones(1), None


def batch(count: int) -> Batch:
    draws = {"timestep": torch.zeros(count, dtype=torch.int64)}
    ids = torch.arange(count)
    return Batch(Bucket(8, 8), ids, torch.zeros_like(ids), {}, draws, counts={"samples": float(count)})


def test_every_set_is_measured_by_its_own_rule_at_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out one each epoch, averaged, as drawn; the other every three steps, at nine quantiles, both weights."""
    cfg = TrainConfig.model_validate(
        {"validation": {"split": 0.5}, "eval": {"every_n_steps": 3, "before_first_step": True}, "ema": {"enable": True}}
    )
    held_out, own = EvaluationSet("validation", cfg, None, 0, held_out=True), EvaluationSet("own", cfg, None, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(EvaluationSet, "batches", lambda each, *_: iter([batch(3), batch(2 if each.held_out else 4)]))
    engine: Any = Measured()
    features = FeatureSpec({}, {"timestep": DrawSpec("integer", high=1000)})
    family: Any = SimpleNamespace(features=features, tokenizer=lambda parts: dict)
    model = TrainedModel(family, None, engine, Averages(cfg.ema, engine))  # type: ignore[arg-type]
    device, clock = SimpleNamespace(to_device=lambda each: each), SimpleNamespace(paused=lambda name: nullcontext())
    lines: list[tuple[str, dict[str, Any]]] = []
    outputs = SimpleNamespace(evaluated=lambda file, line: lines.append((file, line)))
    hook = Evaluating((held_out, own), model, device, Ranks(), clock, outputs)  # type: ignore[arg-type]
    hook.before_training(Position(0, steps_left=6, at_start=True))
    for step in range(1, 7):
        hook.after_step(Position(step, 5 * step, 6 - step, epoch=1 + step // 5, epoch_end=1 if step == 4 else None))
    assert [(file, line["step"]) for file, line in lines] == [
        ("evaluation.jsonl", 0), ("evaluation.jsonl", 3), ("validation.jsonl", 4),
        ("validation.jsonl", 6), ("evaluation.jsonl", 6),
    ]  # fmt: skip
    assert lines[2][1] == {"step": 4, "loss": 2.0, "samples": 5}
    assert lines[0][1] | {"epoch": 0, "samples_seen": 0} == lines[0][1]
    last = lines[-1][1]
    assert (last["epoch"], last["samples_seen"], last["own/samples"]) == (2, 30, 7)
    assert (last["own/loss"], last["own/ema_loss"], last["own/ema_loss_quantile_0.90"]) == (1.0, 2.0, 2.0)
    assert [row["loss"] for row in hook.quantiles()] == [2.0] * 9


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
    held = open_set(cfg, section, said.append)
    data, batch_sizes = held.data, held.cfg.batch_sizes
    assert said[-1] == "42 records in 4 buckets, 0 rejected"
    assert not any(recipe.flip or recipe.captions.shuffle for recipe in data.recipes)
    assert batch_sizes == (3, 3)
    lots = list(chosen(data, 20, batch_sizes))
    rows = np.concatenate([rows for _, rows in lots])
    assert len(rows) == len(set(rows.tolist())) == 20 and all(1 <= len(each) <= 3 for _, each in lots)
    assert len({bucket for bucket, _ in lots}) == 4  # by chance, not the first ones
    again = list(chosen(open_set(cfg, section, said.append).data, 20, batch_sizes))
    assert all(a == b and x.tolist() == y.tolist() for (a, x), (b, y) in zip(lots, again, strict=True))
    fewer = np.concatenate([rows for _, rows in chosen(data, 12, batch_sizes)])
    assert set(fewer.tolist()) < set(rows.tolist())
    every = np.concatenate([rows for _, rows in chosen(data, 1000, batch_sizes)])
    assert sorted(every.tolist()) == list(range(42))


def test_a_dry_run_opens_the_sets_and_says_what_looking_takes(
    cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "packages_missing", lambda: ["one_package"])
    family = SimpleNamespace(features=FeatureSpec({}, {}, size_multiple=32))
    ema = cfg.model_copy(update={"ema": cfg.ema.model_copy(update={"enable": True})})
    kid = ema.model_copy(update={"eval": cfg.eval.model_copy(update={"kid": True})})
    said = list(dry_run.evaluation(kid, family, Parts(nn.Module())))  # type: ignore[arg-type]
    assert any(names(line, "held", 42, 9, 2, 756) for line in said)
    assert re.search(r": one_package not installed, .*pip install", said[-1])
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


def test_of_clips_the_middle_frame_is_looked_at() -> None:
    looking = DrawnPictures.__new__(DrawnPictures)
    looking._network = lambda pictures: pictures  # type: ignore[assignment]
    clip = torch.arange(5.0).view(1, 1, 5, 1, 1).expand(2, 3, 5, 4, 4)
    assert looking._features(clip).shape == (2, 3, 4, 4)
    assert (looking._features(clip) == 2).all()
    assert looking._features(clip[:, :, 0]).shape == (2, 3, 4, 4)
