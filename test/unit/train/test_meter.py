"""What is said of steps that are not finite."""

from __future__ import annotations

import logging
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from difftrain.config.schema.sections import LoggingSection, OptimizerSection, TrainConfig, TrainingSection
from difftrain.contracts import Stats, TrainingFault
from difftrain.distributed.ranks import Ranks
from difftrain.train.meter import Meter
from difftrain.train.state import Position, TrainProgress

FUSED = [{"fused_backward": True}, {"fused_groups": 3}]


def meter_of(
    outputs: Any = None, log_every: int = 100, device: Any = None, clock: Any = None, **optimizer: Any
) -> Meter:
    """Return the meter of a run in which two steps in a row may not be bad."""
    index = SimpleNamespace(records=lambda ids: [SimpleNamespace(name=f"{number}.png") for number in ids])
    draw = SimpleNamespace(record_id=7, key=b"\x01", occurrence=2)
    uses = SimpleNamespace(bucket=SimpleNamespace(bucket="64x64"))
    plan: Any = SimpleNamespace(locate=lambda step: (0, step), parts=lambda step: [uses], draws=lambda uses: [draw])
    cfg = TrainConfig(
        training=TrainingSection(max_skipped_steps=2),
        optimizer=OptimizerSection(**optimizer),
        logging=LoggingSection(log_every=log_every),
    )
    outputs = outputs or SimpleNamespace(advance=lambda step, samples_seen: None)
    return Meter(cfg, TrainProgress(), plan, index, device, Ranks(), clock, outputs)  # type: ignore[arg-type]


def judged(meter: Meter, losses: list[float]) -> None:
    for step, loss in enumerate(losses, 1):
        bad = torch.tensor(math.nan)
        stats = Stats({"loss": torch.tensor(loss)}, bad, torch.tensor(1.0), {}, None)
        meter.after_step(Position(step, steps_left=9), [], stats)
    meter.flush()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("difftrain"), "propagate", True)
    return caplog


@pytest.mark.parametrize("optimizer", [{}, *FUSED])
def test_a_loss_that_is_not_finite_skips_everything(optimizer: dict[str, Any], said: Any) -> None:
    judged(meter_of(**optimizer), [math.nan])
    assert re.search(r" skipped .*: 7\.png \[01 #2\]", said.text)


@pytest.mark.parametrize("optimizer", [{}, *FUSED])
def test_a_bad_gradient_comes_late_for_updates_during_the_backward_pass(optimizer: dict[str, Any], said: Any) -> None:
    with pytest.raises(TrainingFault) as caught:
        judged(meter_of(**optimizer), [0.5, 0.5])
    assert ("such gradient" in said.text) == bool(optimizer)
    assert (" skipped " in said.text) == (not optimizer)
    assert (" step 0." in str(caught.value)) == (not optimizer)


def test_what_a_family_measures_is_in_the_line_and_no_part_of_the_loss() -> None:
    lines: list[Any] = []
    device = SimpleNamespace(peak_memory_gib=lambda exact: 0.0)
    span = SimpleNamespace(fps=1.0, compute_fps=1.0, step_wait_s=0.0, step_s=1.0)
    account = SimpleNamespace(sessions=1, e2e_s=1.0)
    clock = SimpleNamespace(read=lambda: span, total=lambda: account, session=lambda: account)
    outputs = SimpleNamespace(advance=lambda step, samples_seen: None, line=lines.append)
    meter = meter_of(outputs, log_every=2, device=device, clock=clock)
    for step in (1, 2):
        sums = {"loss": 1.5, "denoise": 1.0, "metric/denoise_loss": float(step), "metric/text_recon_loss": 0.25}
        sums["metric/repa_loss"] = math.nan
        stats = Stats({k: torch.tensor(v) for k, v in sums.items()}, torch.tensor(1.0), torch.tensor(0.0), {}, None)
        meter.after_step(Position(step, steps_left=9), [], stats)
    assert len(lines) == 1
    record = lines[0].record()
    assert record["step_loss"] == 1.5 and "measures" not in record
    assert record["train/denoise_loss"] == 2.0 and record["train/text_recon_loss"] == 0.25
    assert "train/repa_loss" not in record and "train/repa_loss" not in lines[0].scalars()  # not measured
    assert lines[0].scalars()["train/denoise_loss"] == 2.0
    assert lines[0].line().startswith("step=2 epoch=1 step_loss=1.5 ")


@pytest.mark.parametrize(("skipped", "asks"), [([0, 1, 1, 0, 1], [(2, 3, 1), (3, 2, 1), (5, 1, 0)]), ([0, 0], [])])
def test_the_meter_asks_about_steps_that_were_skipped(
    skipped: list[int], asks: list[tuple[int, int, int]], said: pytest.LogCaptureFixture
) -> None:
    """skipped, updated: from that step to the one at which the numbers are read."""
    asked = []

    def tells(step: int, *, skipped: int, updated: int) -> str:
        asked.append((step, skipped, updated))
        return f"module-of-{step}"

    meter = meter_of()
    meter._cfg = meter._cfg.model_copy(
        update={"training": meter._cfg.training.model_copy(update={"max_skipped_steps": 9})}
    )
    meter._origin = tells
    for step, bad in enumerate(skipped, 1):
        stats = Stats(
            {"loss": torch.tensor(math.nan if bad else 1.0)}, torch.tensor(1.0), torch.tensor(float(bad)), {}, None
        )
        meter.after_step(Position(step, steps_left=9), [], stats)
    meter.flush()
    assert asked == asks
    assert [re.findall(r"module-of-(\d)", each) for each in said.messages] == [[str(step)] for step, _, _ in asks]


@pytest.mark.parametrize(
    ("losses", "count"),
    [([1.0], 0), ([math.nan], 1), ([1.0, math.inf], 1), ([math.nan, 1.0], 0), ([1.0, 1.0, math.nan], 1)],
)
def test_losses_that_are_no_numbers_are_counted_up_to_the_last(losses: list[float], count: int, said: Any) -> None:
    meter = meter_of()
    meter._cfg = meter._cfg.model_copy(
        update={"training": meter._cfg.training.model_copy(update={"max_skipped_steps": 9})}
    )
    judged(meter, losses)
    assert meter.bad_losses == count
