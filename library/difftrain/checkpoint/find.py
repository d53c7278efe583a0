"""Which checkpoint to continue from: the newest whole one. What a dead run left behind is cleaned up."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from difftrain.checkpoint.commit import MANIFEST, OLD, TRASH, WORK, Manifest, Torn, remove, verify
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.io.files import fsync_folder

if TYPE_CHECKING:
    from difftrain.config.schema.sections import SaveSection


Log = Callable[[str], None]
_LEFT_BEHIND = re.compile(rf"(?:{WORK}|{TRASH})[0-9a-f]{{32}}(?:{OLD})?")
# an export being written, file or folder, and the folder that a newer one of the same name pushed aside
_EXPORT_LEFT = re.compile(r"\.(?P<name>.*[^.].*)\.[0-9a-f]{8}\.(?P<kind>tmp|old)")


class Candidate(NamedTuple):
    """A checkpoint folder and its manifest."""

    path: Path
    manifest: Manifest


def candidates(parent: Path, output_name: Naming | None = None, log: Log | None = None) -> list[Candidate]:
    """List the checkpoints of a folder by their manifests, the newest first; files are not looked at yet.

    output_name: only NAME-step…-state, NAME-00…-state and NAME-state, or STEPS: global_step…, DIFFUSERS: checkpoint-…;
    None: any folder with a manifest.
    log: is told of folders that are named like checkpoints and have no good manifest.
    """
    checkpoints = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        if not path.is_dir() or _LEFT_BEHIND.fullmatch(path.name):
            continue
        if output_name is None:
            if not (path / MANIFEST).is_file():
                continue
        elif parse(path.name, output_name, state=True) is None:
            continue
        try:
            checkpoints.append(Candidate(path, Manifest.read(path)))
        except Torn as torn:
            if log is not None:
                log(f"checkpoint {path.name} is skipped: {torn}")
    return sorted(
        checkpoints,
        key=lambda checkpoint: (checkpoint.manifest.step, checkpoint.manifest.created, checkpoint.path.name),
        reverse=True,
    )


def newest(
    parent: Path, output_name: Naming | None = None, log: Log | None = None, *, deep: bool = True
) -> Path | None:
    """Return the newest checkpoint that is whole, or None; torn ones are named and passed over.

    deep: whole to the last byte, else by the sizes of its files.
    """
    for path, _ in candidates(parent, output_name, log):
        fault = fault_of(path, deep=deep)
        if not fault:
            return path
        if log is not None:
            log(f"checkpoint {path.name} is skipped: {fault}")
    return None


def fault_of(path: Path, *, deep: bool = True) -> str:
    """Say why a folder is not a whole checkpoint, "" where it is one."""
    try:
        verify(path, deep=deep)
    except Torn as torn:
        return str(torn)
    return ""


def open_given(path: Path, flag: str = "", fault: Callable[[Path], str] = fault_of) -> Path:
    """Check the checkpoint folder that a user named. Raises ConfigFault that says what is wrong with it.

    flag: how it was named. fault: says why a folder is not a whole checkpoint.
    """
    if not path.is_dir():
        raise ConfigFault(
            [Fault(flag or option("save.resume"), f"{path} is not a folder", "give a folder ...-state, or auto")]
        )
    if not (path / MANIFEST).is_file():
        inside = candidates(path)
        remedy = f"the newest one in it is {inside[0].path.name}" if inside else "give a folder ...-state, or auto"
        raise ConfigFault(
            [Fault(flag or option("save.resume"), f"{path} is not a checkpoint: it has no {MANIFEST}", remedy)]
        )
    if problem := fault(path):
        siblings = [candidate.path.name for candidate in candidates(path.parent) if candidate.path.name != path.name]
        remedy = f"others in that folder: {', '.join(siblings[:3])}" if siblings else "there is no other in that folder"
        raise ConfigFault([Fault(flag or option("save.resume"), f"{path} is not complete: {problem}", remedy)])
    return path


def clean(parent: Path, log: Log | None = None) -> None:
    """Put away what a dead run left while saving or deleting. Only the holder of the folder's claim may call it.

    A checkpoint that was complete and lacked only its name gets it, and so does an export that a newer one pushed
    aside and did not replace; everything else aside is removed.
    """
    if not parent.is_dir():
        return
    checkpoints = [path for path in parent.iterdir() if path.is_dir() and _LEFT_BEHIND.fullmatch(path.name)]
    exports = [path for path in parent.iterdir() if _EXPORT_LEFT.fullmatch(path.name)]
    # A newer checkpoint of the same name comes before the one that it pushed aside.
    for path in [
        *sorted(checkpoints, key=lambda checkpoint: (checkpoint.name.endswith(OLD), checkpoint.name)),
        *sorted(exports),
    ]:
        try:
            message = _put_away(path) if path in checkpoints else _put_away_export(path)
        except FileNotFoundError:
            continue  # somebody else was quicker: all machines of a run may look after a disk that they share
        if log is not None:
            log(message)


def clean_exports(parent: Path, naming: Naming, log: Log | None = None) -> None:
    """Put away what a dead run left in folders of exports; those that are empty then go too. As `clean`."""
    if not isinstance(naming, Own) or not parent.is_dir():
        return
    for path in sorted(parent.iterdir()):
        if path.is_dir() and parse_export(path, naming) is not None:
            clean(path, log)
            with contextlib.suppress(OSError):  # it holds an export
                path.rmdir()


def _put_away(path: Path) -> str:
    manifest = _verified_manifest(path)
    if manifest is not None and not (path.parent / manifest.name).exists():
        path.rename(path.parent / manifest.name)
        fsync_folder(path.parent)
        return f"checkpoint {manifest.name} was complete except for its name, and is kept"
    remove(path)
    return f"{path.name}, left by a run that ended while it was saving, is removed"


def _put_away_export(path: Path) -> str:
    match = _EXPORT_LEFT.fullmatch(path.name)
    assert match is not None, path
    final = path.with_name(match["name"])
    if match["kind"] == "old" and not final.exists():
        path.rename(final)
        fsync_folder(path.parent)
        return f"export {final.name}, moved aside for one that was never finished, is restored"
    remove(path)
    return f"{path.name}, left by a run that ended while it was exporting, is removed"


def _verified_manifest(path: Path) -> Manifest | None:
    if path.name.startswith(TRASH):
        return None
    try:
        return verify(path)
    except Torn:
        return None


# --- Names of saves, in two ways
# kohya's begin with the run's output name: NAME-step00000004, NAME-000001, NAME; a checkpoint's folder ends in "-state".
# Those by step are the same in every run: exports are folders step4 and epoch1, checkpoints are folders global_step4, or
# checkpoint-4 where they are called as diffusers' examples do; there the last export is the run's folder itself.


class Own(Enum):
    """Stand for names that hold nothing of a run's own name."""

    STEPS = "steps"
    DIFFUSERS = "diffusers"


STEPS, DIFFUSERS = Own.STEPS, Own.DIFFUSERS
Naming = str | Own  # kohya's with this output name, or by step, as we or diffusers' examples call them
STATE = "-state"
GLOBAL_STEP, CHECKPOINT = "global_step", "checkpoint-"
PIPELINE_INDEX = "model_index.json"  # of the last export of diffusers' naming, which lies in the run's folder itself
ONE_FILE = "model"  # by step, a layout that is one file lies as this in the folder of its name
_AVERAGED = "-ema"  # the averaged weights of a save come and go with it
EXPORT_SUFFIXES = (".safetensors", ".ckpt")  # of files; the other layouts are folders and have none


def naming_of(save: SaveSection) -> Naming:
    """Return how saves are called."""
    return named(save.naming, save.output_name)


def named(naming: str, output_name: str) -> Naming:
    """Return the naming that a configuration or a record calls so."""
    return next((own for own in Own if own.value == naming), output_name)


@dataclass(frozen=True, order=True)
class SaveName:
    """Say which save a name stands for: kind "step", "epoch" or "end", and its number (0 for the end).

    By step no save is called the end, and the number of a checkpoint is its step whatever it was made for.
    """

    kind: str
    number: int = 0

    def of(self, output_name: Naming, *, state: bool = False) -> str:
        """Spell it."""
        if isinstance(output_name, Own):
            of_state = CHECKPOINT if output_name is DIFFUSERS else GLOBAL_STEP
            return f"{of_state if state else self.kind}{self.number}"
        middle = {"step": f"-step{self.number:08d}", "epoch": f"-{self.number:06d}", "end": ""}[self.kind]
        return f"{output_name}{middle}{STATE if state else ''}"


_NUMBERED = re.compile(r"-step(\d{8,})|-(\d{6,})")
_BY_STEP = re.compile(r"(step|epoch)(0|[1-9]\d*)")
_STATE_BY_STEP = {
    STEPS: re.compile(rf"{GLOBAL_STEP}(0|[1-9]\d*)"),
    DIFFUSERS: re.compile(rf"{CHECKPOINT}(0|[1-9]\d*)"),
}


def parse(name: str, output_name: Naming, *, state: bool = False) -> SaveName | None:
    """Read a name back, without its suffix; None where it is not a save of output_name."""
    if isinstance(output_name, Own):
        if state:
            by_step = _STATE_BY_STEP[output_name].fullmatch(name)
            return SaveName("step", int(by_step[1])) if by_step else None
        export = _BY_STEP.fullmatch(name)
        return SaveName(export[1], int(export[2])) if export else None
    if state:
        if not name.endswith(STATE):
            return None
        name = name[: -len(STATE)]
    if not name.startswith(output_name):
        return None
    remaining = name[len(output_name) :]
    if not remaining:
        return SaveName("end")
    match = _NUMBERED.fullmatch(remaining)
    if not match:
        return None
    step, epoch = match.groups()
    return SaveName("step", int(step)) if step else SaveName("epoch", int(epoch))


def parse_export(path: Path, output_name: Naming) -> SaveName | None:
    """Read the name of an export in any layout, averaged or not; None where the path is none of output_name's.

    Only the suffixes of layouts are taken off: what follows another dot belongs to the name.
    """
    name = path.name
    if not path.is_dir():
        if isinstance(output_name, Own):  # always a folder: a layout that is one file lies in it
            return None
        suffix = next((export_suffix for export_suffix in EXPORT_SUFFIXES if name.endswith(export_suffix)), None)
        if suffix is None:
            return None
        name = name.removesuffix(suffix)
    return parse(name, output_name) or parse(name.removesuffix(_AVERAGED), output_name)
