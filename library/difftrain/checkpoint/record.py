"""run.json: which run a folder belongs to, and what may be done with a folder that is not empty."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from difftrain.checkpoint.find import DIFFUSERS, PIPELINE_INDEX, Log, Naming, named, newest, parse, parse_export
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.io.files import read_regular, write_json

RUN_FILE = "run.json"
_OF_A_RUN = ("metrics.jsonl", "report.json", "report.html")


def now() -> str:
    """Return the time as run.json spells it: UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class RunRecord:
    """One run, from its first start over every resume to its end. Written by the holder of the folder's claim."""

    config_digest: str
    seed: int
    output_name: str
    total_steps: int
    started: str = field(default_factory=now)
    sessions: tuple[dict[str, Any], ...] = ()  # one a start: {"at", "from_step", "world_size", "launch"}
    finished_step: int | None = None  # None: not finished
    finished: str = ""
    identity: dict[str, Any] = field(default_factory=dict)  # what config_digest hashes, to name differences
    hub: dict[str, str] = field(
        default_factory=dict
    )  # commits of what was fetched: a run that goes on takes them again
    naming: str = "kohya"  # or steps, diffusers, of --save.naming
    format: int = 1

    @property
    def names(self) -> Naming:
        """Return how the saves of this run are called."""
        return named(self.naming, self.output_name)

    def begun(self, from_step: int, world_size: int, launch: Sequence[str] = ()) -> RunRecord:
        """Return the record with one more session; a run that goes on is not finished. launch: what started it."""
        session = {"at": now(), "from_step": from_step, "world_size": world_size, "launch": list(launch)}
        return replace(self, sessions=(*self.sessions, session), finished_step=None, finished="")

    def ended(self, step: int) -> RunRecord:
        """Return the record of the finished run."""
        return replace(self, finished_step=step, finished=now())

    def write(self, output_dir: Path) -> None:
        """Replace run.json in one piece."""
        write_json(output_dir / RUN_FILE, asdict(self))

    @classmethod
    def read(cls, output_dir: Path) -> RunRecord | None:
        """Return a folder's record, or None where there is none. Raises ConfigFault where it cannot be read."""
        path = output_dir / RUN_FILE
        try:
            content = json.loads(read_regular(path, 1 << 28))
            known = {field.name for field in fields(cls)}
            record = cls(**{key: value for key, value in content.items() if key in known})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            what = f"{path} cannot be read: {error}"
            raise ConfigFault(
                [Fault(option("save.output_dir"), what, "move the folder away, or repair that file")]
            ) from None
        return replace(record, sessions=tuple(record.sessions))


@dataclass(frozen=True)
class Empty:
    """Nothing of a run is here; other files may be."""


@dataclass(frozen=True)
class Foreign:
    """There is no run.json, but there are files that a run of this name would overwrite, checkpoints perhaps."""

    files: tuple[str, ...]
    newest: Path | None = None


@dataclass(frozen=True)
class Unfinished:
    """A run that has not reached its last step. newest: its newest whole checkpoint."""

    record: RunRecord
    newest: Path | None


@dataclass(frozen=True)
class Finished:
    """A run that is done."""

    record: RunRecord
    newest: Path | None


State = Empty | Foreign | Unfinished | Finished


def inspect(output_dir: Path, output_name: Naming, log: Log | None = None, *, deep: bool = True) -> State:
    """Say what an output folder holds. deep: its newest checkpoint is read to the last byte."""
    record = RunRecord.read(output_dir) if output_dir.is_dir() else None
    if record is None:
        files = tuple(_files_of_a_run(output_dir, output_name))
        return Foreign(files, newest(output_dir, output_name, log, deep=deep)) if files else Empty()
    checkpoint = newest(output_dir, record.names, log, deep=deep)
    return Unfinished(record, checkpoint) if record.finished_step is None else Finished(record, checkpoint)


def _files_of_a_run(output_dir: Path, output_name: Naming) -> list[str]:
    def is_one(path: Path) -> bool:
        if output_name is DIFFUSERS and path.name == PIPELINE_INDEX:
            return True
        if path.name in _OF_A_RUN or parse(path.name, output_name, state=True):
            return True
        # a file without a suffix stands where an export as a folder would go
        return bool(parse_export(path, output_name) or parse(path.name, output_name))

    return sorted(path.name for path in output_dir.iterdir() if is_one(path)) if output_dir.is_dir() else []


def choose_start(state: State, resume: str | None, config_digest: str, output_dir: Path) -> Path | None:
    """Return the checkpoint to continue from, or None to start afresh. Raises ConfigFault where neither is right.

    resume: the flag: None, "auto", or a folder, which open_given() has found to be whole.
    """
    path = Path(resume) if resume and resume != "auto" else None
    if isinstance(state, Empty):
        return path
    if path is not None and path.resolve().parent == output_dir.resolve():
        return path  # one of this folder's own, older than the newest perhaps
    if isinstance(state, Foreign):
        if resume == "auto" and state.newest is not None:
            return state.newest
        raise ConfigFault([_foreign(state, output_dir)])
    if resume != "auto":
        raise ConfigFault([_another_run(state, output_dir, state.record.config_digest == config_digest)])
    if state.newest is not None:
        return state.newest
    if state.record.config_digest == config_digest or not any(_files_of_a_run(output_dir, state.record.names)):
        return None  # nothing to continue from; the same configuration writes the same files again
    what = f"{output_dir} holds a run of another configuration that left no checkpoint to continue from"
    raise ConfigFault([Fault(option("save.output_dir"), what, "give another folder, or move this one away")])


def _foreign(state: Foreign, output_dir: Path) -> Fault:
    more = f" and {len(state.files) - 3} more" if len(state.files) > 3 else ""
    what = f"{output_dir} holds files that this run would overwrite: {', '.join(state.files[:3])}{more}"
    return Fault(
        option("save.output_dir"),
        what,
        f"give another {option('save.output_dir')} or {option('save.output_name')}, or move them away",
    )


def _another_run(state: Unfinished | Finished, output_dir: Path, is_same: bool) -> Fault:
    """Say whose the folder is, and what would work. is_same: the run there is of this configuration."""
    if isinstance(state, Finished):
        what = f"finished at step {state.record.finished_step} on {state.record.finished}"
    elif state.newest is not None:
        what = f"started {state.record.started}, its newest checkpoint is {state.newest.name}"
    else:
        what = f"started {state.record.started}, without a checkpoint yet"
    # only what would not be refused in its turn
    remedy = "give another folder"
    if is_same and isinstance(state, Unfinished):
        remedy = f"{option('save.resume', 'auto')} continues it; or {remedy}"
    elif state.newest is not None:
        remedy += f", where {option('save.resume', str(state.newest))} continues from there"
    return Fault(option("save.output_dir"), f"{output_dir} holds another run ({what})", remedy)
