"""Which process of which machine: more than its number, which is used again; and the one that starts ranks anew."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # torchrun gives it to each rank, and so does accelerate's launcher
_STATE, _PARENT, _START = 0, 1, 19  # fields of /proc/PID/stat behind the name


def boot_id() -> str:
    """Name this boot and this pid namespace; the host name alone where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def start_of(pid: int) -> str:
    """Return the process's start time in ticks after boot, or "" where there is no /proc or no such process."""
    fields = _stat(pid)  # a zombie counts as gone
    return "" if not fields or fields[_STATE] in "ZX" else fields[_START]


def launcher() -> str:
    """Name the torchrun that started this rank, by a hash; "" where there is none.

    Ranks that it starts anew after a failure find the same name, those of a later command another one.
    """
    if _OF_TORCHRUN not in os.environ:
        return ""
    pid = os.getppid()
    while (above := _above(pid)) is not None:
        pid = above
    return hashlib.blake2b(f"{boot_id()} {pid} {start_of(pid)}".encode(), digest_size=8).hexdigest()


def _above(pid: int) -> int | None:
    """Return the parent of a process that torchrun started itself: a script between it and a rank."""
    try:
        given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    fields = _stat(pid)
    return int(fields[_PARENT]) if fields and any(each.startswith(_OF_TORCHRUN.encode()) for each in given) else None


def _stat(pid: int) -> list[str]:
    try:
        # the second field is the command in brackets and may hold anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
