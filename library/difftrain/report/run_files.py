"""One run as the files of its folder tell of it: finished, going on, stopped or killed, whole or damaged.

metrics.jsonl has the steps, report.json what only the end of a session knows, sessions.json the history, run.json and
config.toml what was asked for. Each may be missing or damaged; what was left out is said in a note.
"""

from __future__ import annotations

import itertools
import json
import math
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from difftrain.config.digest import identity
from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import DataFault
from difftrain.report.clock import Interval, warmup_steps
from difftrain.report.metrics import METRICS, is_step, number
from difftrain.report.report import REPORT
from difftrain.report.sessions import FILE as SESSIONS
from difftrain.report.sessions import KILLED, as_killed, status_of

RECORD, CONFIG, MANIFEST = "run.json", "config.toml", "manifest.json"  # as checkpoint/ and train/ name them
LONGEST_LINE = 1 << 20  # bytes; a line of metrics.jsonl has some hundred
MOST_NAMED = 5  # damaged lines

# what is laid side by side of two runs: key of report.json -> what it is called
FIGURES = {
    "fps": "FPS, data wait included",
    "compute_fps": "compute FPS",
    "ips": "IPS, images per second and device",
    "training_time_s": "seconds per step",
    "data_wait_s": "data wait per step, seconds",
    "mfu": "MFU",
    "matmul_utilisation": "matmul utilisation",
    "peak_memory_gib": "peak memory, GiB per device",
    "e2e_training_time_s": "seconds from end to end",
}


@dataclass(frozen=True)
class LoggedStep:
    """One line of metrics.jsonl. What is not there, or is no finite number, is NaN.

    fps, step_s, wait_s: of the steps since the line before.
    """

    step: int
    loss: float
    grad_norm: float = math.nan
    lr: float = math.nan
    fps: float = math.nan
    compute_fps: float = math.nan
    step_s: float = math.nan
    wait_s: float = math.nan
    memory_gib: float = math.nan
    samples_seen: int = -1
    epoch: int = -1
    session: int = 1
    skipped: int = 0
    elapsed_s: float = math.nan


@dataclass(frozen=True)
class RunFiles:
    """What the files of a run's folder hold.

    steps: by their number, in order. identity: what run.json says the run is, by "section.field"; nothing where that is
    not known. config: every field by "section.field"; unset ones are left out. notes: what is missing or damaged.
    """

    folder: Path
    steps: dict[int, LoggedStep]
    report: dict[str, Any] = field(default_factory=dict)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    run_id: str = ""
    notes: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        """Return the last step that has a line, or 0."""
        return max(self.steps, default=0)

    @property
    def is_report_current(self) -> bool:
        """Tell whether report.json is of the run as it is now, and not of an earlier session."""
        return bool(self.report) and self.report_step >= self.last_step

    @property
    def report_step(self) -> int:
        """Return the step that report.json is of, or 0."""
        return _integer(self.report.get("steps"))

    @property
    def state(self) -> str:
        """Return how the last session ended: finished, stopped, failed, killed; running where it goes on."""
        outcome = self.sessions[-1].get("outcome") if self.sessions else None
        if isinstance(outcome, str):
            return outcome
        return "finished" if self.report.get("finished") is True else "unknown"

    @property
    def status(self) -> tuple[str, str]:
        """Return running, stopped, failed, finished, killed or unknown, and the last error."""
        status, error = status_of(self.sessions, _silent_s(self.folder))
        return ("finished" if status == "unknown" and self.report.get("finished") is True else status), error

    @property
    def door(self) -> str:
        """Return which entry point the run came through, as spellings know it."""
        return "train" if self.config.get("save.run_dirs") is True else "kohya"

    @property
    def seed(self) -> Any:
        """Return the seed that the run has drawn with."""
        known = (self.record.get("seed"), self.config.get("training.seed"), self.report.get("seed"))
        return next((seed for seed in known if seed is not None), None)

    @property
    def global_batch(self) -> Any:
        """Return the images of a step; of several data sets with batches of their own, all of them."""
        known = (self.identity.get("global batch"), self._fact("global_batch"), self.report.get("global_batch"))
        batch = next((batch for batch in known if batch is not None), None)
        return batch[0] if isinstance(batch, list) and len(batch) == 1 else batch

    @property
    def world_size(self) -> int:
        """Return the number of cards of the last session, or 0."""
        return _integer(self._fact("world_size")) or _integer(self.report.get("world_size"))

    @property
    def fingerprint(self) -> str:
        """Return the hash of the data set's records, or nothing."""
        return str(self._fact("data_fingerprint") or _table(self.report.get("dataset")).get("fingerprint") or "")

    @cached_property
    def plan_digests(self) -> set[str]:
        """Return the hashes of which draws form which step: one, or more where the data changed between sessions."""
        known = {session["plan_digest"] for session in self.sessions if isinstance(session.get("plan_digest"), str)}
        if known:
            return known
        # runs of before sessions.json had it: the checkpoints say it
        digests = set()
        for path in self.folder.glob(f"*/{MANIFEST}"):
            digest = _table(_read_json(path)[0].get("meta")).get("plan_digest")
            digests |= {digest} if isinstance(digest, str) else set()
        return digests

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return what the run is, by "section.field": as run.json has it, else from its configuration."""
        known = _table(self.record.get("identity"))
        if known or not self.config:
            return known
        try:
            cfg = TrainConfig.model_validate(nested(self.config))
        except ValidationError:  # of another version, or damaged
            return {}
        return dict(json.loads(json.dumps(identity(cfg, self.world_size or 1))))

    @property
    def is_half(self) -> bool:
        """Tell whether it computes in bf16 or fp16; nobody knows: yes."""
        mixed = self.config.get("training.mixed_precision", self.report.get("precision"))
        return mixed != "no" or self.config.get("training.full_precision") is not None

    @property
    def precision(self) -> str:
        """Return what it computes in, for people."""
        mixed = self.config.get("training.mixed_precision", self.report.get("precision", "unknown"))
        full = self.config.get("training.full_precision")
        return f"all {full}" if full else "fp32" if mixed == "no" else str(mixed)

    @property
    def device_name(self) -> str:
        """Return what the card is called, for people."""
        device = _table(self.report.get("device"))
        return str(device.get("name") or device.get("kind") or self._fact("device") or "unknown device")

    def figures(self) -> dict[str, float | None]:
        """Return speeds and memory: of a report that is current, else from the lines of metrics.jsonl."""
        if self.is_report_current:
            return {key: number(self.report.get(key)) for key in FIGURES}
        span, cards = measured(self.steps, self.sessions), self.world_size
        memory = [line.memory_gib for line in self.steps.values() if math.isfinite(line.memory_gib)]
        spent = [number(session.get("elapsed_s")) or 0.0 for session in self.sessions if self.state != "running"]
        known: dict[str, float | None] = dict.fromkeys(FIGURES)
        if span.steps:
            known |= {"fps": span.fps, "compute_fps": span.compute_fps, "ips": span.fps / cards if cards else None}
            known |= {"training_time_s": span.step_s, "data_wait_s": span.step_wait_s}
        return known | {"peak_memory_gib": max(memory, default=None), "e2e_training_time_s": sum(spent) or None}

    def _fact(self, name: str) -> Any:
        return self.sessions[-1].get(name) if self.sessions else None


def measured(steps: dict[int, LoggedStep], sessions: list[dict[str, Any]]) -> Interval:
    """Sum up the time of the lines; those with steps of a session's warm-up only where there are no others."""
    begins = {_integer(session.get("session")): _integer(session.get("from_step")) for session in sessions}
    ends = {_integer(session.get("session")): _integer(session.get("steps_done")) for session in sessions}
    warm, steady = Interval(), Interval()
    for session, group in itertools.groupby(steps.values(), key=lambda line: line.session):
        lines, before = list(group), begins.get(session, 0)
        end = max(lines[-1].step, ends.get(session, 0))  # lines beyond a later session's beginning are cut
        warm_until = before + warmup_steps(end - before)
        # images up to where the session begins: known of the first, and where a line of that step is left
        seen = 0 if before == 0 else steps[before].samples_seen if before in steps else -1
        for line in lines:
            num_steps, images = line.step - before, line.samples_seen - seen
            if seen >= 0 and images > 0 and num_steps > 0 and line.step_s > 0:
                wait_s = num_steps * line.wait_s if line.wait_s > 0 else 0.0
                span = Interval(num_steps, images, 0.0, num_steps * line.step_s, wait_s)
                (warm if before < warm_until else steady).add(span)
            before, seen = line.step, line.samples_seen
    return steady if steady.steps else warm


# ---------------------------------------------------------------------- reading


def read_run(folder: Path, *, begun: bool = False) -> RunFiles:
    """Read a run's folder. begun: one that has only begun, without a step or a report, will do.

    Raises: DataFault where it is none, or holds neither a readable line of metrics.jsonl nor a report.
    """
    if not folder.is_dir():
        what = "is a file; give the folder of the run" if folder.exists() else "is not there"
        raise DataFault(f"{folder}: {what}")

    # --- each file by itself: what is wrong with one leaves the others
    steps, notes = read_steps(folder / METRICS)
    report, fault = _read_json(folder / REPORT)
    notes += [fault] if fault else []
    stored, fault = _read_json(folder / SESSIONS)
    notes += [fault] if fault else []
    record, fault = _read_json(folder / RECORD)
    notes += [fault] if fault else []
    listed = stored.get("sessions")
    sessions = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    if sessions and status_of(sessions, _silent_s(folder))[0] == KILLED:
        lines = ({"session": line.session, "step": line.step, "elapsed_s": line.elapsed_s} for line in steps.values())
        sessions[-1] = as_killed(sessions[-1], lines)  # it wrote no end: nobody did
    if not steps and not report and not (begun and (sessions or record)):
        raise DataFault(_no_run(folder, notes))

    config, more = _read_config(folder, report)
    run = RunFiles(
        folder, steps, report, sessions, record, config, str(stored.get("run_id") or ""), tuple([*notes, *more])
    )

    # --- what there is to know of the run as a whole
    remarks = []
    if run.state == "running":
        remarks.append(f"its last session is running; the last line is {_age(folder)} old")
    elif run.state == KILLED:
        remarks.append("its last session was killed")
    elif run.state != "finished":
        remarks.append(f"its last session {run.state}" if run.state != "unknown" else "how it ended is unknown")
    if run.report and not run.is_report_current:
        of = run.report.get("steps")
        remarks.append(f"{REPORT} is from step {of}, before the last line: speeds are those of {METRICS}")
    elif not run.report:
        remarks.append(f"it has no {REPORT}: speeds are those of {METRICS}; versions and machine are unknown")
    begins = [_integer(session.get("from_step")) for session in sessions if _integer(session.get("from_step"))]
    if begins:
        remarks.append(f"resumed at step {', '.join(map(str, begins))}")
    return RunFiles(folder, steps, report, sessions, record, config, run.run_id, (*run.notes, *remarks))


def read_steps(path: Path) -> tuple[dict[int, LoggedStep], list[str]]:
    """Read metrics.jsonl: the steps in order, of one that stands twice the later line, and what could not be read."""
    logged: dict[int, LoggedStep] = {}
    damaged: list[int] = []
    torn = False
    try:
        with path.open("rb") as file:
            for count, raw in enumerate(_lines(file), 1):
                line = _logged(raw)
                if line is not None:
                    logged[line.step] = line
                elif raw.endswith(b"\n"):
                    damaged.append(count)
                else:
                    torn = True
    except FileNotFoundError:
        return {}, [f"{path.name} is missing"]
    except OSError as error:
        return {}, [f"{path.name} cannot be read: {error.strerror}"]
    notes = [f"{path.name} has no lines yet"] if not logged and not damaged else []
    if torn:
        notes.append(f"the last line of {path.name} is incomplete and ignored")
    if damaged:
        named = ", ".join(map(str, damaged[:MOST_NAMED])) + (", ..." if len(damaged) > MOST_NAMED else "")
        notes.append(f"damaged lines of {path.name} are ignored, {len(damaged)}: {named}")
    return dict(sorted(logged.items())), notes


def _lines(file: Any) -> Iterator[bytes]:
    """Yield lines; of one that is longer than any of ours, pieces."""
    while raw := file.readline(LONGEST_LINE):
        yield raw


def _logged(raw: bytes) -> LoggedStep | None:
    """Read one line; nothing where it is no step with a loss, which may be no number."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not is_step(record):
        return None

    def get(name: str) -> float:
        value = number(record.get(name))
        return math.nan if value is None else value

    return LoggedStep(
        step=_integer(record["step"]),
        loss=get("step_loss"),
        grad_norm=get("grad_norm"),
        lr=get("lr"),
        fps=get("fps"),
        compute_fps=get("compute_fps"),
        step_s=get("step_s"),
        wait_s=get("data_wait_s"),
        memory_gib=get("peak_memory_gib"),
        samples_seen=_integer(record.get("samples_seen"), -1),
        epoch=_integer(record.get("epoch"), -1),
        session=_integer(record.get("session"), 1),
        skipped=_integer(record.get("skipped")),
        elapsed_s=get("elapsed_s"),
    )


def _read_json(path: Path) -> tuple[dict[str, Any], str]:
    """Return the object that a file holds, and what is wrong with it; of a file that is not there, nothing."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path.name} cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return {}, f"{path.name} is damaged: {error}"
    return (content, "") if isinstance(content, dict) else ({}, f"{path.name} is damaged: it contains no table")


def _read_config(folder: Path, report: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return every field that is set: of config.toml, which each session writes anew, else of report.json."""
    path, notes = folder / CONFIG, []
    try:
        return _flat(tomllib.loads(path.read_bytes().decode("utf-8"))), []
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{CONFIG} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        notes.append(f"{CONFIG} is damaged: {error}")
    return _flat(_table(report.get("config"))), notes


def _flat(tables: dict[str, Any]) -> dict[str, Any]:
    """Return values by "section.field", as JSON has them."""
    return {
        f"{section}.{key}": value
        for section, table in tables.items()
        if isinstance(table, dict)
        for key, value in table.items()
        if value is not None
    }


def nested(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return tables by section, of values by "section.field"."""
    tables: dict[str, dict[str, Any]] = {}
    for path, value in config.items():
        section, _, key = path.partition(".")
        tables.setdefault(section, {})[key] = value
    return tables


def _no_run(folder: Path, notes: list[str]) -> str:
    """Say why a folder tells nothing; of one that holds runs, which."""
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if inside:
        return f"{folder}: contains runs and is not one itself; give one of them: {', '.join(inside[-MOST_NAMED:])}"
    return f"{folder}: does not contain a run: {'; '.join(notes)}, and there is no {REPORT} that can be read"


def _age(folder: Path) -> str:
    """Return how long ago metrics.jsonl was written to, for people."""
    seconds = _silent_s(folder)
    if seconds == math.inf:
        return "unknown time"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _silent_s(folder: Path) -> float:
    """Return for how many seconds no line has been written; without a metrics.jsonl, for ever."""
    try:
        return max(time.time() - (folder / METRICS).stat().st_mtime, 0.0)
    except OSError:
        return math.inf


# ---------------------------------------------------------------------- values that somebody may have damaged


def _integer(value: Any, otherwise: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
