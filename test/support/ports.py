"""Which addresses a process listens at."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

LISTEN = "0A"  # /proc/net/tcp's word for it


def listens_at(*pids: int) -> list[str]:
    """Return the addresses at which processes accept TCP connections, as the kernel has them."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(entry.readlink())
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and words[9] in inodes:
                found.append(_address(words[1].partition(":")[0]))
    return found


def _address(text: str) -> str:
    words = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
