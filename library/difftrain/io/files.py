"""Durable files: whole or absent, and flushed to the disk before anybody is told of them.

A write goes to a hidden file beside its target, is flushed, and takes the target's name in one step: a reader finds
the old content or the new one, never a part, and a power cut leaves one of the two.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# a disk that is full, over its quota, read-only or broken
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_CHUNK = 1 << 22
_THREADS = 4  # zlib and read() let go of the interpreter; more threads than this only fight over the disk


# ---------------------------------------------------------------------- one durable write


def aside_of(path: Path) -> Path:
    """Return a new hidden name beside a path; what a killed process leaves under it, checkpoint.clean knows by it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextmanager
def atomic_write(path: Path, *, buffering: int = -1) -> Iterator[IO[bytes]]:
    """Open a binary file aside and give it its name on leaving; nothing is left where the block raises.

    Raises OSError.
    """
    aside = aside_of(path)
    try:
        with aside.open("xb", buffering=buffering) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_folder(path.parent)


def is_stream(path: Path) -> bool:
    """Tell whether a path is a pipe, a device, or a system's name of an open file, such as /dev/stdout."""
    return path.exists() and (not path.is_file() or str(path.absolute()).startswith(("/dev/", "/proc/")))


def write_output(path: Path, text: str) -> Path:
    """Write a text to where a user says, who may name a pipe, a device or a link, which stay. Raises OSError.

    Files of our own are never written so: somebody else may have put a link or a pipe in their place.
    """
    if is_stream(path):
        path.write_text(text, encoding="utf-8")
        return path
    write_text(path.resolve() if path.is_symlink() else path, text)
    return path


def write_bytes(path: Path, *pieces: Any) -> Path:
    """Replace a file in one step. pieces: bytes or buffers, one after the other. Raises OSError."""
    with atomic_write(path) as file:
        for piece in pieces:
            file.write(piece)
    return path


def write_text(path: Path, text: str) -> Path:
    """Replace a text file in one step; its folder is made where there is none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> Path:
    """Replace a JSON file in one step. Raises OSError."""
    return write_bytes(path, json.dumps(content, indent=1, sort_keys=True).encode())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Hand out the name of a folder aside and rename it on leaving, unless another process was faster. Raises OSError.

    The block makes the folder; where another process has put one there meanwhile, that one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_of(path)
    try:
        yield aside
        try:
            aside.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    fsync_folder(path.parent)


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


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def link_or_copy(source: Path, target: Path) -> bool:
    """Give a file a second name, or copy it where the file system has no such thing; tell which. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
        return True
    except OSError:
        shutil.copyfile(source, target)
        fsync_file(target)
        return False


# ---------------------------------------------------------------------- files of strangers

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_LINE_ENDS = re.compile(r"\r\n|\r|\n")


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a regular file for reading. A pipe, a socket or a device is refused before anything waits for it.

    Raises: OSError.
    """
    refuse_irregular(path)  # before it is opened, which may have effects on a device
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        _refuse_kind(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def refuse_irregular(path: Path | str) -> int:
    """Return the bytes of a regular file. Raises: OSError where there is none, or it is a pipe, a socket, a device."""
    return _refuse_kind(os.stat(path), path)  # noqa: PTH116 - a text may be given


def _refuse_kind(status: os.stat_result, path: Path | str) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a folder")
        raise OSError(errno.EINVAL, f"{kind}, not a file", os.fspath(path))
    return status.st_size


def read_regular(path: Path | str, most: int) -> bytes:
    """Read a regular file of at most so many bytes, and no more than its size: logs of a kernel never end.

    Raises: OSError.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes, at most {most:,} are read", os.fspath(path))
        return file.read(size)


def read_json_object(path: Path | str, most: int = 1 << 26) -> dict[str, Any] | None:
    """Read a JSON object of a regular file; None where there is none, or something else, or one of too many levels."""
    try:
        content = json.loads(read_regular(path, most).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def text_lines(text: str) -> list[str]:
    """Return the lines of a text as files have them, not also cut where Unicode or ASCII would break a page (splitlines)."""
    lines = _LINE_ENDS.split(text)
    return lines[:-1] if not lines[-1] else lines


# ---------------------------------------------------------------------- checksums


@dataclass(frozen=True)
class FileEntry:
    """Describe what a file must be: its size in bytes and its CRC-32."""

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
