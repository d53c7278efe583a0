"""Runs below a folder: which there are, in what state, how far, and the files that may be shown.

All of it is read from files, while a run writes them: each may be missing, half written or damaged. A folder may hold
what somebody else has put there, so links are not followed, and only regular files are read, to a limit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftrain.io.process import boot_id, has_ended
from difftrain.report.metrics import METRICS
from difftrain.report.sessions import FILE as SESSIONS

RECORD, CLAIMS, CONFIG, SAMPLES = "run.json", ".claim", "config.toml", "sample"  # as checkpoint/ and train/ name them
REPORT, PAGE = "report.json", "report.html"
# action -> the file that train/triggers.py looks for; sample/ is the folder of a run's pictures, so that it has two names
CONTROLS = {"save": ("save",), "sample": ("sample", "sample_now"), "stop": ("save_quit",)}
DEPTH = 6  # folders below the one that is watched: a run of train.py is five below where it was begun
MOST_FOLDERS, MOST_RUNS = 5000, 200
TAIL_BYTES, DOCUMENT_BYTES, PICTURE_BYTES = 1 << 16, 16 << 20, 64 << 20
LOG_LINES = 200
RATE_LINES = 20  # of metrics.jsonl: the time left follows from their mean
SILENT_S = 60.0  # a claim of another machine that has no heartbeat for so long is dead: checkpoint/claim.py
PICTURE = re.compile(r"[^/\\\x00]+\.(png|jpg|jpeg|webp)", re.IGNORECASE)


@dataclass(frozen=True)
class RunStatus:
    """A run as its files tell of it now.

    name: its folder below the one that is watched, "." for that itself. state: running, finished, stopped, failed,
    killed or unknown. step_s, left_s: seconds. changed: time of the last metrics line, since the epoch; 0 without one.
    requested: control files that it has not seen yet.
    """

    name: str
    folder: Path
    state: str
    step: int = 0
    total_steps: int | None = None
    epoch: int | None = None
    loss: float | None = None
    fps: float | None = None
    step_s: float | None = None
    left_s: float | None = None
    skipped: int = 0
    changed: float = 0.0
    error: str = ""
    requested: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Return what people call the run: its folder below the one that is watched, or that one's own name."""
        return self.name if self.name != "." else self.folder.resolve().name or str(self.folder)

    @property
    def share(self) -> float | None:
        """Return how much of the run is done, 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None


# --- finding


def find_runs(root: Path) -> dict[str, Path]:
    """Return name -> folder of every run in a folder or below it, the one that was written last first."""
    known: dict[str, tuple[float, Path]] = {}
    for folder in _folders(root):
        times = [modified(folder / name) for name in (METRICS, SESSIONS, RECORD)]
        if newest := max(times):
            known[folder.relative_to(root).as_posix()] = newest, folder
    order = sorted(known, key=lambda name: (-known[name][0], name))
    return {name: known[name][1] for name in order}


def _folders(root: Path) -> Iterator[Path]:
    """Yield folders, those nearest to the root first; nothing below a run, and nothing through a link."""
    level = [root]
    count = 0
    for _ in range(DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            count += 1
            if count > MOST_FOLDERS:
                return
            yield folder
            if folder != root and any(modified(folder / name) for name in (METRICS, SESSIONS, RECORD)):
                continue
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                below += sorted(
                    Path(entry.path)
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                )
        level = below


def modified(path: Path) -> float:
    """Return when a regular file was written; 0 where there is none."""
    try:
        info = path.lstat()
    except (OSError, ValueError):
        return 0.0
    return info.st_mtime if stat.S_ISREG(info.st_mode) else 0.0


# --- reading, to a limit and through no link


def read_end(path: Path, limit: int = TAIL_BYTES) -> bytes:
    """Return the last bytes of a regular file; nothing where it is a link, something else, or cannot be read."""
    try:
        # a pipe that somebody named so would be waited for
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return b""
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            return b""
        try:
            file.seek(max(0, info.st_size - limit))
            return file.read(limit)
        except OSError:
            return b""


def read_table(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty where there is none."""
    try:
        content = json.loads(read_end(path, DOCUMENT_BYTES))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def last_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of the last lines of metrics.jsonl; torn and damaged ones are left out."""
    records = []
    for raw in read_end(folder / METRICS).splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(raw)
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append(record)
    return records


# --- state and progress


def status_of(name: str, folder: Path) -> RunStatus:
    """Read the state of a run."""
    record, report = read_table(folder / RECORD), read_table(folder / REPORT)
    listed = read_table(folder / SESSIONS).get("sessions")
    session = listed[-1] if isinstance(listed, list) and listed and isinstance(listed[-1], dict) else {}
    lines = last_lines(folder)
    last = lines[-1] if lines else {}

    # how far, and how long it will take
    step = max(int(last.get("step", 0)), _count(session.get("steps_done")))
    total = _count(record.get("total_steps")) or _count(report.get("planned_steps")) or None
    state = _state(folder, session, record)
    took = [took for line in lines[-RATE_LINES:] if (took := _number(line.get("step_s"))) is not None and took > 0]
    step_s = sum(took) / len(took) if took else None
    left_s = (total - step) * step_s if total and step_s and state == "running" else None

    error = session.get("last_error") or session.get("error") or report.get("last_error") or ""
    return RunStatus(
        name=name,
        folder=folder,
        state=state,
        step=step,
        total_steps=total,
        epoch=_count(last.get("epoch")) or None,
        loss=_number(last.get("step_loss")),
        fps=_number(last.get("fps")),
        step_s=step_s,
        left_s=left_s,
        skipped=_count(last.get("skipped")),
        changed=modified(folder / METRICS),
        error=str(error) if state in ("failed", "killed", "stopped") else "",
        requested=tuple(action for action, files in CONTROLS.items() if any(modified(folder / file) for file in files)),
    )


def _state(folder: Path, session: dict[str, Any], record: dict[str, Any]) -> str:
    """Return the outcome of the last session; one without an end is running as long as its process is."""
    outcome = session.get("outcome")
    if outcome == "running":
        return "running" if _is_alive(folder) else "killed"
    if outcome in ("finished", "stopped", "failed", "killed"):
        return str(outcome)
    if record.get("finished_step") is not None:
        return "finished"
    return "running" if _is_alive(folder) else "unknown"


def _is_alive(folder: Path) -> bool:
    """Tell whether a process holds the folder: one of this machine by its number, else by its heartbeat."""
    claims = folder / CLAIMS
    numbers: list[str] = []
    if claims.is_symlink():
        return False
    with contextlib.suppress(OSError):
        numbers = sorted(path.name for path in claims.iterdir() if re.fullmatch(r"\d+\.json", path.name))
    if not numbers:
        return False
    path = claims / numbers[-1]
    holder = read_table(path)
    pid, begun = holder.get("pid"), holder.get("pid_start")
    if holder.get("released"):
        return False
    if holder.get("boot") == boot_id() and type(pid) is int and pid > 0 and isinstance(begun, str):
        return not has_ended(pid, begun)
    return time.time() - modified(path) < SILENT_S


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


# --- what is shown beside


def log_end(folder: Path) -> tuple[str, str]:
    """Return the name of a run's log and its last lines: of the *.log that was written last, but for CaseName.log."""
    case = f"{read_table(folder / REPORT).get('case_name')}.log"
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        logs = [Path(entry.path) for entry in entries if entry.name.endswith(".log") and entry.name != case]
        if logs:
            newest = max(logs, key=modified)
            lines = read_end(newest).decode("utf-8", "replace").splitlines()
            return newest.name, "\n".join(lines[-LOG_LINES:])
    return "", ""


def newest_samples(folder: Path, most: int = 4) -> list[str]:
    """Return the names of the sample pictures that were written last, the newest first."""
    samples = folder / SAMPLES
    if samples.is_symlink():
        return []
    with contextlib.suppress(OSError), os.scandir(samples) as entries:
        names = {entry.name: modified(Path(entry.path)) for entry in entries if PICTURE.fullmatch(entry.name)}
        return sorted((name for name in names if names[name]), key=lambda name: (-names[name], name))[:most]
    return []


def sample_picture(folder: Path, name: str) -> bytes:
    """Return the file of a sample; nothing where the run has none of that name."""
    samples = folder / SAMPLES
    is_one = PICTURE.fullmatch(name) and not name.startswith(".") and not samples.is_symlink()
    raw = read_end(samples / name, PICTURE_BYTES) if is_one else b""
    signatures = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")
    return raw if raw.startswith(signatures) else b""


def control_file(folder: Path, action: str) -> Path:
    """Return the file that asks for an action: the first of its names that is no folder here."""
    paths = [folder / name for name in CONTROLS[action]]
    return next((path for path in paths if not path.is_dir()), paths[-1])


def ask(folder: Path, action: str) -> None:
    """Leave the control file of an action for the run to see. Raises OSError; that it is there already is none."""
    with contextlib.suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(control_file(folder, action), flags, 0o644))
