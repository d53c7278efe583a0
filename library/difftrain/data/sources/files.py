"""Reading parts of files in place: pread on descriptors that stay open, shared by the threads of a process."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

_OPEN_FILES = 32


class Descriptors:
    """Keep the last files open. A descriptor in use by another thread is never closed under it."""

    def __init__(self, limit: int = _OPEN_FILES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[Path, io.FileIO] = OrderedDict()

    def get(self, path: Path) -> io.FileIO:
        """Return an unbuffered open file; it closes when nobody holds it any more."""
        with self._lock:
            file = self._held.pop(path, None)
            if file is None:
                file = io.FileIO(path)
            self._held[path] = file
            while len(self._held) > self._limit:
                self._held.popitem(last=False)
            return file

    def __reduce__(self) -> tuple[Any, ...]:
        return Descriptors, (self._limit,)


def read_span(file: io.FileIO, offset: int, length: int) -> bytes:
    """Read exactly `length` bytes at `offset`.

    Raises: OSError where the file ends before.
    """
    parts = []
    while length:
        part = os.pread(file.fileno(), length, offset)
        if not part:
            raise OSError(
                errno.EIO, f"the file ends {length} bytes too early; it has changed since it was indexed", file.name
            )
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Span(io.RawIOBase):
    """A part of a file as a seekable file of its own, read only where it is asked for."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._at))
        part = os.pread(self._file.fileno(), wanted, self._offset + self._at) if wanted else b""
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def open_span(file: io.FileIO, offset: int, length: int) -> io.BufferedReader:
    """Open a part of a file for reading in small steps."""
    return io.BufferedReader(Span(file, offset, length), buffer_size=16384)
