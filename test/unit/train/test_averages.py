"""Averages of a run: how much of one is its own start, what pictures are drawn from, and averages begun on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import ConfigFault
from difftrain.diffusion.ema import Ema, PowerEma
from difftrain.train.averages import (
    announce,
    load_averages,
    require_profiles,
    start_averages,
    update_averages,
    write_averages,
)
from difftrain.train.drawing import Drawing
from difftrain.train.evaluating import drawable

RANKS: Any = SimpleNamespace(gather=lambda value: [value], is_logger=True, size=1, rank=0)


class Weights:
    """An engine of one weight."""

    def __init__(self, value: float) -> None:
        self.weight, self.put = torch.full((2,), value), "nothing"

    def shards(self) -> Iterator[tuple[str, torch.Tensor, None]]:
        yield "w", self.weight, None

    @contextmanager
    def swapped(self, weights: Any) -> Iterator[None]:
        self.put = "averaged"
        yield

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self.put = "trained"
        yield


def run_of(steps: int = 2500, step: int = 0, value: float = 1.0, model: dict | None = None, **ema: Any) -> Any:
    """Return a run at a step, with the averages that it asks for."""
    section = {"enable": True, "decay": 0.99, "update_every": 100} | ema
    cfg = TrainConfig.model_validate({"ema": section, "model": model or {"init_from_config": "tiny"}})
    run: Any = SimpleNamespace(cfg=cfg, engine=Weights(value), total_steps=steps, begins_at=0, ranks=RANKS)
    run.progress = SimpleNamespace(step=step)
    run.ema, run.profiles = start_averages(cfg.ema, run.engine)
    return run


@pytest.mark.parametrize(("steps", "said"), [(99, True), (100, False)])
def test_an_average_that_never_moves_is_said(steps: int, said: bool) -> None:
    lines = list(announce(run_of(steps)))
    assert any("every 100 steps, and the run has 99: it stays" in line for line in lines) is said
    assert not list(announce(run_of(steps, enable=False)))


def test_how_much_of_an_average_is_the_random_start_is_said() -> None:
    (line,) = announce(run_of(2500))
    assert "77.8 % of it is still the random start at step 2500" in line and "5 % from step 29900 on" in line
    assert "until half of it is, at step 6900, pictures are drawn from the weights as trained" in line
    (line,) = announce(run_of(100_000))
    assert "0.00432 % of it is still the random start at step 100000" in line


def test_of_trained_weights_it_is_said_where_it_matters() -> None:
    given = {"pretrained": "model"}
    (line,) = announce(run_of(2500, model=given))
    assert "77.8 % of it is still the weights it began with" in line
    assert not list(announce(run_of(30_000, model=given)))
    later = run_of(29_000, step=5000)  # begun there, by a session that went on
    (line,) = announce(later)
    assert "still the weights it began with at step 29000" in line and "at step 11900, pictures" in line
    later.ema.updates = 50  # begun with the run
    (line,) = announce(later)
    assert "still the random start" in line and "at step 6900, pictures" in line


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.9999])
def test_the_step_that_is_announced_is_the_one_where_pictures_change(decay: float) -> None:
    run = run_of(10**6, decay=decay, update_every=1)
    (line,) = announce(run)
    half = int(line.rpartition("at step ")[2].partition(",")[0])
    run.ema.updates = half - 1
    with drawable(run)[0]:
        assert run.engine.put == "trained" and drawable(run)[1].startswith("trained weights, as the average")
    run.ema.updates = half
    with drawable(run)[0]:
        assert run.engine.put == "averaged" and drawable(run)[1] == "averaged weights"


def test_a_grid_says_from_which_weights_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, nothing = run_of(), contextmanager(lambda *_: iter([None]))
    run.clock, run.device = SimpleNamespace(paused=nothing), SimpleNamespace(autocast=nothing)
    run.family, run.parts = SimpleNamespace(drawer=lambda parts: None), None
    run.out, run.name, run.epoch_end = tmp_path, "NAME", lambda: None
    for name in ("on_device", "during"):
        monkeypatch.setattr(f"difftrain.train.drawing.{name}", nothing)
    monkeypatch.setattr("difftrain.train.drawing.draw_grid", lambda *_, **__: tmp_path / "grid.png")
    said = {0: "trained weights, as the average is still 100 % its start", 200: "averaged weights"}
    for run.ema.updates, told in said.items():
        with caplog.at_level(logging.INFO, "difftrain"):
            Drawing(run)._draw_here(run)
        assert f"samples at step 0, {told}: " in caplog.text
        assert run.engine.put == told.split()[0]


def test_an_average_goes_on_with_what_it_has_taken_in(tmp_path: Path) -> None:
    run = run_of(update_every=2)
    for run.progress.step in range(5):
        update_averages(run)
    assert run.ema.updates == 2 and run.ema.start_share == pytest.approx(0.99**2)
    write_averages(run, tmp_path)
    again = run_of(step=5, value=7.0, update_every=2)
    load_averages(again, tmp_path)
    assert again.ema.updates == 2 and torch.equal(again.ema.weights["w"], torch.ones(2))
    save_file(run.ema.state_dict(), tmp_path / "ema-00000.safetensors")  # as it was written before it said so
    old = run_of(step=5, update_every=2)
    load_averages(old, tmp_path)
    assert old.ema.updates == 2


def test_an_average_begins_with_a_checkpoint_that_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(step=500)
    run.engine.weight += 6.0  # the checkpoint's, restored since the averages were made
    with caplog.at_level(logging.INFO, "difftrain"):
        load_averages(run, tmp_path)
    assert "has no averaged weights: the average begins with those of step 500" in caplog.text
    assert torch.equal(run.ema.weights["w"], torch.full((2,), 7.0)) and run.ema.updates == 0
    written = write_averages(run, tmp_path)
    load_averages(run, tmp_path)
    assert [path.name for path in written] == ["ema-00000.safetensors"]
    off = run_of(step=500, enable=False)
    load_averages(off, tmp_path)
    assert off.ema is None and "which are not carried on" in caplog.text


def test_averages_by_width_are_asked_of_a_checkpoint_before_the_data(tmp_path: Path) -> None:
    cfg = run_of(profiles=(0.05, 0.2)).cfg
    require_profiles(cfg, None, RANKS)
    with pytest.raises(ConfigFault, match=r"has no average of relative width 0\.05, 0\.2"):
        require_profiles(cfg, tmp_path, RANKS)
    run = run_of(profiles=(0.05,))
    assert isinstance(run.ema, Ema) and isinstance(run.profiles[0], PowerEma)
    write_averages(run, tmp_path)
    with pytest.raises(ConfigFault, match=r"--ema_profiles.* has no average of relative width 0\.2"):
        require_profiles(cfg, tmp_path, RANKS)
