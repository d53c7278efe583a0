"""The commit: all ranks write aside, one rank a disk lists and seals, then the folder gets its name.

Ranks may share one disk, or have one a machine: whoever makes the folder on a disk owns it there. A failure of any
rank is told to all of them, and leaves every earlier checkpoint as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from difftrain.contracts import TrainingFault
from difftrain.io.files import FileEntry, entries, fsync_file, fsync_folder, read_regular, write_json

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks


T = TypeVar("T")
MANIFEST = "manifest.json"  # written last: a folder without it is not a checkpoint
WORK = "tmp-"  # + 32 hex digits: being written
OLD = "-old"  # + WORK name: whole, pushed aside by a newer checkpoint of the same name
TRASH = "trash-"  # + 32 hex digits: being deleted


class SaveFault(TrainingFault):
    """Say why a checkpoint was not written; raised on every rank alike, so that training may go on."""


def commit(
    parent: Path,
    name: str,
    write_rank: Callable[[Path], list[Path]],
    ranks: Ranks,
    meta: Mapping[str, Any],
) -> Path:
    """Write a checkpoint parent/name; every rank calls it, and all return or all raise SaveFault.

    write_rank: writes this rank's files below the folder it is given and returns them; names differ between ranks.
    meta: JSON; must have "step".
    """
    token = ranks.broadcast(uuid.uuid4().hex)
    work = parent / f"{WORK}{token}"
    made: list[Path] = []

    # until it has its name, no reader takes the folder for a checkpoint
    try:
        _make(work, ranks, made)
        owner = bool(made)
        lists = _together(ranks, "write its part of", lambda: _write(work, write_rank))

        # each disk's owner lists what lies there: a file on no disk is a failed save
        files = _one_list(lists)
        own = _claim(work, owner, files, ranks)
        owners = sum(any_owned for any_owned, _ in own)

        # sealed on every disk before it is named on any
        manifest = Manifest(
            commit=token,
            name=name,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            world_size=ranks.size,
            meta=dict(meta),
            files={path: files[path] for path in own[ranks.rank][1]},
            spread=owners > 1,
        )
        _together(ranks, "seal", lambda: manifest.write(work) if owner else None)
        _together(ranks, "name", lambda: _publish(work, parent / name) if owner else None)
    except SaveFault:
        for folder in made:
            with contextlib.suppress(OSError):  # what cannot be removed now is cleaned up by the next run
                remove(folder)
        raise
    return parent / name


def _together(ranks: Ranks, what: str, action: Callable[[], T]) -> list[T]:
    """Run an action on every rank and return all results everywhere; one failure is everybody's SaveFault."""
    result: T | None = None
    fault = ""
    try:
        result = action()
    except Exception as error:
        fault = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    results = ranks.gather((result, fault))
    faults = [f"rank {rank} could not {what} it: {fault}" for rank, (_, fault) in enumerate(results) if fault]
    if faults:
        more = f" (and {len(faults) - 3} more ranks)" if len(faults) > 3 else ""
        raise SaveFault("; ".join(faults[:3]) + more)
    return [result for result, _ in results]


def _make(work: Path, ranks: Ranks, made: list[Path]) -> None:
    """Make the folder once a disk; the rank that did owns it there and has it in `made`.

    mkdir is decided by the file server, never by a stale cache. Rank 0 goes first, so that it owns a shared disk.
    """

    def make(my_turn: bool) -> None:
        if not my_turn:
            return
        work.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            work.mkdir()
            made.append(work)

    _together(ranks, "begin", lambda: make(ranks.rank == 0))
    if ranks.size > 1:
        _together(ranks, "begin", lambda: make(ranks.rank != 0))


def _write(work: Path, write_rank: Callable[[Path], list[Path]]) -> dict[str, FileEntry]:
    names = [path.relative_to(work).as_posix() for path in write_rank(work)]
    for name in names:
        fsync_file(work / name)
    return entries(work, names)


def _one_list(lists: list[dict[str, FileEntry]]) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    for rank, its in enumerate(lists):
        twice = sorted(files.keys() & its.keys())
        assert not twice, f"rank {rank} wrote {twice}, which another rank wrote as well"
        files |= its
    return files


def _claim(work: Path, owner: bool, files: Mapping[str, FileEntry], ranks: Ranks) -> list[tuple[bool, list[str]]]:
    """Let each disk's owner find the files that are on its disk: all of them, between the owners."""

    def look() -> tuple[bool, list[str]]:
        if not owner:
            return False, []
        here = [name for name, entry in files.items() if _has(work / name, entry)]
        for folder in sorted({(work / name).parent for name in here}, reverse=True):
            fsync_folder(folder)
        return True, sorted(here)

    names_by_rank = _together(ranks, "list", look)
    names = {name for _, names in names_by_rank for name in names}
    lost = sorted(files.keys() - names)
    if lost:
        raise SaveFault(f"files were written and are missing: {', '.join(lost[:5])}")
    return names_by_rank


def _has(path: Path, entry: FileEntry) -> bool:
    return path.is_file() and path.stat().st_size == entry.size


def _publish(work: Path, final: Path) -> None:
    old = work.with_name(work.name + OLD)
    if final.exists():  # torn, or of a run that went past this step before: pushed aside, whole as it is
        final.rename(old)
    try:
        work.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    fsync_folder(final.parent)
    if old.exists():
        with contextlib.suppress(OSError):
            remove(old)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its manifest first: what is left after a crash never looks whole."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


# --- The manifest: the file that is written last and makes a checkpoint whole


FORMAT = 1
_MOST_MANIFEST = 1 << 28  # bytes


class Torn(Exception):
    """Say why a folder is not a whole checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """List one disk's files of a checkpoint.

    commit: the same on every disk that this checkpoint was written to. meta: the caller's words; "step" is among
    them. spread: there are other disks, with files of their own.
    """

    commit: str
    name: str
    created: str  # UTC, ISO 8601; to the millisecond, since a session may begin in the second of the last save
    world_size: int
    meta: dict[str, Any]
    files: dict[str, FileEntry] = field(default_factory=dict)
    spread: bool = False
    format: int = FORMAT

    @property
    def step(self) -> int:
        """Return the number of updates done."""
        return int(self.meta["step"])

    @property
    def digest(self) -> str:
        """Hash everything, so that a damaged manifest is known as one."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write manifest.json in one piece and flush it."""
        write_json(folder / MANIFEST, {**asdict(self), "digest": self.digest})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest of a folder. Raises Torn."""
        try:
            content = json.loads(read_regular(folder / MANIFEST, _MOST_MANIFEST))
        except FileNotFoundError:
            raise Torn(f"no {MANIFEST}: it was not written completely") from None
        except (OSError, ValueError, RecursionError) as error:
            raise Torn(f"{MANIFEST} cannot be read: {error}") from None
        try:
            if content["format"] > FORMAT:
                raise Torn(f"written by a newer version: format {content['format']}, this version reads up to {FORMAT}")
            digest = content.pop("digest")
            files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
            manifest = cls(**content, files=files)
            _ = manifest.step, manifest.created + manifest.commit
            strange = [name for name in files if not _is_inside(name)]
            if strange or not _is_inside(manifest.name) or "/" in manifest.name:
                raise Torn(f"{MANIFEST} names what does not lie in the folder: {(strange or [manifest.name])[0]!r}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Torn(f"{MANIFEST} is not one of a checkpoint: {error!r}") from None
        if manifest.digest != digest:
            raise Torn(f"{MANIFEST} is damaged: its own checksum differs")
        return manifest


def _is_inside(name: str) -> bool:
    """Tell a relative path that stays below the folder that it begins in."""
    parts = PurePosixPath(name).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and not {"\\", "\0"} & set(name)


def verify(folder: Path, *, deep: bool = True) -> Manifest:
    """Check that a checkpoint is whole and return its manifest; deep reads every byte. Raises Torn."""
    manifest = Manifest.read(folder)
    for name, entry in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():
            raise Torn(f"{name} is missing")
        size = path.stat().st_size
        if size != entry.size:
            raise Torn(f"{name} has {size} bytes, not {entry.size}")
    if deep:
        try:
            actual = entries(folder, sorted(manifest.files))
        except OSError as error:
            raise Torn(f"{error.filename or 'a file'} cannot be read: {error.strerror or error}") from None
        for name, entry in actual.items():
            if entry != manifest.files[name]:
                raise Torn(f"{name} is damaged: its checksum differs")
    return manifest


def load_meta(folder: Path) -> dict[str, Any]:
    """Return what was said of a checkpoint when it was committed. Raises Torn."""
    return dict(Manifest.read(folder).meta)
