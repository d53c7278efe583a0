"""What a step of each family does on the simulated device: kernels, copies, waits, fallbacks, allocations may only fall."""

from __future__ import annotations

import counted
import pytest

from difftrain.models.registry import TRAINED


@pytest.mark.parametrize("name", TRAINED)
def test_a_step(name: str, update_golden: bool) -> None:
    counted.judge(name, "npu", counted.on_npu, update_golden)


@pytest.mark.parametrize("name", TRAINED)
def test_no_step_waits_or_falls_back(name: str) -> None:
    figures = counted.on_npu(name)
    assert figures["host_waits"] == figures["fallbacks"] == 0
