"""Which machines compute alike to the bit: those with these processors, and these versions of what computes."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version
from pathlib import Path

import torch

COMPUTING = ("torch", "diffusers")


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
