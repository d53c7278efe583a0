"""Which device is taken, what is said where one is missing, and what the visible-devices variables do."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from refusals import is_about, names

from difftrain.contracts import ConfigFault
from difftrain.device import choice, choose

LIBRARY = str(Path(choice.__file__).resolve().parents[2])
BARE = not any(choice.nodes(kind) for kind in ("npu", "cuda")) and importlib.util.find_spec("torch_npu") is None
bare_machine = pytest.mark.skipif(not BARE, reason="an accelerator, or torch_npu, is on this machine")


@bare_machine
def test_auto_takes_the_cpu_and_says_why() -> None:
    device = choose()
    assert device.kind == "cpu" and names(device.reason, "accelerator")
    assert choose(local_rank=5, local_size=8).torch_device == torch.device("cpu")  # as many processes as wanted


def test_the_cpu_as_asked_for() -> None:
    assert choose("cpu").kind == "cpu" and choose("cpu").reason != choose("auto").reason


@bare_machine
@pytest.mark.parametrize(("kind", "told"), [("npu", "torch_npu"), ("cuda", "torch")])
def test_a_missing_kind_is_a_fault_and_no_fallback(kind: str, told: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        choose(kind)
    (fault,) = caught.value.faults
    assert is_about(fault, "--device", kind, told)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigFault, match=r"--device: .*'gpu'.*auto, npu, cuda, cpu"):
        choose("gpu")


def _found(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> list[tuple[str, int, int]]:
    """Let `count` devices of a kind be found; return the list of what was then taken."""
    taken: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        choice, "find", lambda asked: choice.ProbedDevice(asked, count if asked == kind else 0, "none here")
    )
    monkeypatch.setattr(choice, "worth_asking", lambda asked: True)
    monkeypatch.setattr(
        "difftrain.device.torch_device.Device", lambda kind, index, count, reason: taken.append((kind, index, count))
    )
    return taken


def test_every_process_of_a_machine_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _found(monkeypatch, "cuda", 4)
    for rank in range(4):
        choose("auto", rank, 4)
    assert taken == [("cuda", rank, 4) for rank in range(4)]


@pytest.mark.parametrize(("rank", "size"), [(0, 8), (5, 8), (4, 5)])
def test_more_processes_than_devices_is_a_fault_that_names_what_would_fit(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _found(monkeypatch, "npu", 4)
    with pytest.raises(ConfigFault, match=rf"--nproc_per_node: {size} npu .* 4 .*--nproc_per_node=4"):
        choose("npu", rank, size)


@pytest.mark.parametrize(
    ("one", "visible", "index"),
    [("", "", 0), ("3", "", 3), ("5", "4,5,6", 1), ("0", "0", 0)],
)
def test_ascend_device_id_is_respected_in_a_single_process(
    one: str, visible: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = _found(monkeypatch, "npu", 8)
    monkeypatch.setenv("ASCEND_DEVICE_ID", one)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    choose("npu")
    choose("npu", local_rank=2, local_size=4)  # ranks of a job take their own, whatever is inherited
    assert taken == [("npu", index, 8), ("npu", 2, 8)]
    assert os.environ["ASCEND_DEVICE_ID"] == one and os.environ["ASCEND_RT_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("one", "visible", "facts"),
    [
        ("7", "4,5", ["7", "ASCEND_RT_VISIBLE_DEVICES=4,5"]),
        ("first", "", ["'first'"]),
        ("9", "", ["10 npu devices", "8"]),
    ],
)
def test_ascend_device_ids_that_make_no_sense(
    one: str, visible: str, facts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _found(monkeypatch, "npu", 8)
    monkeypatch.setenv("ASCEND_DEVICE_ID", one)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigFault) as caught:
        choose("npu")
    assert names(caught.value, *facts)
