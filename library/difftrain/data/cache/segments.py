"""Where the bytes of segments come from, and what is said where they are not what was written."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from difftrain.config.there import is_url
from difftrain.contracts import TrainingFault
from difftrain.data.cache.folder import BIN, CacheFolder
from difftrain.data.cache.format import Damaged, crc32c, meta_of

if TYPE_CHECKING:
    from difftrain.data.cache.metadata import Row

_OPEN_FILES = 64


class Gone(Damaged):
    """Say that a segment is not there any more. row: the entry that was looked for."""

    row: Row


class Source(Protocol):
    """Give bytes of segments. `want` says what is read next, whole entries; `forget` brings damaged bytes anew, if it can.

    Raises: Damaged or TrainingFault where they are not to be had.
    """

    def want(self, ranges: Sequence[tuple[str, int, int]]) -> None: ...
    def read(self, segment: str, offset: int, buffers: Sequence[Any]) -> None: ...
    def forget(self, segment: str, offset: int, length: int) -> bool: ...


class Segments:
    """Segments that are files: of a cache's folder, or named by their path.

    They are read, not mapped. What is read goes from the page cache into the batch's own tensors in one copy, so nothing
    but these tensors is ever resident, however large the cache. Measured on two cores (samples of 2.45 MB, page cache
    warm, cloning from memory = 1.00): preadv 0.85 to 0.88; a mapping that is kept 0.81 to 0.85, with all that was ever
    read resident; a mapping that gives its pages back after each sample (MADV_DONTNEED) 0.75 to 0.79, populated before
    (MADV_POPULATE_READ) 0.49, a window mapped for each sample 0.43. And where a file is cut short, or its disk fails, a
    read says so; touching a mapping kills the process.
    """

    def __init__(self, folder: CacheFolder | None) -> None:
        """Prepare. folder: None where segments are paths."""
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}

    def want(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Nothing is to be brought: it is here."""

    def read(self, segment: str, offset: int, buffers: Sequence[Any]) -> None:
        """Fill buffers one after another. Raises Damaged."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self.fill(segment, offset, views, sum(map(len, views)))

    def fill(self, segment: str, offset: int, buffers: Sequence[Any], size: int) -> None:
        """Fill buffers of so many bytes in all. Raises Damaged."""
        try:
            self._fill(segment, offset, buffers, size)
        except FileNotFoundError:
            raise Gone("it is gone") from None
        except OSError:  # of a network disk whose server was started anew, a file that is open may be stale
            self._files.pop(segment, None)
            try:
                self._fill(segment, offset, buffers, size)
            except OSError as error:
                raise Damaged(f"it cannot be read ({error.strerror or error})") from error

    def _fill(self, segment: str, offset: int, buffers: Sequence[Any], size: int) -> None:
        file = self._files.get(segment) or self._open(segment)
        count = os.preadv(file.fileno(), buffers, offset)
        if count != size:
            self._rest(file, offset, buffers, count)

    def forget(self, segment: str, offset: int, length: int) -> bool:
        """Nothing can be brought anew."""
        return False

    def _open(self, segment: str) -> IO[bytes]:
        while len(self._files) >= _OPEN_FILES:
            self._files.pop(next(iter(self._files))).close()
        if self._folder is None:
            file: IO[bytes] = Path(segment).open("rb", buffering=0)  # noqa: SIM115
        else:
            file = self._folder.open_file(segment, BIN)
        self._files[segment] = file
        return file

    def _rest(self, file: IO[bytes], offset: int, buffers: Sequence[Any], done: int) -> None:
        """Go on after a read that was cut: by a signal, the kernel's limit of one call, or the end of the file."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
            skip = min(done, len(view))
            while skip < len(view):
                count = os.preadv(file.fileno(), [view[skip:]], offset + skip)
                if not count:
                    raise Damaged(f"the file ends at {offset + skip:,}, before the entry does")
                skip += count
            done, offset = max(0, done - len(view)), offset + len(view)

    def __reduce__(self) -> tuple[Any, ...]:
        return Segments, (self._folder,)


def checked_payload(source: Source, row: Row) -> np.ndarray:
    """Read a whole entry and look at its checksum. Raises Damaged."""
    payload: np.ndarray = np.empty(row.length, np.uint8)
    source.read(row.segment, row.offset, [payload])
    if crc32c(payload) != row.crc and source.forget(row.segment, row.offset, row.length):
        source.read(row.segment, row.offset, [payload])
    if crc32c(payload) != row.crc:
        raise Damaged(f"its checksum differs{_owner(payload)}")
    return payload


def damage(cache: str, row: Row, why: Exception) -> TrainingFault:
    """Return the fault that names a damaged entry, and what to do."""
    mend = f"`difftrain cache repair {cache}` drops what is damaged, and the next start encodes it anew"
    if is_url(cache):
        mend = (
            "Repair the cache in its folder (`difftrain cache repair`), build it there, and copy it to the store again"
        )
    return TrainingFault(
        f"{cache}: segment {row.segment}: the entry at byte {row.offset:,} ({row.length:,} bytes) is damaged: {why}. {mend}"
    )


def _owner(payload: np.ndarray) -> str:
    """Name what an entry is of, as far as it can still be read."""
    try:
        facts = meta_of(payload)
    except (Damaged, ValueError, IndexError, struct.error):
        return ""
    return "".join(f"; it is of {facts[name]!r}" for name in ("name", "caption") if name in facts)
