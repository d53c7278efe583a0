"""Where parts lie: in memory that all processes of a machine share, or in files that outlive the run."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from difftrain.contracts import TrainingFault
from difftrain.data.cache.layout import Part

FORMAT = 1  # of a part's file
SUFFIX = ".part"
_MAGIC = b"difftrain part 1"
_MARK = struct.Struct(f"<IQ{len(_MAGIC)}s")  # the end of a file: checksum, length of the words before it, magic
_STALE_S = 24 * 3600.0
_CHUNK = 1 << 22
_RESERVED: list[IO[bytes]] = []  # open for as long as this process lives

Rejected = dict[int, str]  # row within a part -> why there is nothing in it
UNREADABLE = "unreadable"  # kind of reason: the disk failed, not the picture; the next start tries again


class Damaged(Exception):
    """Say what is wrong with a part's file."""


class Place(Protocol):
    """Take parts one by one, from several processes, and say where each is read."""

    def whole(self, part: Part, check: bool) -> bool: ...
    def room(self, part: Part) -> np.ndarray: ...
    def commit(self, part: Part, entries: np.ndarray, rejected: Rejected) -> None: ...
    def find(self, part: Part) -> tuple[str, int]: ...


class SharedMemory:
    """One block of memory for all parts. It is gone with the last process that has it open, however that ends."""

    def __init__(self, path: str, parts: Sequence[Part]) -> None:
        """Open the block that `reserve` made, in the same process or in another of this machine."""
        ends = np.cumsum([part.bytes for part in parts])
        self._offsets = {part.number: int(end) - part.bytes for part, end in zip(parts, ends)}
        self._path = path
        self._map: np.ndarray = np.memmap(path, dtype=np.uint8, mode="r+", shape=(int(ends[-1]),))

    @staticmethod
    def reserve(size: int) -> str:
        """Make the block and return its path. It stays as long as this process."""
        if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm, which is 64 MiB in many containers
            file: IO[bytes] = os.fdopen(os.memfd_create("difftrain-cache"), "r+b")
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            file = tempfile.NamedTemporaryFile(prefix="difftrain-cache-")  # noqa: SIM115
            path = file.name
        file.truncate(size)
        _RESERVED.append(file)
        return path

    def whole(self, part: Part, check: bool) -> bool:
        """Nothing is there before it is encoded."""
        return False

    def room(self, part: Part) -> np.ndarray:
        """Return the part's own bytes."""
        start = self._offsets[part.number]
        return self._map[start : start + part.bytes].reshape(part.count, part.stride)

    def commit(self, part: Part, entries: np.ndarray, rejected: Rejected) -> None:
        """The bytes are where they belong."""

    def find(self, part: Part) -> tuple[str, int]:
        """Return path and offset of a part's first entry."""
        return self._path, self._offsets[part.number]


class Folder:
    """A file for each part, under a name that changes with everything that its content depends on.

    A file is written aside, flushed and renamed, so it is whole or absent; size and checksum stand at its end. Any number
    of processes may write the same part at once: each finishes a file of its own, and all of them are equal.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path, self._names = path, names

    def file(self, part: Part) -> Path:
        """Return the file of a part."""
        return self.path / f"{self._names[part.number]}{SUFFIX}"

    def whole(self, part: Part, check: bool) -> bool:
        """Tell whether a part is there, with all that can be in it. check: read all of it. Raises Damaged."""
        path = self.file(part)
        if not path.exists():
            return False
        with _readable(path), path.open("rb") as file:
            tail, crc = _tail(file, part)
            if check and _checksum(file) != crc:
                raise Damaged("its checksum differs")
            return not any(reason.startswith(UNREADABLE) for reason in tail["rejected"].values())

    def rejected(self, part: Part) -> Rejected:
        """Return what was left out of a part that is there. Raises Damaged."""
        path = self.file(part)
        with _readable(path), path.open("rb") as file:
            tail, _ = _tail(file, part)
            return {int(row): reason for row, reason in tail["rejected"].items()}

    def room(self, part: Part) -> np.ndarray:
        """Return memory to fill."""
        return np.zeros((part.count, part.stride), dtype=np.uint8)

    def commit(self, part: Part, entries: np.ndarray, rejected: Rejected) -> None:
        """Write a part. Raises TrainingFault where the disk refuses it."""
        tail = {"format": FORMAT, "count": part.count, "stride": part.stride, "rejected": rejected}
        words = json.dumps(tail).encode()
        mark = _MARK.pack(zlib.crc32(words, zlib.crc32(entries.data)), len(words), _MAGIC)
        with disk_faults(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            aside = self.path / f"tmp-{uuid.uuid4().hex}"
            try:
                with aside.open("wb") as file:
                    for piece in (entries.data, words, mark):
                        file.write(piece)
                    file.flush()
                    os.fsync(file.fileno())
                aside.replace(self.file(part))
            finally:
                aside.unlink(missing_ok=True)
            _sync(self.path)

    def find(self, part: Part) -> tuple[str, int]:
        """Return path and offset of a part's first entry."""
        return str(self.file(part)), 0

    def unused(self) -> tuple[int, int]:
        """Return number and bytes of files that belong to no part here: of earlier states of the data, or other runs'."""
        named = {f"{name}{SUFFIX}" for name in self._names}
        sizes = [path.stat().st_size for path in self.path.glob(f"*{SUFFIX}") if path.name not in named]
        return len(sizes), sum(sizes)

    def clean(self, now: float) -> None:
        """Remove what a killed process left half written, a day later: nobody writes one part for that long."""
        for path in self.path.glob("tmp-*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < now - _STALE_S:
                    path.unlink()


@contextmanager
def disk_faults(folder: Path) -> Iterator[None]:
    """Name the folder where the disk refuses a part. Raises TrainingFault."""
    try:
        yield
    except OSError as error:
        raise TrainingFault(
            f"{folder}: cached features cannot be written ({error.strerror or error}). Parts that were finished stay "
            "and are used by the next start. Make room there, or name another folder with --cache_dir"
        ) from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"it cannot be read ({error})") from None


def _tail(file: IO[bytes], part: Part) -> tuple[dict[str, Any], int]:
    """Read what stands behind the entries, and the checksum of all but itself. Raises Damaged."""
    size = file.seek(0, os.SEEK_END)
    if size < part.bytes + _MARK.size:
        raise Damaged(f"it has {size} bytes, its entries alone {part.bytes}")
    file.seek(size - _MARK.size)
    crc, length, magic = _MARK.unpack(file.read())
    if magic != _MAGIC or size != part.bytes + length + _MARK.size:
        raise Damaged("its end is not where it should be")
    file.seek(part.bytes)
    tail = json.loads(file.read(length))
    if (tail["format"], tail["count"], tail["stride"]) != (FORMAT, part.count, part.stride):
        raise Damaged("it holds entries of another number or size")
    return tail, crc


def _checksum(file: IO[bytes]) -> int:
    left = file.seek(0, os.SEEK_END) - _MARK.size
    file.seek(0)
    crc = 0
    while piece := file.read(min(left, _CHUNK)):
        crc, left = zlib.crc32(piece, crc), left - len(piece)
    return crc


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
