"""What a step's kernels are counted for: once a session, for the log and the report."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from difftrain.config import TrainConfig, TrainingSection
from difftrain.device import attention
from difftrain.train.meter import Meter
from difftrain.train.state import TrainProgress


def meter_of(compile: bool = False) -> Any:
    """Return the meter of a run that has done four steps."""
    return Meter(TrainConfig(training=TrainingSection(compile=compile)), TrainProgress(step=4), *[None] * 6)  # type: ignore[arg-type]


def test_the_first_step_is_counted_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    meter, x = meter_of(), torch.ones(1, 1, 2, 4)
    with caplog.at_level(logging.INFO, "difftrain"):
        for calls in (3, 5):
            with meter.counted([None, None]):
                for _ in range(calls):
                    attention(x, x, x)
    wanted = {"fused": 0, "sdpa": 3, "recomputed": 0, "why": {"on cpu": 3}}
    assert meter.kernels == {"step": 5, "micro_batches": 2, "attention": wanted, "others": {}}
    assert [line.partition(" ")[0] for line in caplog.messages] == ["attention"]
    assert "step 5: 3 calls, none fused (3 not: on cpu)" in caplog.messages[0]


def test_a_compiled_run_says_what_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "difftrain"), meter_of(compile=True).counted([None]):
        pass
    assert len(caplog.messages) == 1 and re.search("step 5: 0 calls, none fused; compiled blocks ", caplog.messages[0])
