"""What a step of each family does, counted: operators, copies, waits of the host, allocations, graphs. They may only fall.

`pytest test/golden/test_counters.py --update-golden` writes them anew; a rise is explained in the commit. The same of the
simulated device: test/simulated_npu/test_counters.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import counted
import pytest
import torch
from families import nightly_siblings

from difftrain.models.registry import FAMILIES


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Count as every machine does: with more threads there are no more operators, only noise in time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", FAMILIES)
def test_operators_of_a_step(name: str, update_golden: bool) -> None:
    counted.judge(name, "cpu", counted.on_cpu, update_golden)


@pytest.mark.parametrize("name", nightly_siblings(FAMILIES))
def test_graphs_of_compiled_blocks(name: str, update_golden: bool) -> None:
    counted.judge(name, "compiled", counted.compiled, update_golden)


def test_every_trained_family_has_figures_and_no_other() -> None:
    assert set(json.loads(counted.FILE.read_text())) == set(FAMILIES)


def test_a_copy_and_a_look_at_a_value_are_seen() -> None:
    x = torch.ones(4)
    with counted.OperatorCount() as seen:
        x.to(torch.float64)
        float(x.sum())
        x.view(2, 2).add_(1)
    assert seen.operators["aten::_to_copy"] == seen.operators["aten::_local_scalar_dense"] == 1
    assert seen.allocations == 2  # the copy and the sum: neither a view nor what is done in place
    assert seen.allocated_bytes == 4 * 8 + 4


def test_a_rise_and_a_fall_are_both_told(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "counters.json"  # type: ignore[operator]
    monkeypatch.setattr(counted, "FILE", path)
    counted.judge("any", "cpu", lambda name: {"copies": 3}, True)
    counted.judge("any", "cpu", lambda name: {"copies": 3}, False)
    with pytest.raises(AssertionError, match=r"\(3, 4\)"):
        counted.judge("any", "cpu", lambda name: {"copies": 4}, False)
    with pytest.raises(AssertionError, match=r"\(3, 2\)"):
        counted.judge("any", "cpu", lambda name: {"copies": 2}, False)
    with pytest.raises(AssertionError):
        counted.judge("any", "npu", lambda name: {"copies": 3}, False)
