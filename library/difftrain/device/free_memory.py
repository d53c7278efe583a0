"""Free memory of the devices, as their drivers' tools tell it: nothing is opened on a device, and torch is not asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from difftrain.device import host

_ANSWER_S = 10.0
_MIB = 1 << 20
_TOOLS = {"npu": "npu-smi", "cuda": "nvidia-smi"}
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
# the last "used / total" of a chip's line is that of its large memory, in MB
_NPU_LINE = re.compile(r"^\| *\d+ +\| *[0-9A-Fa-f]{4}:[^|]*\|.*?(\d+) */ *(\d+) *\|$", re.MULTILINE)


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes of the device that has least of them, or why they are not known. what: the device, for people."""

    what: str
    free: int | None = None
    total: int | None = None
    why: str = ""


def free_memory(kind: str = "auto") -> FreeMemory:
    """Ask for the free memory of a kind of device; auto: of the first kind whose tool is installed, else the host's."""
    for vendor, tool in _TOOLS.items():
        if kind == vendor or (kind == "auto" and shutil.which(tool)):
            return _of_devices(vendor)
    free = host.available_bytes()
    return FreeMemory("this machine (CPU)", free, why="" if free is not None else "the system does not report it")


def _of_devices(kind: str) -> FreeMemory:
    tool = _TOOLS[kind]
    if not shutil.which(tool):
        return FreeMemory(kind, why=f"{tool} is not installed")
    words = ["info"] if kind == "npu" else ["--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.SubprocessError) as error:
        return FreeMemory(kind, why=f"{tool} does not respond ({type(error).__name__})")
    if kind == "npu":
        devices = [(int(total) - int(used), int(total)) for used, total in _NPU_LINE.findall(done.stdout)]
    else:
        rows = [re.findall(r"\d+", line) for line in done.stdout.splitlines()]
        devices = [(int(row[0]), int(row[1])) for row in rows if len(row) == 2]
    visible = os.environ.get(_VISIBLE[kind], "")
    if re.fullmatch(r"\d+(,\d+)*", visible):
        devices = [devices[int(index)] for index in visible.split(",") if int(index) < len(devices)]
    if done.returncode or not devices:
        return FreeMemory(kind, why=f"{tool} reports no memory (exit code {done.returncode})")
    free, total = min(devices)
    several = f"{len(devices)} {kind} devices, the fullest of them" if len(devices) > 1 else f"the {kind} device"
    return FreeMemory(several, free * _MIB, total * _MIB)
