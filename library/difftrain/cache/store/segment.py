"""SegmentFiles: written append-only by one process each, read by place; and what is said where bytes are not what was written."""

from __future__ import annotations

import contextlib
import os
import struct
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from difftrain.cache.store.folder import BIN, IDX, PART, CacheFolder, disk_faults
from difftrain.cache.store.format import ALIGN, ROW, Damaged, PackedEntry, crc32c, header_block, meta_of, row_crcs
from difftrain.config.paths import is_url
from difftrain.contracts import TrainingFault
from difftrain.io.files import fsync_folder
from difftrain.io.process import this_process

if TYPE_CHECKING:
    from difftrain.cache.store.index import EntryRow


_OPEN_FILES = 64


class SegmentGone(Damaged):
    """Say that a segment is not there any more. row: the entry that was looked for."""

    row: EntryRow


class SegmentSource(Protocol):
    """Give bytes of segments. `want` says what is read next, whole entries; `forget` brings damaged bytes anew, if it can.

    Raises: Damaged or TrainingFault where they are not to be had.
    """

    def want(self, ranges: Sequence[tuple[str, int, int]]) -> None: ...
    def read(self, segment: str, offset: int, buffers: Sequence[Any]) -> None: ...
    def forget(self, segment: str, offset: int, length: int) -> bool: ...


class SegmentFiles:
    """SegmentFiles that are files: of a cache's folder, or named by their path.

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
            raise SegmentGone("it is gone") from None
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
            self._read_remaining(file, offset, buffers, count)

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

    def _read_remaining(self, file: IO[bytes], offset: int, buffers: Sequence[Any], done: int) -> None:
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
        return SegmentFiles, (self._folder,)


def checked_payload(source: SegmentSource, row: EntryRow) -> np.ndarray:
    """Read a whole entry and look at its checksum. Raises Damaged."""
    payload: np.ndarray = np.empty(row.length, np.uint8)
    source.read(row.segment, row.offset, [payload])
    if crc32c(payload) != row.crc and source.forget(row.segment, row.offset, row.length):
        source.read(row.segment, row.offset, [payload])
    if crc32c(payload) != row.crc:
        raise Damaged(f"its checksum differs{_owner(payload)}")
    return payload


def damage(cache: str, row: EntryRow, why: Exception) -> TrainingFault:
    """Return the fault that names a damaged entry, and what to do."""
    mend = f"`difftrain cache repair {cache}` drops what is damaged, and the next start encodes it again"
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


SEGMENT_BYTES = 1 << 30
_PIECES = 512  # of one call; the kernel takes 1024
_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class EntrySink(Protocol):
    """Take what an encoder made."""

    def append(self, items: Sequence[PackedEntry]) -> None: ...
    def close(self) -> None: ...


class SegmentWriter:
    """Append entries to segments of its own, one commit after another; a full segment is sealed and the next begun."""

    def __init__(self, folder: CacheFolder, header: Mapping[str, Any], *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Prepare; files are made at the first append. header: what the entries are: encoder, fingerprint, features."""
        self.written = 0  # entries committed
        self._folder, self._header, self._most = folder, dict(header), segment_bytes
        self._id, self._number = uuid.uuid4().hex, 0
        self._open: _OpenSegment | None = None
        self._failed = False

    def append(self, items: Sequence[PackedEntry]) -> None:
        """Commit entries: all of them are there once this returns. Raises TrainingFault."""
        if not items:
            return
        if self._failed:
            raise TrainingFault(f"{self._folder.path}: nothing is written after a failed write")
        self._failed = True
        with disk_faults(self._folder.path):
            if self._open is not None and self._open.size + sum(map(_size, items)) > self._most:
                self._seal()
            if self._open is None:
                self._open = _OpenSegment(self._folder, f"seg-{self._id}-{self._number:06d}", self._header)
                self._number += 1
            self._open.append(items)
        self._failed = False
        self.written += len(items)

    def close(self) -> None:
        """Seal the last segment. Raises TrainingFault. After a write that failed, it keeps its temporary name."""
        with disk_faults(self._folder.path):
            if self._open is None:
                return
            if self._failed:
                segment, self._open = self._open, None
                segment.abandon()
            else:
                self._seal()

    def _seal(self) -> None:
        segment, self._open = self._open, None
        if segment is not None:
            segment.seal()


class _OpenSegment:
    """The two files of a segment that is being written."""

    def __init__(self, folder: CacheFolder, name: str, header: Mapping[str, Any]) -> None:
        block = header_block({**header, "segment": name, "writer": this_process()})
        self._folder, self._name = folder, name
        self._files: dict[str, int] = {}
        folder.segments.mkdir(parents=True, exist_ok=True)
        try:
            for suffix in (BIN, IDX):
                path = folder.segments / f"{name}{suffix}{PART}"
                self._files[suffix] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                _write(self._files[suffix], [block])
                os.fsync(self._files[suffix])
            fsync_folder(folder.segments)  # or a power cut takes the names, and with them what is in the files
        except OSError:
            self.abandon()
            raise
        self.size = self._journal = len(block)

    def append(self, items: Sequence[PackedEntry]) -> None:
        """Write payloads, make them durable, then the same with their rows."""
        pieces: list[Any] = []
        rows = np.zeros(len(items), ROW)
        end = self.size
        for number, item in enumerate(items):
            size, crc = _size(item), 0
            for piece in item.pieces:
                crc = crc32c(piece, crc)
            fill = -size % ALIGN
            pieces += [*item.pieces, bytes(fill)]
            rows[number] = (item.address, end, size, crc, item.kind, 0, 0)
            end += size + fill
        rows["row_crc"] = row_crcs(rows)
        try:
            # data before its journal: a row on the disk always has its bytes
            _write(self._files[BIN], pieces)
            _sync(self._files[BIN])
            _write(self._files[IDX], [rows.tobytes()])
            _sync(self._files[IDX])
        except OSError:
            # neither half an entry nor a row without one
            self._take_back()
            raise
        self.size = end
        self._journal += rows.nbytes

    def _take_back(self) -> None:
        """Give back the room of what was not committed; a reader stops at the first row that is not whole anyway."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._files[IDX], self._journal)
            os.ftruncate(self._files[BIN], self.size)

    def seal(self) -> None:
        """Give both files their final names, the journal last."""
        try:
            for descriptor in self._files.values():
                os.fsync(descriptor)
        finally:
            self.abandon()
        for suffix in (BIN, IDX):
            path = self._folder.segments / f"{self._name}{suffix}"
            path.with_name(path.name + PART).rename(path)
        fsync_folder(self._folder.segments)

    def abandon(self) -> None:
        """Close the files as they are."""
        while self._files:
            os.close(self._files.popitem()[1])


def _size(item: PackedEntry) -> int:
    return sum(memoryview(piece).nbytes for piece in item.pieces)


def _write(descriptor: int, pieces: Sequence[Any]) -> None:
    """Write all of the pieces. Raises OSError."""
    views = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
    start = 0
    while start < len(views):
        done = os.writev(descriptor, views[start : start + _PIECES])
        while start < len(views) and done >= views[start].nbytes:
            done -= views[start].nbytes
            start += 1
        if done:
            views[start] = views[start][done:]
