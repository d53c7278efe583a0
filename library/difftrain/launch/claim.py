"""One builder at a time for a folder that several machines may share, and none that a killed one left half-made.

Standard library only. The claim is a folder beside the built one, made by mkdir, which is atomic on network file systems
too, and removed last: while it is there, what it stands for is unfinished. Its owner writes a counter into it. Clocks of
other machines are never compared: an owner is dead where its process is seen to be gone, or its counter stands still.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BEAT_S = 5.0
SILENT_S = 120.0  # network file systems may show a file a minute late
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _here() -> str:
    """Name what a process id is unique in: containers may share a host name."""
    marks = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        marks.append(str(Path("/proc/self/ns/pid").readlink()))
    return "/".join(marks)


def end_with_parent() -> None:
    """Be killed when the parent is (for preexec_fn): what builds must not outlive its claim's owner."""
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class FolderClaim:
    """The right to build, taken by `turn`. left_behind: a builder before this one did not come to its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left_behind = False
        self._mark = f"{uuid.uuid4().hex} {os.getpid()} {_here()}"
        self._end = threading.Event()

    def owner(self) -> list[str]:
        """Return token, process and place of the owner; empty texts where none has signed."""
        return [*_read(self.folder / "owner").split(" ", 2), "", "", ""][:3]

    def take(self) -> bool:
        """Take the claim where nobody has it."""
        try:
            self.folder.mkdir()
        except FileExistsError:
            return False
        self._sign()
        return True

    def take_over(self, token: str) -> bool:
        """Take the claim of an owner that is dead. Of several who try, one succeeds."""
        try:
            (self.folder / f"after-{token}").mkdir()
        except (FileExistsError, FileNotFoundError):
            return False
        if self.owner()[0] != token:  # somebody was faster
            return False
        self.left_behind = True
        self._sign()
        return True

    def is_dead(self) -> bool:
        """Say whether the owner's process was on this machine and is gone."""
        _, pid, host = self.owner()
        if host != _here():
            return False
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def beat(self) -> str:
        """Return what changes while the owner lives."""
        return " ".join(self.owner()) + _read(self.folder / f"beat-{self.owner()[0]}")

    def _sign(self) -> None:
        aside = self.folder / f"owner.{os.getpid()}.{uuid.uuid4().hex}"
        aside.write_text(self._mark, encoding="utf-8")
        aside.replace(self.folder / "owner")
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        count = 0
        while not self._end.wait(BEAT_S):
            count += 1
            try:
                (self.folder / f"beat-{self._mark.split()[0]}").write_text(str(count))
            except OSError:  # a full disk: the build itself says so
                continue

    def release(self) -> None:
        """Give the claim up: what it stands for is whole."""
        self._end.set()
        if self.owner()[0] == self._mark.split()[0]:
            aside = self.folder.with_name(f"{self.folder.name}.{uuid.uuid4().hex}")
            self.folder.rename(aside)  # at once, so that nobody sees half of it
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def turn(folder: Path, log: Callable[[str], None], *, fails_whole: type[Exception]) -> Iterator[FolderClaim]:
    """Wait for the right to build, and hold it. A build that ends by any error but `fails_whole` counts as half-made."""
    claim = FolderClaim(folder)
    announced, seen, since = False, "", time.monotonic()
    while not claim.take():
        token, pid, host = claim.owner()
        if claim.beat() != seen:
            seen, since = claim.beat(), time.monotonic()
        if claim.is_dead() or time.monotonic() - since > SILENT_S:
            if claim.take_over(token):
                log(f"process {pid or '?'} on {host.split('/')[0] or '?'} did not finish: starting over")
                break
        elif not announced:
            announced = True
            log(
                f"waiting for process {pid or '?'} on {host.split('/')[0] or '?'}, which creates the environment "
                f"(if no such process exists, remove {folder})"
            )
        time.sleep(0.5)
    try:
        yield claim
    except fails_whole:
        claim.release()
        raise
    claim.release()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
