"""Copying entries from old segments into new ones, as they are: what a clean-up and a repair have in common."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from difftrain.data.cache.alive import is_gone
from difftrain.data.cache.folder import BIN, IDX, PART, CacheFolder, disk_faults, sync_folder
from difftrain.data.cache.format import Item, crc32c
from difftrain.data.cache.torn import Journal, find
from difftrain.data.cache.writer import SEGMENT_BYTES, SegmentWriter

_COMMIT = 64 << 20  # bytes of one append
_SILENT_S = 24 * 3600.0
_OWN = ("format", "segment", "writer")  # facts of a header that are of one segment


class Mover:
    """Append entries of old segments to new ones; segments of one encoder go into the same."""

    def __init__(self, folder: CacheFolder) -> None:
        self.folder = folder
        self.bytes = 0
        self._writers: dict[str, SegmentWriter] = {}

    def take(self, name: str, header: Mapping[str, Any], rows: np.ndarray) -> np.ndarray:
        """Copy entries of a segment; return which of them were still whole. Raises OSError, TrainingFault."""
        facts = {key: value for key, value in header.items() if key not in _OWN}
        which = json.dumps(facts, sort_keys=True)
        writer = self._writers.setdefault(which, SegmentWriter(self.folder, facts, segment_bytes=SEGMENT_BYTES))
        whole = np.zeros(len(rows), bool)
        waiting: list[Item] = []
        size = 0
        for number, payload in payloads(self.folder, name, rows):
            waiting.append(Item(bytes(rows["address"][number]), [payload], int(rows["kind"][number])))
            whole[number], size = True, size + len(payload)
            if size >= _COMMIT:
                writer.append(waiting)
                self.bytes, waiting, size = self.bytes + size, [], 0
        writer.append(waiting)
        self.bytes += size
        return whole

    def close(self) -> None:
        """Seal what was written. Raises TrainingFault."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


def payloads(folder: CacheFolder, name: str, rows: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yield the payloads of a segment that are whole, with the number of their row."""
    try:
        file = folder.open_file(name, BIN)
    except FileNotFoundError:
        return
    with file:
        for number, row in enumerate(rows):
            with suppress(OSError):  # a place of the disk that cannot be read
                payload = os.pread(file.fileno(), int(row["length"]), int(row["offset"]))
                if len(payload) == row["length"] and crc32c(payload) == row["crc"]:
                    yield number, payload


def why_not(folder: CacheFolder, journal: Journal, header: Mapping[str, Any]) -> str:
    """Say why a segment may still be written to; nothing where it is sealed, or its writer has ended.

    A writer of another machine counts as ended when its journal has not changed for a day, by the clock of the file
    system alone: that of a file which is made there now. header: the segment's, wherever it is still known from.
    """
    path = journal.idx or journal.bin
    if journal.sealed or path is None or path.suffix != PART:
        return ""
    gone = is_gone(str(header.get("writer", "")))
    if gone is None:
        try:
            with tempfile.TemporaryFile(dir=folder.segments) as mine:
                gone = os.fstat(mine.fileno()).st_mtime - path.stat().st_mtime > _SILENT_S
        except OSError as error:
            return f"whether a build is writing it cannot be told: {error.strerror}"
        return "" if gone else "a build on another machine may be writing it"
    return "" if gone else "a build is writing it"


def take_away(folder: CacheFolder, name: str) -> int:
    """Delete both files of a segment; return how many bytes are free by that. Raises TrainingFault.

    The payloads go first: a journal without them, all of whose rows are dropped, is no damage.
    """
    freed = 0
    with disk_faults(folder.path):
        for suffix in (BIN, IDX):
            while (path := find(folder.segments, name, suffix)) is not None:
                with suppress(FileNotFoundError):  # another tool was faster
                    size = path.stat().st_size
                    path.unlink()
                    freed += size
            sync_folder(folder.segments)
    return freed
