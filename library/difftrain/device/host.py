"""Facts of the machine that no tensor library is needed for: CPU, resident memory, driver and CANN versions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@functools.cache
def cpu_name() -> str:
    """Return the processor's name."""
    match = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> dict[str, Any]:
    """Describe the host for reports; no host name, which is nobody's business."""
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "memory_gib": round(int(memory.group(1)) / (1 << 20), 1) if memory else None,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def available_bytes() -> int | None:
    """Return the memory that processes here can still take: of the machine, and within this container's limit.

    None where the system does not say.
    """
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    known = [int(match.group(1)) << 10] if match else []
    for limit, used, cached in (
        ("memory.max", "memory.current", r"^inactive_file (\d+)"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", r"^total_inactive_file (\d+)"),
    ):
        words = [_read(f"/sys/fs/cgroup/{name}").strip() for name in (limit, used)]
        if all(word.isdecimal() for word in words):
            statistics = _read(f"/sys/fs/cgroup/{Path(limit).parent}/memory.stat")
            reclaimed = re.search(cached, statistics, re.MULTILINE)
            known.append(int(words[0]) - int(words[1]) + (int(reclaimed.group(1)) if reclaimed else 0))
    return max(0, min(known)) if known else None


def give_back() -> None:
    """Hand memory that was freed to the system: glibc keeps what lay between things that are still used."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


_READ_EVERY_S = 1.0
_peak: tuple[float, int] | None = None  # when it was read last, and what it was


def recent_peak_rss_bytes() -> int:
    """Return the peak as it was a second ago at most: lines of a run ask for it at every step."""
    global _peak
    if _peak is None or time.monotonic() - _peak[0] >= _READ_EVERY_S:
        _peak = time.monotonic(), peak_rss_bytes()
    return _peak[1]


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process, in bytes.

    VmHWM where there is /proc: getrusage keeps the peak of the process that exec'ed this one.
    """
    with contextlib.suppress(OSError), Path("/proc/self/status").open("rb", buffering=0) as status:
        # read in one piece, without decoding
        match = re.search(rb"^VmHWM:\s*(\d+) kB", status.read(1 << 16), re.MULTILINE)
        if match:
            return int(match.group(1)) << 10
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def reset_peak_rss() -> None:
    """Start a new peak where the kernel allows it; elsewhere the peak stays that of the whole run."""
    global _peak
    _peak = None
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def nvidia_driver() -> str | None:
    """Return the version of the loaded NVIDIA kernel driver."""
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", _read("/proc/driver/nvidia/version"))
    return match.group(1) if match else None


def npu_driver() -> str | None:
    """Return the version of the Ascend driver, from where its installer writes it."""
    match = re.search(r"^Version=(.+)$", _read("/usr/local/Ascend/driver/version.info"), re.MULTILINE)
    return match.group(1).strip() if match else None


def npu_firmware() -> str | None:
    """Return the version of the Ascend firmware, from where its installer writes it."""
    match = re.search(r"^Version=(.+)$", _read("/usr/local/Ascend/firmware/version.info"), re.MULTILINE)
    return match.group(1).strip() if match else None


@functools.cache
def cann_version() -> str | None:
    """Return the CANN version from its install information, or None where there is none."""
    homes = [os.environ.get(name, "") for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_NNAE_HOME")]
    # from CANN 8.5 on the first
    homes += ["/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/nnae/latest"]
    for home in filter(None, homes):
        places = [*sorted(Path(home).glob("*/ascend_*_install.info")), Path(home) / "version.cfg"]
        for folder in places:
            match = re.search(
                r"^version=(.+)$|^.*running_version=\[([^\]:]+:)?([\d.A-Za-z]+)", _read(folder), re.MULTILINE
            )
            if match:
                return (match.group(1) or match.group(3)).strip()
    return None
