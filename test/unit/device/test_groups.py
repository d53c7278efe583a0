"""device.npu_settings: HCCL gives up shortly before our groups do, so that its error is seen, and the user's flag counts more than a script's variables."""

from __future__ import annotations

import os

import pytest
from refusals import names

from difftrain.device import Device, npu_settings

NAMES = ("HCCL_EXEC_TIMEOUT", "HCCL_CONNECT_TIMEOUT")


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def found() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_without_a_flag_the_default_fills_gaps() -> None:
    os.environ[NAMES[1]] = "600"
    assert npu_settings.agree_on_waiting(None) == "" and found() == ["1800", "600"]


@pytest.mark.parametrize(("minutes", "expected"), [(10, ["540", "540"]), (1, ["54", "120"]), (600, ["32400", "7200"])])
def test_a_flag_sets_both_below_it_and_within_what_hccl_takes(minutes: float, expected: list[str]) -> None:
    assert npu_settings.agree_on_waiting(minutes) == "" and found() == expected
    assert int(expected[0]) < minutes * 60  # torch_npu warns at as long a wait as the group's


def test_a_flag_overrules_variables_and_says_so() -> None:
    os.environ[NAMES[0]] = os.environ[NAMES[1]] = "1800"
    said = npu_settings.agree_on_waiting(5)
    assert found() == ["270", "270"]
    flag, _, changes = said.partition(": ")
    assert flag == "--ddp_timeout=5"
    for change, name in zip(changes.split(", "), NAMES, strict=True):
        assert names(change, name, 270, 1800)
    assert npu_settings.agree_on_waiting(5) == ""


def test_other_devices_have_no_such_variables() -> None:
    assert Device("cpu").agree_on_waiting(5) == "" and found() == [None, None]
