"""Weights that all ranks gather are read to the end, whatever happens to the rank that writes them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from difftrain.checkpoint import SaveName
from difftrain.config.schema.sections import TrainConfig
from difftrain.diffusion.ema import Ema, PowerEma
from difftrain.train import averages
from difftrain.train.saving import Saving
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

    def averaged_weights(self) -> Any:
        return contextlib.nullcontext()


def run_of(tmp_path: Path, export: Any, *, logger: bool = True) -> Any:
    """Return a run with a moving average and two by width, whose family exports as it is told."""
    cfg = TrainConfig.model_validate({"ema": {"enable": True, "profiles": (0.05, 0.1)}})
    engine = Gathering()
    weights = [(name, tensor) for name, tensor, _ in engine.shards()]
    return SimpleNamespace(
        cfg=cfg, name="NAME", out=tmp_path, identity={"config_digest": "x", "seed": 1}, parts=None,
        snapshots_at=None, failed_saves=0,
        ranks=SimpleNamespace(size=1, is_logger=logger, any=bool), progress=SimpleNamespace(step=3, samples_seen=6),
        engine=engine, ema=Ema(weights, 0.9), profiles=[PowerEma(weights, 0.05), PowerEma(weights, 0.1)],
        family=SimpleNamespace(export=export, metadata=lambda *_: {}), uploads=SimpleNamespace(holds=None),
        clock=SimpleNamespace(paused=lambda _: contextlib.nullcontext()), claim=SimpleNamespace(owned=False),
    )  # fmt: skip


def full_after_one(weights: Iterator[tuple[str, Tensor]], *_: Any, **__: Any) -> Path:
    next(weights)
    raise OSError(errno.ENOSPC, "No space left on device")


def wrong_at_once(weights: Iterator[tuple[str, Tensor]], *_: Any, **__: Any) -> Path:
    raise ValueError("a layout that nobody knows")


@pytest.fixture(autouse=True)
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difftrain.train.saving.facts_of", lambda run: None)


@pytest.mark.parametrize(
    ("export", "error"), [(full_after_one, "No space left on device"), (wrong_at_once, "nobody knows")]
)
def test_a_failed_export_reads_all_that_the_other_ranks_gather(tmp_path: Path, export: Any, error: str) -> None:
    run, other = run_of(tmp_path, export), run_of(tmp_path, None, logger=False)
    with pytest.raises((OSError, ValueError), match=error):
        Saving(run, SimpleNamespace())._export(run, SaveName("step", 3))
    Saving(other, SimpleNamespace())._export(other, SaveName("step", 3))
    assert run.engine.gathered == other.engine.gathered == list(NAMES) * 4  # the weights, the average, two by width
    assert len(list((tmp_path / averages.SNAPSHOTS).iterdir())) == 2  # what could be written is


def test_failed_snapshots_are_gathered_and_stored_anew_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def export(weights: Iterator[tuple[str, Tensor]], *_: Any, **__: Any) -> Path:
        assert [name for name, _ in weights] == list(NAMES)
        return tmp_path / "NAME"

    runs = run_of(tmp_path, export), run_of(tmp_path, None, logger=False)
    runs[0].uploads.add = lambda *_: None
    runs[1].ranks.any = lambda failed: True  # as the logger has
    monkeypatch.setattr(averages, "safetensors_writer", full)
    for run in runs:
        Saving(run, SimpleNamespace())._save(run, SaveName("step", 3), state=False)
    assert runs[0].engine.gathered == runs[1].engine.gathered == list(NAMES) * 4
    monkeypatch.undo()
    for run in runs:
        averages.store_snapshots(run)
        assert len(run.engine.gathered) == 6 * len(NAMES)
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
