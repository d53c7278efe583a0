"""What a step of each family does on the simulated device: kernels, copies, waits, fallbacks, allocations may only fall."""

from __future__ import annotations

import counted
import pytest
import torch
from families import SIBLINGS_ON_DEVICES, nightly_siblings

from difftrain.models.registry import FAMILIES

NAMES = nightly_siblings(FAMILIES, SIBLINGS_ON_DEVICES)


@pytest.mark.parametrize("name", NAMES)
def test_a_step(name: str, update_golden: bool) -> None:
    counted.judge(name, "npu", counted.on_npu, update_golden)


@pytest.mark.parametrize("name", NAMES)
def test_no_step_waits_or_falls_back(name: str) -> None:
    figures = counted.on_npu(name)
    assert figures["host_waits"] == figures["fallbacks"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_no_step_has_fp64_or_complex_numbers(name: str) -> None:
    seen = counted.dtypes_on_npu(name)
    assert torch.float32 in seen
    assert not {each for each in seen if each == torch.float64 or each.is_complex}
