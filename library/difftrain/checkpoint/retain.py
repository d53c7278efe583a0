"""How many saves are kept: kohya's --save_last_n_*, and never fewer than the last two good ones.

kohya's meaning: --save_last_n_steps=N keeps the step saves of the last N steps (a window, not a count);
--save_last_n_epochs=N keeps the last N epoch saves; the _state flags say the same of checkpoints, and where they are
absent the others hold for checkpoints too. The save at the end is never deleted.

Saves of steps beyond the present one belong to a branch that a resume from before them has left: they stay, and are
none of the last two.
"""

from __future__ import annotations

import json
import struct
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.checkpoint.commit import TRASH, Manifest, Torn, remove, verify
from difftrain.checkpoint.find import EXPORT_SUFFIXES, ONE_FILE, Log, Naming, Own, SaveName, parse, parse_export

if TYPE_CHECKING:
    from difftrain.config.schema.sections import SaveSection

ALWAYS_KEPT = 2
IsProtected = Callable[[Path], bool]  # says what must not be deleted now, whatever the flags say
_read_before: set[str] = set()  # digests of manifests whose files this process has read once


def nothing_in_use(_path: Path) -> bool:
    """Let everything go."""
    return False


@dataclass(frozen=True)
class Window:
    """Say how much is kept: step saves of the last n steps, the last n epoch saves, the last n; None keeps all."""

    last_n_steps: int | None = None
    last_n_epochs: int | None = None
    last_n: int | None = None

    @classmethod
    def of_exports(cls, save: SaveSection) -> Window:
        """Read the flags for exports."""
        return cls(save.last_n_steps, save.last_n_epochs)

    @classmethod
    def of_states(cls, save: SaveSection) -> Window:
        """Read the flags for checkpoints."""
        steps, epochs = save.last_n_steps_state or save.last_n_steps, save.last_n_epochs_state or save.last_n_epochs
        return cls(steps, epochs, save.last_n_states)

    def outside(self, saves: list[SaveName], step: int) -> set[SaveName]:
        """Return which saves may go after a save at `step`."""
        gone: set[SaveName] = set()
        if self.last_n_steps is not None:
            gone |= {save for save in saves if save.kind == "step" and save.number < step - self.last_n_steps}
        if self.last_n_epochs is not None:
            epochs = sorted(save for save in saves if save.kind == "epoch")
            gone |= set(epochs[: max(0, len(epochs) - self.last_n_epochs)])
        if self.last_n is not None:
            by_age = sorted(saves, key=lambda save: save.number)
            gone |= set(by_age[: max(0, len(by_age) - self.last_n)])
        return gone


def retain_states(
    parent: Path,
    output_name: Naming,
    save: SaveSection,
    step: int,
    log: Log | None = None,
    protected: IsProtected = nothing_in_use,
) -> list[str]:
    """Delete checkpoints that the flags no longer keep, after a save at `step`; return the names of the deleted.

    Called by the one process that holds the folder's claim. The newest is read again, to the last byte, before
    anything older is deleted.
    """
    saves: dict[SaveName, list[Path]] = {}
    for path in parent.iterdir():
        name = parse(path.name, output_name, state=True)
        if name is not None and path.is_dir() and not _is_beyond(name, step):
            saves.setdefault(_made_for(name, path, output_name), []).append(path)

    def age(name: SaveName) -> tuple[int, str]:
        manifest = _manifest(saves[name][0])
        return (manifest.step, manifest.created) if manifest else (-1, "")

    return _retain(saves, Window.of_states(save), step, age, lambda name: _whole_state(saves[name][0]), log, protected)


def retain_exports(
    parent: Path,
    output_name: Naming,
    save: SaveSection,
    step: int,
    log: Log | None = None,
    protected: IsProtected = nothing_in_use,
) -> list[str]:
    """Delete exports that the flags no longer keep, in any layout, after a save at `step`; return what went."""
    saves: dict[SaveName, list[Path]] = {}
    for path in parent.iterdir():
        name = parse_export(path, output_name)
        if name is not None and not _is_beyond(name, step):
            saves.setdefault(name, []).append(path)

    def age(name: SaveName) -> tuple[int, str]:
        return max(path.stat().st_mtime_ns for path in saves[name]), ""

    def is_whole(name: SaveName) -> bool:
        return all(export_is_whole(path) for path in saves[name])

    return _retain(saves, Window.of_exports(save), step, age, is_whole, log, protected)


def _is_beyond(name: SaveName, step: int) -> bool:
    return name.kind == "step" and name.number > step


def _retain(
    saves: dict[SaveName, list[Path]],
    window: Window,
    step: int,
    age: Callable[[SaveName], tuple[int, str]],
    is_whole: Callable[[SaveName], bool],
    log: Log | None,
    protected: IsProtected,
) -> list[str]:
    gone = window.outside(list(saves), step)
    if not gone:
        return []

    # the newest saves that are verified as complete stay, whatever the window says
    good: list[SaveName] = []
    for name in sorted(saves, key=age, reverse=True):
        if len(good) < ALWAYS_KEPT and is_whole(name):
            good.append(name)
    if not good or (len(good) < ALWAYS_KEPT and len(saves) > len(good)):
        if log is not None:
            log(f"nothing is deleted: of {len(saves)} saves only {len(good)} are verified as complete")
        return []

    # of what lies outside the window the rest goes, and what is in use goes later
    deleted = []
    for name in sorted(gone - set(good)):
        for path in saves[name]:
            if protected(path):  # goes after a later save
                continue
            _delete(path)
            deleted.append(path.name)
    if deleted and log is not None:
        log(f"deleted, by the limits on saves: {', '.join(deleted)}")
    return deleted


def _delete(path: Path) -> None:
    """Take the name away first, so that a crash half-way leaves nothing that looks like a save."""
    if path.is_dir():
        path = path.rename(path.with_name(f"{TRASH}{uuid.uuid4().hex}"))
    remove(path)


def _made_for(name: SaveName, path: Path, output_name: Naming) -> SaveName:
    """Tell checkpoints of epochs from those of steps where their names do not."""
    manifest = _manifest(path) if isinstance(output_name, Own) else None
    return SaveName("epoch", name.number) if manifest and manifest.meta.get("kind") == "epoch" else name


def _manifest(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except Torn:
        return None


def _whole_state(path: Path) -> bool:
    try:
        manifest = Manifest.read(path)
        verify(path, deep=manifest.digest not in _read_before)
    except Torn:
        return False
    _read_before.add(manifest.digest)
    return True


def export_is_whole(path: Path) -> bool:
    """Tell whether an export has all the bytes that its own header promises."""
    if path.is_dir():
        weights = [file for file in path.rglob("*") if file.suffix in (".safetensors", ".bin", ".ckpt")]
        names = ["model_index.json", *(f"{ONE_FILE}{suffix}" for suffix in EXPORT_SUFFIXES)]
        return any((path / name).is_file() for name in names) and bool(weights) and all(map(export_is_whole, weights))
    try:
        if path.suffix == ".safetensors":
            return _safetensors_is_whole(path)
        return zipfile.is_zipfile(path)  # .ckpt, .bin: the directory of a zip file is its last part
    except (OSError, ValueError, KeyError, struct.error):
        return False


def _safetensors_is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            return False
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return path.stat().st_size == 8 + length + max(ends, default=0)
