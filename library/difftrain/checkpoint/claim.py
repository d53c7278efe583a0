"""One run an output folder: a claim that the file server decides, and that a dead run cannot keep.

Claims are files `.claim/00000001.json`, `00000002.json`, …; the highest number holds. To take over a dead or released
claim n is to create n + 1 with O_EXCL, which exactly one starter can; the highest file is never deleted, so a starter
that was slow to decide finds a higher one and steps back. No lock is involved, and no clock of another machine is
trusted: a heartbeat's age is the difference of two times that the same file server gave.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, TrainingFault
from difftrain.io.files import write_json
from difftrain.io.process import boot_id, has_ended, start_of

if TYPE_CHECKING:
    from difftrain.checkpoint.find import Log
    from difftrain.distributed.ranks import Ranks

FOLDER = ".claim"
HEARTBEAT_S = 5.0
LAPSES_S = 60.0  # a claim of another machine without a heartbeat for so long is dead


@dataclass(frozen=True)
class Holder:
    """Say which process holds a folder."""

    run: str  # the same for all processes of one run
    host: str
    boot: str  # this boot of this machine, and the process namespace: a pid means nothing elsewhere
    pid: int
    pid_start: str  # a pid is used again, its start time is not
    started: str
    config_digest: str
    released: bool = False

    @classmethod
    def me(cls, run: str, config_digest: str) -> Holder:
        """Describe this process."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(run, socket.gethostname(), boot_id(), os.getpid(), start_of(os.getpid()), now, config_digest)

    def is_dead_here(self) -> bool | None:
        """Tell whether the process is gone; None where it is not of this machine and only its heartbeat can tell."""
        if self.released:
            return True
        if self.boot != boot_id():
            return None
        return has_ended(self.pid, self.pid_start)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


class Claim:
    """Hold an output folder until released, with a heartbeat that other machines can see."""

    def __init__(self, folder: Path, number: int, holder: Holder, owned: bool) -> None:
        self.owned = owned  # False: another process of the same run holds this folder
        self.holder = holder
        self._folder = folder
        self._number = number
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._lost = ""
        if owned:
            self._beat = threading.Thread(target=self._keep_beating, name="claim", daemon=True)
            self._beat.start()
            atexit.register(self.release)

    @classmethod
    def acquire(cls, output_dir: Path, config_digest: str = "", *, run: str = "", log: Log | None = None) -> Claim:
        """Take the folder, or raise ConfigFault that says who holds it.

        run: processes of one run on several machines give the same word; the one that finds its folder held by that
        run shares it. A claim of another machine is watched until it beats (then it is alive) or lapses: at most
        LAPSES_S.
        """
        folder = output_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        me = Holder.me(run or uuid.uuid4().hex, config_digest)
        while True:
            number = _highest(folder)
            holder = _read(folder, number) if number else None
            if holder is not None and holder.run == me.run and not holder.released:
                return cls(folder, number, me, owned=False)
            if number and not _may_be_taken(folder, number, holder):
                raise ConfigFault([_in_use(output_dir, holder or _read(folder, number))])
            if holder is not None and not holder.released and log is not None:
                log(f"taking over {output_dir}: {holder} used it and is gone")
            if _create(folder, number + 1, me):
                for lower in _numbers(folder):
                    if lower <= number:
                        _path(folder, lower).unlink(missing_ok=True)
                return cls(folder, number + 1, me, owned=True)
            time.sleep(0.1)  # lost a race; the listing of a network disk may take a moment to show to whom

    def check(self) -> None:
        """Raise TrainingFault where another run has taken the folder: this machine was out of sight for too long."""
        if self._lost:
            raise TrainingFault(self._lost)

    def release(self) -> None:
        """Let the folder go; the file stays, marked, so that numbers only ever grow."""
        if not self.owned or self._pid != os.getpid() or self._stop.is_set():
            return
        self._stop.set()
        atexit.unregister(self.release)
        self._beat.join(timeout=HEARTBEAT_S)
        with contextlib.suppress(OSError):  # the folder may have been moved away or deleted meanwhile
            if _highest(self._folder) == self._number:
                write_json(_path(self._folder, self._number), {**asdict(self.holder), "released": True})

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep_beating(self) -> None:
        path = _path(self._folder, self._number)
        while not self._stop.wait(HEARTBEAT_S):
            try:
                os.utime(path)
                highest = _highest(self._folder)
            except OSError:
                continue  # a network disk that is away for a while; if it was too long, a higher claim will tell
            if highest > self._number:
                with contextlib.suppress(OSError):
                    self._lost = f"this run lost its output folder to {_read(self._folder, highest)}"
                return


def claim_together(output_dir: Path, config_digest: str, ranks: Ranks, log: Log | None = None) -> Claim:
    """Claim the folder for all ranks, once a disk; every rank calls it, and all succeed or all raise."""
    run = ranks.broadcast(uuid.uuid4().hex)
    claim: Claim | None = None
    for turn in (True, False) if ranks.size > 1 else (True,):
        fault: ConfigFault | None = None
        if (ranks.rank == 0) == turn and ranks.local_rank == 0:
            try:
                claim = Claim.acquire(output_dir, config_digest, run=run, log=log)
            except ConfigFault as error:
                fault = error
            except OSError as error:
                fault = ConfigFault(
                    [Fault(option("save.output_dir"), f"{output_dir}: {error}", "give a folder to write to")]
                )
        faults = [problem for problem in ranks.gather(fault) if problem is not None]
        if faults:
            if claim is not None:
                claim.release()
            raise fault or ConfigFault(faults[0].faults)
    if claim is None:
        holder = Holder.me(run, config_digest)
        claim = Claim(output_dir / FOLDER, 0, holder, owned=False)
    return claim


def _may_be_taken(folder: Path, number: int, holder: Holder | None) -> bool:
    """Tell whether the highest claim is dead; wait for what only time can tell."""
    dead = holder.is_dead_here() if holder is not None else None
    if dead is not None:
        return dead
    path = _path(folder, number)
    first = _stamp(path)
    while True:
        if _highest(folder) != number:
            return True  # the caller looks again
        stamp = _stamp(path)
        if stamp != first:
            # a beat; a claim that was being written when first looked at may be of a process of this machine
            again = _read(folder, number)
            return bool(again is not None and again.is_dead_here())
        if _now(folder) - stamp > LAPSES_S * 1e9:
            return True
        time.sleep(min(1.0, HEARTBEAT_S / 5))


def _in_use(output_dir: Path, holder: Holder | None) -> Fault:
    who = str(holder) if holder is not None else "a process that is just starting"
    return Fault(
        option("save.output_dir"),
        f"{output_dir} is in use by another run: {who}",
        "give another folder, or end that run",
    )


def _create(folder: Path, number: int, me: Holder) -> bool:
    """Create a claim file; False where somebody else has that number, or already a higher one."""
    path = _path(folder, number)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(me), file)
        file.flush()
        os.fsync(file.fileno())
    if _highest(folder) > number:
        path.unlink(missing_ok=True)
        return False
    return True


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.json"


def _numbers(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdecimal()]


def _highest(folder: Path) -> int:
    return max(_numbers(folder), default=0)


def _read(folder: Path, number: int) -> Holder | None:
    """Read a claim; None where it is just being written, or was cut short."""
    try:
        content: dict[str, Any] = json.loads(_path(folder, number).read_text(encoding="utf-8"))
        return Holder(**content)
    except (OSError, ValueError, TypeError):
        return None


def _stamp(path: Path) -> int:
    """Return the time of the last heartbeat in ns; opening the file makes a network disk ask its server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _now(folder: Path) -> int:
    """Return the file server's time in ns."""
    probe = folder / f".{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime_ns
    finally:
        probe.unlink(missing_ok=True)
