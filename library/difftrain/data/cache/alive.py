"""Whether the process that wrote something is still there: known on its own machine, unknown elsewhere.

Clocks and process numbers of other machines prove nothing, so they are not asked: a process is named by its machine since
its last start, its number there, and the tick at which it began.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_START = 19  # of the fields behind the name of a program in /proc/PID/stat


def this_process() -> str:
    """Return the name of this process; empty where the system does not tell enough."""
    began = _began(os.getpid())
    return f"{_machine()}:{os.getpid()}:{began}" if _machine() and began else ""


def is_gone(name: str) -> bool | None:
    """Tell whether a process has ended; None where that cannot be known from here."""
    machine, _, rest = name.partition(":")
    number, _, began = rest.partition(":")
    if not _machine() or machine != _machine() or not number.isdecimal():
        return None
    return _began(int(number)) != began


@cache
def _machine() -> str:
    """Name this machine since its start, as this process sees its processes; empty where that cannot be told."""
    try:
        facts = [(_PROC / "sys/kernel/random/boot_id").read_text(), str((_PROC / "self/ns/pid").stat().st_ino)]
    except OSError:
        return ""
    return hashlib.blake2b("\n".join([platform.node(), *facts]).encode(), digest_size=8).hexdigest()


def _began(number: int) -> str:
    """Return the tick at which a process began; empty where there is none, or what is left of it only waits."""
    try:
        words = (_PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[:1] == ["Z"] else words[_START]
