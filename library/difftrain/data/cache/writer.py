"""Writing segments: append-only, one writer each. What an append has returned from is there after any crash."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from difftrain.contracts import TrainingFault
from difftrain.data.cache.alive import this_process
from difftrain.data.cache.folder import BIN, IDX, PART, CacheFolder, disk_faults, sync_folder
from difftrain.data.cache.format import ALIGN, ROW, Item, crc32c, header_block, row_crcs

SEGMENT_BYTES = 1 << 30
_PIECES = 512  # of one call; the kernel takes 1024
_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class Sink(Protocol):
    """Take what an encoder made."""

    def append(self, items: Sequence[Item]) -> None: ...
    def close(self) -> None: ...


class SegmentWriter:
    """Append entries to segments of its own, one commit after another; a full segment is sealed and the next begun."""

    def __init__(self, folder: CacheFolder, header: Mapping[str, Any], *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Prepare; files are made at the first append. header: what the entries are: encoder, fingerprint, features."""
        self.written = 0  # entries committed
        self._folder, self._header, self._most = folder, dict(header), segment_bytes
        self._id, self._number = uuid.uuid4().hex, 0
        self._open: _Segment | None = None
        self._failed = False

    def append(self, items: Sequence[Item]) -> None:
        """Commit entries: all of them are there once this returns. Raises TrainingFault."""
        if not items:
            return
        if self._failed:
            raise TrainingFault(f"{self._folder.path}: nothing more is written after a write that failed")
        self._failed = True
        with disk_faults(self._folder.path):
            if self._open is not None and self._open.size + sum(map(_size, items)) > self._most:
                self._seal()
            if self._open is None:
                self._open = _Segment(self._folder, f"seg-{self._id}-{self._number:06d}", self._header)
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


class _Segment:
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
            sync_folder(folder.segments)  # or a power cut takes the names, and with them what is in the files
        except OSError:
            self.abandon()
            raise
        self.size = self._journal = len(block)

    def append(self, items: Sequence[Item]) -> None:
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
            _write(self._files[BIN], pieces)
            _sync(self._files[BIN])
            _write(self._files[IDX], [rows.tobytes()])
            _sync(self._files[IDX])
        except OSError:
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
        sync_folder(self._folder.segments)

    def abandon(self) -> None:
        """Close the files as they are."""
        while self._files:
            os.close(self._files.popitem()[1])


def _size(item: Item) -> int:
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
