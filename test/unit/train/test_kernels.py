"""What a step's kernels are counted for: once a session, for the log and the report."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from difftrain.device import attention
from difftrain.train.meter import counted


def _run(compile: bool = False) -> SimpleNamespace:
    training = SimpleNamespace(compile=compile)
    return SimpleNamespace(kernels={}, progress=SimpleNamespace(step=4), cfg=SimpleNamespace(training=training))


def test_the_first_step_is_counted_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    run, x = _run(), torch.ones(1, 1, 2, 4)
    with caplog.at_level(logging.INFO, "difftrain"):
        for calls in (3, 5):
            with counted(run, [None, None]):
                for _ in range(calls):
                    attention(x, x, x)
    wanted = {"fused": 0, "sdpa": 3, "recomputed": 0, "why": {"on cpu": 3}}
    assert run.kernels == {"step": 5, "micro_batches": 2, "attention": wanted, "others": {}}
    assert caplog.messages == ["attention in step 5: 3 calls, none fused (3 not: on cpu)"]


def test_a_compiled_run_says_what_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "difftrain"), counted(_run(compile=True), [None]):
        pass
    assert caplog.messages == ["attention in step 5: 0 calls, none fused; compiled blocks are not counted"]
