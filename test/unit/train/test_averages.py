"""Averages of a run: how much of one is its own start, what pictures are drawn from, and averages begun on the way."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import ConfigFault, Extent, TensorFile
from difftrain.diffusion.ema import Ema, PowerEma
from difftrain.train.averages import Averages, require_profiles
from difftrain.train.drawing import Drawing
from difftrain.train.state import Position, TrainedModel

RANKS: Any = SimpleNamespace(gather=lambda value: [value], is_logger=True, size=1, rank=0)


class Weights:
    """An engine of one weight."""

    def __init__(self, value: float) -> None:
        self.weight, self.put = torch.full((2,), value), "nothing"

    all_forward, leads = False, True

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"w": (2,)}

    def shards(self) -> Iterator[tuple[str, torch.Tensor, Extent]]:
        yield "w", self.weight, Extent((2,), 0)

    def average_file(self, kind: str, averages: Any, about: Any) -> TensorFile:
        return TensorFile(f"{kind}-00000.safetensors", averages, about)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        yield

    @contextmanager
    def swapped(self, weights: Any) -> Iterator[None]:
        self.put = "averaged"
        yield

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        self.put = "trained"
        yield


def config_of(**ema: Any) -> TrainConfig:
    return TrainConfig.model_validate({"ema": {"enable": True, "decay": 0.99, "update_every": 100} | ema})


def averages_of(value: float = 1.0, **ema: Any) -> Any:
    """Return the averages that a run asks for, of one weight."""
    return Averages(config_of(**ema).ema, Weights(value))  # type: ignore[arg-type]


def announced(steps: int, step: int = 0, model: dict | None = None, averages: Any = None, **ema: Any) -> list[str]:
    """Return what is said at a step of a run."""
    section = TrainConfig.model_validate({"model": model or {"init_from_config": "tiny"}}).model
    return list((averages or averages_of(**ema)).announce(section, 0, step, steps))


def numbers(line: str) -> list[str]:
    """Return share and last step, the small share and its step, decay, rhythm, and the step of half."""
    return re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", line)


@pytest.mark.parametrize(("steps", "said"), [(99, True), (100, False)])
def test_an_average_that_never_moves_is_said(steps: int, said: bool) -> None:
    assert any(re.search(r"every 100 steps, .* 99: .*\[ema\] update_every", line) for line in announced(steps)) is said
    assert not announced(steps, enable=False)


def test_how_much_of_an_average_is_the_random_start_is_said() -> None:
    (line,) = announced(2500)
    assert numbers(line) == ["77.8", "2500", "5", "29900", "0.99", "100", "6900"] and "random" in line
    (line,) = announced(100_000)
    assert numbers(line)[:2] == ["0.00432", "100000"]


def test_of_trained_weights_it_is_said_where_it_matters() -> None:
    given = {"pretrained": "model"}
    (line,) = announced(2500, model=given)
    assert numbers(line)[0] == "77.8" and "random" not in line
    assert not announced(30_000, model=given)
    later = averages_of()  # begun at step 5000, by a session that went on
    (line,) = announced(29_000, 5000, averages=later)
    assert numbers(line)[1] == "29000" and numbers(line)[-1] == "11900" and "random" not in line
    later.ema.updates = 50  # begun with the run
    (line,) = announced(29_000, 5000, averages=later)
    assert "random" in line and numbers(line)[-1] == "6900"


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.9999])
def test_the_step_that_is_announced_is_the_one_where_pictures_change(decay: float) -> None:
    averages = averages_of(decay=decay, update_every=1)
    (line,) = announced(10**6, averages=averages)
    half = int(numbers(line)[-1])
    averages.ema.updates = half - 1
    with averages.drawable()[0]:
        assert averages.engine.put == "trained"
    assert averages.drawable()[1].startswith("raw weights, ")
    averages.ema.updates = half
    with averages.drawable()[0]:
        assert averages.engine.put == "averaged" and averages.drawable()[1] == "averaged weights"


def test_a_grid_says_from_which_weights_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    averages, nothing = averages_of(), contextmanager(lambda *_: iter([None]))
    clock, device = SimpleNamespace(paused=nothing), SimpleNamespace(autocast=nothing)
    model = TrainedModel(SimpleNamespace(drawer=lambda parts, predict: None), None, averages.engine, averages)  # type: ignore[arg-type]
    cfg = TrainConfig.model_validate({"save": {"output_dir": str(tmp_path)}})
    for name in ("on_device", "during"):
        monkeypatch.setattr(f"difftrain.train.drawing.{name}", nothing)
    monkeypatch.setattr("difftrain.train.drawing.draw_grid", lambda *_, **__: tmp_path / "grid.png")
    said = {0: ("trained", "raw weights, .* 100 % "), 200: ("averaged", "averaged weights: ")}
    for averages.ema.updates, (put, told) in said.items():
        with caplog.at_level(logging.INFO, "difftrain"):
            Drawing(cfg, model, device, RANKS, clock)._draw_here(Position(0))  # type: ignore[arg-type]
        assert re.search(rf"step 0, {told}.*grid\.png", caplog.text)
        assert averages.engine.put == put


def test_an_average_goes_on_with_what_it_has_taken_in(tmp_path: Path) -> None:
    averages = averages_of(update_every=2)
    for step in range(5):
        averages.update(step)
    assert averages.ema.updates == 2 and averages.ema.start_share == pytest.approx(0.99**2)
    averages.snapshot()(tmp_path)
    again = averages_of(value=7.0, update_every=2)
    again.load(tmp_path, RANKS, 5)
    assert again.ema.updates == 2 and torch.equal(again.ema.weights["w"], torch.ones(2))
    save_file(averages.ema.state_dict(), tmp_path / "ema-00000.safetensors")  # as it was written before it said so
    old = averages_of(update_every=2)
    old.load(tmp_path, RANKS, 5)
    assert old.ema.updates == 2


def test_an_average_begins_with_a_checkpoint_that_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    averages = averages_of()
    averages.engine.weight += 6.0  # the checkpoint's, restored since the averages were made
    with caplog.at_level(logging.INFO, "difftrain"):
        averages.load(tmp_path, RANKS, 500)
    assert re.search(rf"{tmp_path} .* no averaged .*step 500\b", caplog.text)
    assert torch.equal(averages.ema.weights["w"], torch.full((2,), 7.0)) and averages.ema.updates == 0
    written = averages.snapshot()(tmp_path)
    averages.load(tmp_path, RANKS, 500)
    assert [path.name for path in written] == ["ema-00000.safetensors"]
    off = averages_of(enable=False)
    off.load(tmp_path, RANKS, 500)
    assert off.ema is None and re.search(rf"{tmp_path} has averaged .*--use_ema", caplog.text)


def test_averages_by_width_are_asked_of_a_checkpoint_before_the_data(tmp_path: Path) -> None:
    cfg = config_of(profiles=(0.05, 0.2))
    require_profiles(cfg, None, RANKS)
    with pytest.raises(ConfigFault, match=rf"{tmp_path} .* no average .* 0\.05, 0\.2"):
        require_profiles(cfg, tmp_path, RANKS)
    averages = averages_of(profiles=(0.05,))
    assert isinstance(averages.ema, Ema) and isinstance(averages.profiles[0], PowerEma)
    averages.snapshot()(tmp_path)
    with pytest.raises(ConfigFault, match=rf"--ema_profiles.* {tmp_path} .* no average .* width 0\.2"):
        require_profiles(cfg, tmp_path, RANKS)
