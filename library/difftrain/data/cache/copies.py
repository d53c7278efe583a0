"""A bounded folder of copies that all processes of a machine share, without locks: the least recently used go first.

A copy is written aside and renamed, so it is whole or absent; whoever has it open keeps it when it is removed. Copies lie in
sub-folders by the hash of their name, each with its share of the bound: a writer looks through one of them now and
then and removes what is too much. Two that do so at once remove the same files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
import zlib
from pathlib import Path
from typing import IO, Any

from difftrain.data.cache.fetching import say_to_all

_SHARES, _SHARE = 16, 256 << 20  # most sub-folders, and the bytes from which there is another
_LOOKS = 512  # a writer looks through a sub-folder each time that it has written this part of its share
_KEPT = 0.9  # of a share, when something has to go
_USED_S = 60.0  # a copy that is read is marked as used, at most once in this time
_STALE_S = 600.0  # what is still being written after this time was left by a killed process
_PAUSE_S = 60.0  # without copies, where the disk is full
_QUIET_S = 3600.0
_SAID: set[Path] = set()  # by this process, of folders where no mark can be left
_RESERVE, _RESERVED_SHARE = 1 << 30, 0.05  # of the disk, the smaller one is left to others


class Copy:
    """A copy that is open: it stays what it is, also when it is removed."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self.size = file, size

    def fill(self, at: int, views: list[memoryview], length: int) -> bool:
        """Fill buffers, of a length together, from a place on; tell whether all could be read."""
        try:
            return os.preadv(self._file.fileno(), views, at) == length
        except OSError:
            return False

    def content(self) -> memoryview:
        """Read all of it; what cannot be read is left zero, and has a wrong checksum."""
        content = memoryview(bytearray(self.size))
        self.fill(0, [content], self.size)
        return content

    def __del__(self) -> None:
        self._file.close()


class Copies:
    """Copies of things that never change, by name. Picklable."""

    def __init__(self, folder: Path, bound: int) -> None:
        """Open. bound: bytes of all copies together; 0 for none."""
        self.shares = min(max(bound // _SHARE, 1), _SHARES)
        self.folder, self.bound = folder / f"copies-{self.shares}", bound
        self._written: dict[Path, int] = {}  # since this process last looked through a sub-folder
        self._paused_until = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, (self.folder.parent, self.bound)

    def open(self, name: str) -> Copy | None:
        """Open a copy, and mark it as used; None where there is none."""
        if not self.bound:
            return None
        path = self._path(name)
        try:
            file = path.open("rb", buffering=0)
        except OSError:
            return None
        stat = os.fstat(file.fileno())
        if time.time() - stat.st_mtime > _USED_S:
            with contextlib.suppress(OSError):  # removed meanwhile
                os.utime(path)
        return Copy(file, stat.st_size)

    def put(self, name: str, content: Any) -> None:
        """Keep a copy, where there is room for it; a disk that is full is said once."""
        path, size = self._path(name), memoryview(content).nbytes
        share = self.bound // self.shares
        if size > share * _KEPT or time.monotonic() < self._paused_until:
            return
        try:
            written = self._written.get(path.parent, share) + size
            if written >= share // _LOOKS:
                self._tidy(path.parent, share, size)
                written = 0
            self._written[path.parent] = written
            self._write(path, content)
        except OSError as error:
            self._paused_until = time.monotonic() + _PAUSE_S
            self._say(error)

    def touch(self) -> None:
        """Let others see that the copies are in use."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)

    def drop(self, name: str) -> None:
        """Remove a copy that is not what it should be."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{zlib.crc32(name.encode()) % self.shares:x}" / name

    def _write(self, path: Path, content: Any) -> None:
        """Write a copy. Nothing makes it durable: what a crash leaves has a wrong checksum and is brought anew."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"tmp-{uuid.uuid4().hex}")
        try:
            with aside.open("xb", buffering=0) as file:
                rest = memoryview(content).cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def _tidy(self, folder: Path, share: int, coming: int) -> None:
        """Make room for what is coming. Raises OSError where others have filled the disk."""
        found, now, used = [], time.time(), 0
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    used += stat.st_size
                    if not entry.name.startswith("tmp-"):
                        found.append((stat.st_mtime, stat.st_size, entry.path))
                    elif stat.st_mtime < now - _STALE_S:
                        found.append((0.0, stat.st_size, entry.path))
        full = self._full()
        limit = used // 2 if full else share * _KEPT
        for _, size, path in sorted(found) if full or used + coming > share else ():
            if used + coming <= limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            used -= size
        if full:
            raise OSError(28, "hardly any space left on device")

    def _full(self) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(self.folder)
        return disk.free < min(_RESERVE, disk.total * _RESERVED_SHARE)

    def _say(self, error: OSError) -> None:
        """Say that nothing is kept; once for all processes, as far as a mark can be left."""
        mark = self.folder / "full"
        with contextlib.suppress(OSError):
            if time.time() - mark.stat().st_mtime > _QUIET_S:
                mark.unlink()
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            if mark in _SAID:
                return
            _SAID.add(mark)
        say_to_all(
            f"cache: {self.folder} takes no more copies of what is read from the store ({error.strerror or error}): "
            "entries are read from it directly, each time anew. Make room there, or lower --cache_copy_gib"
        )
