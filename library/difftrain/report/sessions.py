"""The history of a run over restarts: sessions.json.

A run that is killed and goes on is one run with several sessions. Its end-to-end time is the sum over all of them,
work that was lost and done again included; of a session that was killed the time up to its last metric line is known.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from difftrain.io.files import write_text
from difftrain.io.process import is_gone, this_process
from difftrain.report.metrics import METRICS, number, read_lines

FILE = "sessions.json"
# the status of a run
RUNNING, STOPPED, FAILED, FINISHED, KILLED = "running", "stopped", "failed", "finished", "killed"
SILENT_S = 1800.0  # a session on another machine that has written nothing for so long is over
NO_END = "the process ended without recording why: it was killed, or its machine stopped"
_OWN = ("process",)  # of a session, for this program alone


class Sessions:
    """Record this session among those of its run; the process that writes reports owns the file."""

    def __init__(self, run_dir: Path, *, step: int, earlier_s: float = 0.0, **facts: Any) -> None:
        """Begin a session. Call it before metrics.jsonl is opened: what lies beyond the step is cut there.

        step: the last step that is done already. earlier_s: time of the sessions before, by the checkpoint, for a run
        that goes on in another folder. facts: what else is worth knowing (command, world_size, device).
        """
        self._path = run_dir / FILE
        stored = read_sessions(run_dir)
        self.run_id: str = stored.get("run_id") or uuid.uuid4().hex[:12]
        self.history: list[dict[str, Any]] = stored.get("sessions", [])

        # sessions before: those in another folder count as one, those without an end as killed
        if not self.history and step > 0:
            self.history.append(
                {"session": 0, "outcome": "in another folder", "steps_done": step, "elapsed_s": earlier_s}
            )
        self._settle_killed(run_dir)

        # this session is written at once, so that it is known even if it is killed
        self.number = 1 + max((s["session"] for s in self.history), default=0)
        self._this: dict[str, Any] = {
            "session": self.number,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "from_step": step,
            "steps_done": step,
            "elapsed_s": 0.0,
            "outcome": RUNNING,
            "process": this_process(),  # a page tells by it whether a session still runs
            **facts,
        }
        self.history.append(self._this)
        self._write()

    def _settle_killed(self, run_dir: Path) -> None:
        for session in self.history:
            if session["outcome"] == RUNNING:
                session |= as_killed(session, read_lines(run_dir / METRICS))

    @property
    def started(self) -> str:
        """Return when the run's first session in this folder began, as local time without separators."""
        times = [s["started"] for s in self.history if "started" in s]
        return "".join(c for c in times[0][:19] if c.isdigit())

    def note(self, step: int, elapsed_s: float, outcome: str = RUNNING, error: str = "") -> None:
        """Record how far this session is. outcome: running, finished, stopped (asked to), failed. error: why it failed."""
        self._this |= {"steps_done": step, "elapsed_s": elapsed_s, "outcome": outcome}
        self._this |= {"error": error} if error else {}
        self._write()

    @property
    def total_s(self) -> float:
        """Return the time of all sessions together."""
        return sum(session["elapsed_s"] for session in self.history)

    def _write(self) -> None:
        write_text(self._path, json.dumps({"run_id": self.run_id, "sessions": self.history}, indent=1) + "\n")


def read_sessions(run_dir: Path) -> dict[str, Any]:
    """Return what sessions.json holds; nothing where there is none or it cannot be read."""
    try:
        stored = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


# --- What a session says of the run, for people


def status_of(sessions: list[dict[str, Any]], silent_s: float = 0.0) -> tuple[str, str]:
    """Return the status of a run and its last error, "" where there is none.

    status: running, stopped, failed, finished or killed; "unknown" where no session says it. A session without an end
    whose process has ended was killed. silent_s: for how long nothing has been written, which decides where the process is
    on another machine.
    """
    last = sessions[-1] if sessions else {}
    outcome, error = last.get("outcome"), str(last.get("error") or "")
    if outcome in (STOPPED, FAILED, FINISHED):
        return str(outcome), error
    if outcome == RUNNING:
        gone = is_gone(str(last.get("process") or ""))
        return (KILLED, NO_END) if gone or (gone is None and silent_s > SILENT_S) else (RUNNING, "")
    return (KILLED, NO_END) if outcome == KILLED else ("unknown", error)


def as_killed(session: dict[str, Any], lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a session that has no end as one that was killed: it came as far as its last line of metrics.jsonl."""
    own = [line for line in lines if line.get("session") == session.get("session")]
    steps = [number(value) or 0.0 for value in (session.get("steps_done"), *(line.get("step") for line in own))]
    times = [number(value) or 0.0 for value in (session.get("elapsed_s"), *(line.get("elapsed_s") for line in own))]
    return {**session, "outcome": KILLED, "steps_done": int(max(steps)), "elapsed_s": max(times)}


def history(sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return sessions as a report shows them."""
    return [{key: value for key, value in session.items() if key not in _OWN} for session in sessions]
