"""A folder for every run: OUTPUT_DIR/YYYYmmdd_HH-MM-SS/, which of them a resume goes on in, and what one launch has done."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from difftrain import checkpoint
from difftrain.checkpoint import STEPS, RunRecord
from difftrain.checkpoint.claim import FOLDER as CLAIM
from difftrain.checkpoint.commit import MANIFEST
from difftrain.checkpoint.find import Candidate, candidates
from difftrain.config import TrainConfig
from difftrain.config.digest import digest
from difftrain.config.schema.sections import SaveSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.distributed.collective import on_each_machine
from difftrain.distributed.ranks import Ranks
from difftrain.io.process import launcher
from difftrain.train.shared_checkpoint import Ask, with_all

Torchruns = tuple[str, ...]  # the names of those of one launch: after a failure some may be others


def launch_of(ranks: Ranks) -> Torchruns:
    """Return the launch that these ranks are of. Every rank calls it."""
    return tuple(sorted({launch_id for launch_id in ranks.gather(launcher()) if launch_id}))


def wrote(meta: Mapping[str, Any], launch: Torchruns) -> bool:
    """Tell whether a checkpoint is of this launch, by what it says of itself."""
    return not set(launch).isdisjoint(meta.get("launch", ()))


def began_last(folder: Path, launch: Torchruns) -> bool:
    """Tell whether the last session of a run was of this launch."""
    try:
        record = RunRecord.read(folder)
    except ConfigFault:  # another run's, which nobody has asked for
        return False
    return record is not None and bool(record.sessions) and wrote(record.sessions[-1], launch)


log = logging.getLogger("difftrain")
FORM = "%Y%m%d_%H-%M-%S"
_NAME = re.compile(r"\d{8}_\d\d-\d\d-\d\d")
AUTO, LATEST = "auto", "latest"
RESETS = ("reset_dataloader", "reset_optimizer", "reset_optimizer_params")
MOST_LISTED = 8


@dataclass(frozen=True)
class _Choice:
    """Say where a run goes. name: its folder below OUTPUT_DIR. made: it is new; nameless until it is made.

    resume: what it goes on from, for --resume.
    """

    name: str
    made: bool
    resume: str | None = None
    step: int | None = None  # of a checkpoint of that folder


def resume_option(save: SaveSection) -> str:
    """Return the flag that names a checkpoint, as the door that was used spells it."""
    return "--resume_from_checkpoint" if save.run_dirs else option("save.resume")


def how_to_go_on(save: SaveSection) -> str:
    """Say how a run that was stopped goes on."""
    flag = "--resume_from_checkpoint" if save.run_dirs else option("save.resume", "auto")
    return f"the same command with {flag} continues"


def how_to_train_longer(cfg: TrainConfig, checkpoint: Path) -> str:
    """Say how a run that has done all its steps goes on."""
    length = option("training.max_steps" if cfg.training.max_epochs is None else "training.max_epochs")
    return f"to train longer: the same command with a larger {length} and {resume_option(cfg.save)}={checkpoint}"


def resolve_run_directory(cfg: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Return cfg with the run's own folder for output_dir, and what it resumes from as a folder. Every rank calls it.

    A new folder is made; two runs that start at once get two. What is resumed is complete on every machine. Raises
    ConfigFault where what is to be resumed is not there.
    """
    if not cfg.save.run_dirs:
        return cfg
    base, launch = cfg.output_dir, launch_of(ranks)
    choice = with_all(base, ranks, lambda ask: _choose(cfg, base, ranks.size, ask, launch))
    out = base / choice.name
    if choice.made:
        on_each_machine(ranks, lambda: out.mkdir(parents=True, exist_ok=True))  # machines may have disks of their own
    here = choice.step is not None  # else it is a folder elsewhere, on a hub perhaps
    resume = str(out / _name(choice.step)) if here else choice.resume
    log.info("run directory %s%s", out, "" if choice.made else ", of the resumed run")
    save = cfg.save.model_copy(update={"output_dir": str(out), "resume": resume})
    hub = cfg.hub.model_copy(update={"resume": cfg.hub.resume and not here})
    return cfg.model_copy(update={"save": save, "hub": hub})


def as_submitted(cfg: TrainConfig) -> TrainConfig:
    """Return the configuration that begins another such run: without this one's folder, and what it went on from."""
    if not cfg.save.run_dirs:
        return cfg
    left = {"output_dir": str(cfg.output_dir.parent), "resume": None}
    resets = dict.fromkeys(RESETS, False)
    cache = cfg.cache.model_copy(update={"regenerate": False, "only": False})
    hub = cfg.hub.model_copy(update={"resume": False})
    return cfg.model_copy(update={"save": cfg.save.model_copy(update=left | resets), "cache": cache, "hub": hub})


@contextmanager
def run_directory(cfg: TrainConfig, ranks: Ranks) -> Iterator[TrainConfig]:
    """Resolve the run directory for as long as the run lasts; a folder in which nothing came about is taken away again."""
    here = resolve_run_directory(cfg, ranks)
    try:
        yield here
    finally:
        if here is not cfg and ranks.leads_node:
            _forget(here.output_dir)


def _forget(folder: Path) -> None:
    """Remove a folder that holds nothing but a released claim."""
    try:
        if {path.name for path in folder.iterdir()} <= {CLAIM}:
            for claim in (folder / CLAIM).glob("*"):
                claim.unlink()
            for empty in (folder / CLAIM, folder):
                if empty.is_dir():
                    empty.rmdir()
    except OSError:
        log.debug("%s stays", folder)


# ------------------------------------------------------------------------------------------------ choosing


def describe_run_directory(cfg: TrainConfig, ranks: int) -> str:
    """Say where a run would go; nothing is made. Raises ConfigFault as resolve_run_directory does."""
    if not cfg.save.run_dirs:
        return f"output folder: {cfg.output_dir}"
    choice = _look(cfg, cfg.output_dir, ranks, checkpoint.fault_of)
    where = f"a new one below {cfg.output_dir}" if choice.made else str(cfg.output_dir / choice.name)
    goes_on = choice.resume if choice.step is None else _name(choice.step)
    return f"run directory: {where}" + (f", continuing from {goes_on}" if goes_on else "")


def _choose(cfg: TrainConfig, base: Path, ranks: int, ask: Ask, launch: Torchruns) -> _Choice:
    choice = _of_launch(base, ask, launch) or _look(cfg, base, ranks, ask)
    return _made(base, choice) if choice.made else choice


def _of_launch(base: Path, ask: Ask, launch: Torchruns) -> _Choice | None:
    """Go on from what this launch has saved, whatever it was told to begin with: torchrun has started its ranks anew."""
    for folder in run_dirs(base) if launch else ():
        if not began_last(folder, launch):
            continue
        step = _newest_complete([entry for entry in checkpoints(folder) if wrote(entry.manifest.meta, launch)], ask)
        if step is None:
            continue
        log.info("torchrun has restarted this launch: it continues from its last save")
        return _Choice(folder.name, made=False, step=step)
    return None


def _look(cfg: TrainConfig, base: Path, ranks: int, ask: Ask) -> _Choice:
    resume = None if cfg.hub.resume else cfg.save.resume
    if resume is None:
        if cfg.save.resume is None and not cfg.sample.test_only:
            _name_unfinished(base, digest(cfg, cfg.replicas(ranks)), ask)
        return _new(cfg.save.resume)
    if resume == AUTO:
        choice = _of_auto(base, digest(cfg, cfg.replicas(ranks)), ask)
    elif resume == LATEST:
        choice = _latest(base, ask)
    elif resume.isdecimal():
        choice = _of_step(base, int(resume), ask)
    else:
        choice = _of_folder(base, resume, ask)
    if not cfg.sample.test_only or choice.made:
        return choice
    # one look at a checkpoint is no part of the run that it is of
    state = base / choice.name / _name(choice.step) if choice.step is not None else None
    return _new(str(state) if state else None)


def _name_unfinished(base: Path, ours: str, ask: Ask) -> None:
    """Say that a run of this very configuration could be resumed: a forgotten flag costs all that it has trained."""
    try:
        choice = _of_auto(base, ours, ask)
    except ConfigFault:  # another run's record, which nobody has asked for
        return
    if choice.step is not None:
        log.warning(
            "%s has the same configuration and is not finished: this starts a new run; --resume_from_checkpoint=%s "
            "continues it after step %d",
            base / choice.name,
            choice.name,
            choice.step,
        )


def _new(resume: str | None = None) -> _Choice:
    return _Choice("", made=True, resume=resume)


def _made(base: Path, choice: _Choice) -> _Choice:
    """Make a folder named by the time; whoever finds his second taken goes on to the next one that is free."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        at = datetime.now(UTC)
        while True:
            name = at.strftime(FORM)
            try:
                (base / name).mkdir()
                return replace(choice, name=name)
            except FileExistsError:
                at += timedelta(seconds=1)
    except OSError as error:
        what = f"{base}: {error.strerror or error}"
        raise ConfigFault([Fault("--output.output_dir", what, "give a folder to write to")]) from None


def run_dirs(base: Path) -> list[Path]:
    """List the folders of runs, the newest first."""
    if not base.is_dir():
        return []
    return sorted((path for path in base.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), reverse=True)


def checkpoints(folder: Path) -> list[Candidate]:
    """List a run's checkpoints, the newest first, without those of a branch that was left.

    Whoever goes back to an older step leaves what came after it: those files stay until they are made anew, but are
    not what the run goes on from.
    """
    record = RunRecord.read(folder)
    sessions = record.sessions if record is not None else ()
    usable = []
    for entry in candidates(folder, STEPS, log.warning):
        later = [session for session in sessions if session["at"] > entry.manifest.created]
        if all(entry.manifest.step <= int(session["from_step"]) for session in later):
            usable.append(entry)
    return usable


def _latest(base: Path, ask: Ask) -> _Choice:
    torn = False
    for folder in run_dirs(base):
        usable = checkpoints(folder)
        if (step := _newest_complete(usable, ask)) is not None:
            return _Choice(folder.name, made=False, step=step)
        torn = torn or bool(usable)
    if torn:
        what = f"no checkpoint of any run below {base} is complete"
        raise ConfigFault([_fault(what, "see the messages about each; leave it out to start a new run")])
    what = f"no run below {base} has a checkpoint to continue from"
    raise ConfigFault([_fault(what, "leave it out to start a new run")])


def _of_auto(base: Path, ours: str, ask: Ask) -> _Choice:
    """Go on in the newest run where it is this one and not finished; else begin anew."""
    for folder in run_dirs(base):
        record = RunRecord.read(folder)
        if record is None:  # it ended before there was anything to go on from
            continue
        if record.finished_step is not None or record.config_digest != ours:
            break
        step = _newest_complete(checkpoints(folder), ask)
        if step is None:  # the same configuration writes the same files again
            return _Choice(folder.name, made=False, resume=AUTO)
        return _Choice(folder.name, made=False, step=step)
    return _new()


def _of_step(base: Path, step: int, ask: Ask) -> _Choice:
    """Take the step of the newest run that has it whole."""
    known: dict[str, list[int]] = {}
    for folder in run_dirs(base):
        usable = candidates(folder, STEPS)
        known[folder.name] = sorted({entry.manifest.step for entry in usable})
        if _newest_complete([entry for entry in usable if entry.path.name == _name(step)], ask) is not None:
            return _Choice(folder.name, made=False, step=step)
    listed = [f"{name}: {_numbers(steps)}" for name, steps in known.items() if steps]
    what = f"no run below {base} has a complete checkpoint of step {step}"
    if any(step in steps for steps in known.values()):
        what += ": see the messages about it"
    remedy = f"there are {'; '.join(listed[:MOST_LISTED])}" if listed else "there is none of any step; leave it out"
    raise ConfigFault([_fault(what, remedy)])


def _of_folder(base: Path, resume: str, ask: Ask) -> _Choice:
    """Go on in a run of OUTPUT_DIR; a checkpoint from elsewhere is where a new run begins."""
    folder = _existing_folder(base, resume)
    is_state = (folder / MANIFEST).is_file()
    if not is_state and not checkpoints(folder):
        inside = [run for run in run_dirs(folder) if checkpoints(run)]
        remedy = f"a run in it: {inside[0]}" if inside else "give a run directory or a folder global_stepN"
        raise ConfigFault([_fault(f"{resume!r} is not a checkpoint, and contains none", remedy)])
    if is_state:
        checkpoint.open_given(folder, _FLAG, ask)
        home, step = folder.parent, checkpoint.Manifest.read(folder).step
    else:
        home, newest = folder, _newest_complete(checkpoints(folder), ask)
        if newest is None:
            raise ConfigFault([_fault(f"no checkpoint of {resume!r} is complete", "see the messages about each")])
        step = newest
    ours = home.resolve().parent == base.resolve() and _NAME.fullmatch(home.name)
    if ours and (not is_state or folder.name == _name(step)):
        return _Choice(home.name, made=False, step=step)
    return _new(str(folder if is_state else home / _name(step)))


def _existing_folder(base: Path, resume: str) -> Path:
    """Find a folder against the working directory, then below OUTPUT_DIR, where a run's name alone is enough."""
    here = [path for path in dict.fromkeys((Path(resume), base / resume)) if path.is_dir()]
    if len(here) == 2 and not here[0].samefile(here[1]):
        raise ConfigFault([_fault(f"{resume!r} is {here[0].absolute()} and {here[1]}", "give the whole path")])
    if not here:
        runs = ", ".join(run.name for run in run_dirs(base)[:MOST_LISTED]) or "none"
        raise ConfigFault([_fault(f"no such folder: {resume!r}", f"runs below {base}: {runs}")])
    return here[0]


def _newest_complete(newest_first: list[Candidate], ask: Ask) -> int | None:
    for entry in newest_first:
        if not (fault := ask(entry.path)):
            return entry.manifest.step
        log.warning("checkpoint %s is skipped: %s", entry.path, fault)
    return None


def _name(step: int | None) -> str:
    assert step is not None
    return checkpoint.SaveName("step", step).of(STEPS, state=True)


def _numbers(steps: list[int]) -> str:
    more = f" and {len(steps) - MOST_LISTED} before" if len(steps) > MOST_LISTED else ""
    return ", ".join(map(str, steps[-MOST_LISTED:])) + more


_FLAG = "--resume_from_checkpoint"


def _fault(what: str, remedy: str) -> Fault:
    return Fault(_FLAG, what, remedy)
