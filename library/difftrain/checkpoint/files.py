"""Durable files: what is flushed to the disk before anybody is told of it."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_CHUNK = 1 << 22
_THREADS = 4  # zlib and read() let go of the interpreter; more threads than this only fight over the disk


@dataclass(frozen=True)
class FileEntry:
    """Say what a file must be: its size in bytes and its CRC-32."""

    size: int
    crc32: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Read a file once."""
        crc, size = 0, 0
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                crc = zlib.crc32(chunk, crc)
                size += len(chunk)
        return cls(size, f"{crc:08x}")


def entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Read several files of a folder, a few at a time."""
    names = list(names)
    with ThreadPoolExecutor(min(_THREADS, len(names) or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: FileEntry.of(folder / name), names)))


def fsync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    _fsync(path, os.O_RDONLY)


def fsync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename or a new name survives a power cut."""
    _fsync(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file in one piece: a reader finds the old content or the new one, never a part."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_folder(path.parent)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its manifest first: what is left after a crash never looks whole."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)
