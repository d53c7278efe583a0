"""Which process of which machine, and whether it still lives: known on its own machine, unknown elsewhere.

Clocks and process numbers of other machines prove nothing, so they are not asked: a process is named by its machine since
its last start, its number there, and the tick at which it began.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from functools import cache
from pathlib import Path

_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # torchrun gives it to each rank, and so does accelerate's launcher
_STATE, _PARENT, _START = 0, 1, 19  # of the fields behind the name of a program in /proc/PID/stat
_BOOT_ID, _PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def boot_id() -> str:
    """Name this boot and this pid namespace; the host name alone where there is no /proc."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {_PID_NAMESPACE.readlink()}"
    except OSError:
        return socket.gethostname()


def start_of(pid: int) -> str:
    """Return the process's start time in ticks after boot, or "" where there is no /proc or no such process."""
    fields = _stat(pid)  # a zombie counts as gone
    return "" if not fields or fields[_STATE] in "ZX" else fields[_START]


def has_ended(pid: int, start: str) -> bool:
    """Tell whether a process of this machine has ended. start: its start time; "" where that is not known."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return bool(start) and start_of(pid) != start


# ---------------------------------------------------------------------- one name for a process, for files


def this_process() -> str:
    """Return the name of this process; empty where the system does not tell enough."""
    start = start_of(os.getpid())
    return f"{_machine()}:{os.getpid()}:{start}" if _machine() and start else ""


def is_gone(name: str) -> bool | None:
    """Tell whether a process has ended; None where that cannot be known from here."""
    machine, _, remaining = name.partition(":")
    number, _, start = remaining.partition(":")
    if not _machine() or machine != _machine() or not number.isdecimal():
        return None
    return has_ended(int(number), start)


@cache
def _machine() -> str:
    """Name this machine since its start, as this process sees its processes; empty where that cannot be told."""
    try:
        facts = [_BOOT_ID.read_text(), str(_PID_NAMESPACE.stat().st_ino)]
    except OSError:
        return ""
    return hashlib.blake2b("\n".join([platform.node(), *facts]).encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------------- the launcher


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
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    fields = _stat(pid)
    started = any(variable.startswith(_OF_TORCHRUN.encode()) for variable in variables)
    return int(fields[_PARENT]) if fields and started else None


def _stat(pid: int) -> list[str]:
    try:
        # the second field is the command in brackets and may hold anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
