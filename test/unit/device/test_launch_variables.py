"""Variables before a job starts: the launchers' own, never over the user's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from difftrain.device import launch_variables as room
from difftrain.device.launch_variables import VARIABLES, launch_variables

SCRIPTS = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_they_are_those_of_the_script(kind: str) -> None:
    text = (SCRIPTS / f"env_{kind}.sh").read_text(encoding="utf-8")
    exported = dict(re.findall(r'export (\w+)="\$\{\1:-([^$"]*)\}"', text))
    assert exported == VARIABLES[kind] and exported


def test_what_is_set_stays() -> None:
    assert launch_variables("cpu", {}) == {}
    assert launch_variables("cuda", dict.fromkeys(VARIABLES["cuda"], "7")) == {}
    assert "NCCL_DEBUG" not in launch_variables("cuda", {"NCCL_DEBUG": "INFO"})
    left = launch_variables("npu", {"PYTORCH_ALLOC_CONF": "x", "HCCL_BUFFSIZE": "100"})
    assert not {"PYTORCH_NPU_ALLOC_CONF", "HCCL_BUFFSIZE"} & left.keys() and left["COMBINED_ENABLE"] == "1"


@pytest.mark.parametrize(("version", "queue"), [("2.1.0.post17", "1"), ("2.4.0", "2"), ("2.13.0", "2"), ("", "1")])
def test_the_task_queue_goes_by_torch_npu(monkeypatch: pytest.MonkeyPatch, version: str, queue: str) -> None:
    def installed(name: str) -> str:
        if not version:
            raise room.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(room.metadata, "version", installed)
    assert launch_variables("npu", {})["TASK_QUEUE_ENABLE"] == queue


def test_hccl_is_told_the_address_that_leads_to_machine_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "address_towards", lambda host: "10.0.0.7" if host == "10.0.0.1" else "")
    assert launch_variables("npu", {}, "10.0.0.1")["HCCL_IF_IP"] == "10.0.0.7"
    assert "HCCL_IF_IP" not in launch_variables("npu", {}) | launch_variables("npu", {}, "nowhere")
    assert "HCCL_IF_IP" not in launch_variables("npu", {"HCCL_IF_IP": "10.1.2.3"}, "10.0.0.1")


def test_the_loopback_leads_nowhere() -> None:
    assert room.address_towards("127.0.0.1") == room.address_towards("") == ""
    assert room.address_towards("no-such-machine.invalid") == ""
