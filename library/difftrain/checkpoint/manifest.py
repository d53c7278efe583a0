"""The manifest: the file that is written last and makes a checkpoint whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from difftrain.io.files import MANIFEST, FileEntry, entries, write_json

FORMAT = 1


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
    created: str  # UTC, ISO 8601
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
        return hashlib.sha256(_canonical(asdict(self)).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write manifest.json in one piece and flush it."""
        write_json(folder / MANIFEST, {**asdict(self), "digest": self.digest})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest of a folder. Raises Torn."""
        try:
            content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise Torn(f"no {MANIFEST}: it was not written to its end") from None
        except (OSError, ValueError) as error:
            raise Torn(f"{MANIFEST} cannot be read: {error}") from None
        try:
            if content["format"] > FORMAT:
                raise Torn(f"written by a later version: format {content['format']}, known are those up to {FORMAT}")
            told = content.pop("digest")
            files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
            manifest = cls(**content, files=files)
        except (KeyError, TypeError, AttributeError) as error:
            raise Torn(f"{MANIFEST} is not one of a checkpoint: {error!r}") from None
        if manifest.digest != told:
            raise Torn(f"{MANIFEST} is damaged: its own checksum differs")
        return manifest


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


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
            found = entries(folder, sorted(manifest.files))
        except OSError as error:
            raise Torn(f"{error.filename or 'a file'} cannot be read: {error.strerror or error}") from None
        for name, entry in found.items():
            if entry != manifest.files[name]:
                raise Torn(f"{name} is damaged: its checksum differs")
    return manifest


def load_meta(folder: Path) -> dict[str, Any]:
    """Return what was said of a checkpoint when it was committed. Raises Torn."""
    return dict(Manifest.read(folder).meta)
