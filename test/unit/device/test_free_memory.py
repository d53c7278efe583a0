"""Free memory by the drivers' tools: stand-ins that print what the tools print."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.device.free_memory import free_memory

MIB = 1 << 20
NPU = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     910B3               | OK            | 93.6        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3161 / 65536         |
| 1     910B3               | OK            | 94.1        41                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          9161 / 65536         |
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(folder: Path, name: str, text: str, code: int = 0) -> None:
    tool = folder / name
    lines = "".join(f"echo '{line}'\n" for line in text.splitlines())
    tool.write_text(f"#!/bin/sh\n{lines}exit {code}\n")
    tool.chmod(0o755)


def test_the_fullest_device_counts_of_those_that_are_visible(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tools, "npu-smi", NPU)
    found = free_memory()
    assert (found.free, found.total) == ((65536 - 9161) * MIB, 65536 * MIB)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    assert free_memory("npu").free == (65536 - 3161) * MIB
    put(tools, "nvidia-smi", "4000, 24564")
    assert free_memory("cuda").free == 4000 * MIB
    assert "npu" in free_memory().what  # the first kind whose tool there is


def test_without_a_tool_it_is_the_hosts_or_not_known(tools: Path) -> None:
    assert free_memory().free == pytest.approx(free_memory("cpu").free, rel=0.2)
    assert free_memory("npu").free is None and free_memory("npu").why
    put(tools, "nvidia-smi", "NVIDIA-SMI has failed", 9)
    assert free_memory("cuda").free is None and "9" in free_memory("cuda").why
