"""Which machines compute alike to the bit: those with these processors, and these versions of what computes."""

from __future__ import annotations

import platform
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

COMPUTING = ("torch", "diffusers")
USUAL_S = 0.07  # of importing pydantic, on a machine that is idle


def machine_kind() -> dict[str, str]:
    """Return what the bits of a result depend on: versions, the processor, and the instructions that torch uses of it."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    facts = [re.search(rf"^{name}\s*:\s*(.+)$", about, re.MULTILINE) for name in ("vendor_id", "cpu family", "model")]
    return {
        "machine": platform.machine(),
        "processor": " ".join(found[1] for found in facts if found),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        **{package: version(package) for package in COMPUTING},
    }


def processor_s(line: Sequence[str | Path], code: int = 0, times: int = 5, **options: Any) -> tuple[float, str]:
    """Return the least seconds of the processor that a command needs, as those of a usual one, and what it printed.

    A busy machine makes the clock meaningless, a slow or crowded one the processor's too: importing pydantic, taken in
    turns with the command, says how slow this one is just now.
    """
    yardstick, needed, printed = [], [], ""
    for _ in range(times):
        yardstick.append(_yardstick_s())
        seconds, printed = _child_s(line, code, **options)
        needed.append(seconds)
    return min(needed) / max(1.0, min(yardstick) / USUAL_S), printed


def slowness(times: int = 3) -> float:
    """Return how many times slower this machine is just now than an idle one of the usual kind; never below 1."""
    return max(1.0, min(_yardstick_s() for _ in range(times)) / USUAL_S)


def _yardstick_s() -> float:
    return _child_s([sys.executable, "-c", "import pydantic.main"], 0)[0]


def _child_s(line: Sequence[str | Path], code: int, **options: Any) -> tuple[float, str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == code, done.stdout + done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout
