"""Weights that all ranks gather are read to the end, whatever happens to the rank that writes them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from difftrain.checkpoint import SaveName
from difftrain.config.schema.sections import TrainConfig
from difftrain.train import averages
from difftrain.train.averages import Averages
from difftrain.train.saving import Exports, Saving
from difftrain.train.state import Position, TrainedModel
from difftrain.train.streams import all_tried, to_the_end

NAMES = ("a", "b", "c")


class Gathering:
    """An engine whose weights take all ranks, each one: what is not read here is waited for there."""

    def __init__(self) -> None:
        self.gathered: list[str] = []
        self.streams = 0

    def full_weights(self, source: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        self.streams += 1
        for name in NAMES:
            self.gathered.append(name)
            yield name, torch.ones(2)

    def shards(self) -> Iterator[tuple[str, Tensor, Any]]:
        return ((name, torch.ones(2), SimpleNamespace(shape=(2,))) for name in NAMES)

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(NAMES, (2,))

    def averaged_weights(self) -> Any:
        return contextlib.nullcontext()


def exports_of(tmp_path: Path, export: Any, *, logger: bool = True) -> tuple[Exports, Any]:
    """Return what writes weights with a moving average and two by width, by a family that exports as it is told."""
    section = {"ema": {"enable": True, "profiles": (0.05, 0.1)}, "save": {"output_dir": str(tmp_path)}}
    cfg, engine = TrainConfig.model_validate(section), Gathering()
    family, ranks = SimpleNamespace(export=export, metadata=lambda *_: {}), SimpleNamespace(is_logger=logger, size=1)
    model = TrainedModel(family, None, engine, Averages(cfg.ema, engine))  # type: ignore[arg-type]
    identity, uploads = {"config_digest": "x", "seed": 1}, SimpleNamespace(holds=None, add=lambda *_: None)
    return Exports(cfg, model, ranks, uploads, identity, lambda: None), model  # type: ignore[arg-type, return-value]


def full_after_one(weights: Iterator[tuple[str, Tensor]], *_: Any, **__: Any) -> Path:
    next(weights)
    raise OSError(errno.ENOSPC, "No space left on device")


def wrong_at_once(weights: Iterator[tuple[str, Tensor]], *_: Any, **__: Any) -> Path:
    raise ValueError("a layout that nobody knows")


@pytest.mark.parametrize(
    ("export", "error"), [(full_after_one, os.strerror(errno.ENOSPC)), (wrong_at_once, "nobody knows")]
)
def test_a_failed_export_reads_all_that_the_other_ranks_gather(tmp_path: Path, export: Any, error: str) -> None:
    (ours, model), (others, other) = exports_of(tmp_path, export), exports_of(tmp_path, None, logger=False)
    with pytest.raises((OSError, ValueError), match=error):
        ours.write("NAME-step3", 3)
    others.write("NAME-step3", 3)
    assert model.engine.gathered == other.engine.gathered == list(NAMES) * 4  # weights, the average, two by width
    assert len(list((tmp_path / averages.SNAPSHOTS).iterdir())) == 2  # what could be written is


def test_failed_snapshots_are_gathered_and_stored_anew_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def export(weights: Iterator[tuple[str, Tensor]], *_: Any, **__: Any) -> Path:
        assert [name for name, _ in weights] == list(NAMES)
        return tmp_path / "NAME"

    monkeypatch.setattr(averages, "safetensors_writer", full)
    models = []
    for logger in (True, False):
        exports, model = exports_of(tmp_path, export, logger=logger)
        ranks: Any = SimpleNamespace(is_logger=logger, size=1, any=lambda failed: True)  # as the logger has
        clock = SimpleNamespace(paused=lambda _: contextlib.nullcontext())
        cfg, claim = TrainConfig(), SimpleNamespace(owned=False)
        saving = Saving(cfg, model, ranks, clock, claim, None, exports, None)  # type: ignore[arg-type]
        saving._save(Position(3), SaveName("step", 3), state=False)
        models.append((model, ranks))
    assert models[0][0].engine.gathered == models[1][0].engine.gathered == list(NAMES) * 4
    monkeypatch.undo()
    for model, ranks in models:
        model.averages.store_snapshots(tmp_path, 3, ranks, {"config_digest": "x", "seed": 1})
        assert len(model.engine.gathered) == 6 * len(NAMES)
    assert len(list((tmp_path / averages.SNAPSHOTS).iterdir())) == 2


def test_every_job_is_tried_and_the_first_error_is_the_one_that_is_raised() -> None:
    done: list[int] = []

    def job(number: int) -> None:
        done.append(number)
        if number:
            raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        all_tried((lambda number=number: job(number)) for number in (0, 1, 2))
    assert done == [0, 1, 2]
    rest = iter([("a", torch.ones(1)), ("b", torch.ones(1))])
    with to_the_end(rest) as stream:
        next(stream)
    assert next(rest, None) is None
