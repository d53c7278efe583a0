"""Hashes of media bytes: known from an index that read all of them, else made once for a file that stays as it is.

Beside the indexes of the same data lie rows (stamp, content); a stamp changes with a file's path, size and time, and
with the place in it. Each process writes a file of its own, row after row, so that a kill loses a second of work; it
reads what others write, and begins elsewhere than they do, so that machines with one folder share the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from difftrain.cache.manifest.address import BYTES, V16
from difftrain.cache.manifest.manifest import first_occurrences
from difftrain.contracts import MediaRef, Reject
from difftrain.data.index.index import DATABASE, Index, connect
from difftrain.data.index.inspection import content_of, content_of_file
from difftrain.data.media.media import Unusable
from difftrain.data.sources.base import read_image
from difftrain.data.sources.folder import size_and_time_of_all
from difftrain.io.files import atomic_write, write_bytes

Log = Callable[[str], None]

FOLDER = "contents"  # beside the indexes
COLUMN = "content.npy"  # in an index: entry i of record i; zeros where it is not known
UNREADABLE, CHANGED = "unreadable", "changed"  # kinds of reasons that pass: the next start looks again
_ROW = np.dtype([("stamp", "<u8", 2), ("content", "<u8", 2), ("check", "<u8")])
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
_CHUNK = 1024
_SAY_EVERY_S = 10.0
_FLUSH_EVERY_S = 1.0
_LOOK_EVERY_S = 5.0
_PIECES = 16
_LIVE_S = 24 * 3600.0  # rows that were written to since may still be another process's

_PLACES = """
SELECT records.row, records.content, files.source, coalesce(records.path, files.path), records.path IS NOT NULL,
       records.offset, records.length, files.size, files.mtime_ns
FROM records JOIN files ON files.id = records.file WHERE records.row >= ? AND records.row < ? ORDER BY records.row
"""


class MediaBytes(NamedTuple):
    """MediaBytes whose hash is wanted. size, mtime_ns: of the whole file as listed; no size: not compared."""

    record_id: int
    media: MediaRef | None  # None: all of the file
    file: str
    size: int | None
    mtime_ns: int | None

    @property
    def stamp(self) -> bytes:
        """Hash where the bytes lie, and what changes with them."""
        span = (self.media.offset, self.media.length) if self.media else (0, 0)
        words = json.dumps([self.file, self.size, self.mtime_ns, *span])
        return hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=BYTES).digest()


class KnownHashes:
    """What is known of bytes, by their stamps: what was in a folder, and what other processes add to it meanwhile."""

    def __init__(self, folder: Path) -> None:
        """Read all whole rows of a folder, which need not be there."""
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of each file
        self._pieces: list[np.ndarray] = []  # by stamp
        self._file: BinaryIO | None = None
        self._flushed = 0.0
        self._looked = -_LOOK_EVERY_S
        self.look()

    def look(self) -> None:
        """Read what others have added, every few seconds."""
        if time.monotonic() - self._looked < _LOOK_EVERY_S:
            return
        self._looked, batches = time.monotonic(), [np.empty(0, _ROW)]
        for path in sorted(self._folder.glob("*.rows")):
            if self._file is None or Path(self._file.name) != path:
                rows, self._read[path] = _whole_rows(path, self._read.get(path, 0))
                batches.append(rows)
        if any(map(len, batches)):
            if len(self._pieces) >= _PIECES:
                batches, self._pieces = batches + self._pieces, []
            rows = np.concatenate(batches)
            self._pieces.append(rows[np.argsort(rows["stamp"][:, 0], kind="stable")])

    def lookup(self, stamps: np.ndarray) -> np.ndarray:
        """Return contents, zeros where there is none. Shapes: (N, 16) uint8 both."""
        contents, words = np.zeros_like(stamps), np.ascontiguousarray(stamps).view("<u8")
        for rows in self._pieces:
            index = np.searchsorted(rows["stamp"][:, 0], words[:, 0]).clip(max=len(rows) - 1)
            same = (rows["stamp"][index] == words).all(axis=1)  # half of a stamp is never another's
            contents[same] = rows["content"][index[same]].view(np.uint8).reshape(-1, BYTES)
        return contents

    def add(self, stamp: bytes, content: bytes) -> None:
        """Keep what was found. Quiet where nothing can be written: it is found again then."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = (self._folder / f"{uuid.uuid4().hex}.rows").open("wb")
            self._file.write(_rows_of(np.frombuffer(stamp + content, np.uint8).reshape(1, -1)).tobytes())
            if time.monotonic() - self._flushed > _FLUSH_EVERY_S:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self, stamps: np.ndarray, contents: np.ndarray) -> None:
        """Write one file of what is still worth keeping, in place of several. Shapes: (N, 16) uint8 both."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
            rows = _rows_of(np.concatenate([stamps, contents], axis=1)).tobytes()
            write_bytes(self._folder / f"{uuid.uuid4().hex}.rows", rows)
            Path(self._file.name).unlink()
            for path in self._read:
                if path.stat().st_mtime < time.time() - _LIVE_S:
                    path.unlink()
        self._file = None


def _rows_of(pairs: np.ndarray) -> np.ndarray:
    """Make rows. Shapes: (N, 32) uint8 -> (N,) _ROW."""
    words = np.ascontiguousarray(pairs).view("<u8")
    rows = np.empty(len(words), dtype=_ROW)
    rows["stamp"], rows["content"] = words[:, :2], words[:, 2:]
    rows["check"] = (words * _ODD).sum(axis=1, dtype=np.uint64)
    return rows


def _whole_rows(path: Path, start: int = 0) -> tuple[np.ndarray, int]:
    """Read the rows of a file that were written whole, from a byte on; also return where what was read ends."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        data = file.read()
        rows = np.frombuffer(data[: len(data) // _ROW.itemsize * _ROW.itemsize], dtype=_ROW)
        words = np.concatenate([rows["stamp"], rows["content"]], axis=1)
        complete: np.ndarray = rows[(words * _ODD).sum(axis=1, dtype=np.uint64) == rows["check"]]
        return complete, start + rows.nbytes
    return np.empty(0, dtype=_ROW), start


def picture_contents(index: Index, needed: np.ndarray, *, look: bool, log: Log) -> tuple[np.ndarray, list[Reject]]:
    """Return the content of every record, and which of the wanted ones have none and why.

    needed: ids, ascending. look: read what is not known yet. Shape: (N, 16) uint8, zeros where it is not known.
    """
    contents = _saved_hashes(index)
    if contents is not None and contents[needed].any(axis=1).all():
        return contents, []

    # from the index, which has read some of them
    contents, stamps = np.zeros((index.count, BYTES), np.uint8), np.zeros((index.count, BYTES), np.uint8)
    for record_id, content, media in _media_bytes(index):
        if content is not None:
            contents[record_id] = np.frombuffer(content, np.uint8)
        else:
            stamps[record_id] = np.frombuffer(media.stamp, np.uint8)

    # from the files, as far as nobody has hashed them before
    rejects: list[Reject] = []
    if not contents[needed].any(axis=1).all():
        known = KnownHashes(index.folder.parent / FOLDER)
        unread = np.flatnonzero(~contents.any(axis=1))
        contents[unread] = known.lookup(stamps[unread])
        left = np.zeros(index.count, dtype=bool)
        left[needed] = ~contents[needed].any(axis=1)
        once = first_of_duplicates(left, stamps)
        # machines that share the folder begin at different rows, and so share the work
        first_row = hash((socket.gethostname(), os.getpid())) % index.count
        parts = (_media_bytes(index, first_row), _media_bytes(index, 0, first_row))
        work = (media for part in parts for record_id, _, media in part if once[record_id])
        rejects = hash_media(index, work, int(once.sum()), known, contents, look=look, log=log)
        copy_to_duplicates(contents, left & ~once, once, stamps)
        here = unread[contents[unread].any(axis=1)]
        known.close(stamps[here], contents[here])
    save_array(index.folder / COLUMN, contents)
    return contents, rejects


def first_of_duplicates(left: np.ndarray, stamps: np.ndarray) -> np.ndarray:
    """Tell of records whose bytes are to be read which comes first of those that lie in one place.

    Shapes: left (N,) bool, stamps (N, 16) uint8 -> (N,) bool.
    """
    ids = np.flatnonzero(left)
    once = np.zeros(len(left), dtype=bool)
    once[ids[first_occurrences(stamps[ids].view(V16).reshape(-1))]] = True
    return once


def copy_to_duplicates(contents: np.ndarray, empty: np.ndarray, once: np.ndarray, stamps: np.ndarray) -> None:
    """Give records that were not read the content of the one that was, in the same place: changes `contents`.

    Shapes: contents and stamps (N, 16) uint8; empty and once (N,) bool.
    """
    ids, read = np.flatnonzero(empty), np.flatnonzero(once)
    if len(ids):
        order = read[np.argsort(stamps[read].view(V16).reshape(-1), kind="stable")]
        index = np.searchsorted(stamps[order].view(V16).reshape(-1), stamps[ids].view(V16).reshape(-1))
        contents[ids] = contents[order[index]]


def _saved_hashes(index: Index) -> np.ndarray | None:
    with contextlib.suppress(OSError, ValueError):
        hashes: np.ndarray = np.load(index.folder / COLUMN)
        if hashes.shape == (index.count, BYTES):
            return hashes
    return None


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array as a whole. Quiet where nothing can be written: it is made again then."""
    with contextlib.suppress(OSError), atomic_write(path) as file:
        np.save(file, array)


def _media_bytes(index: Index, low: int = 0, high: int = 1 << 62) -> Iterator[tuple[int, bytes | None, MediaBytes]]:
    """Iterate over (id, content where the index knows it, where the bytes lie) of rows, in the order of the files."""
    rows = np.asarray(index.columns().row)
    ids = np.zeros(int(rows.max(initial=0)) + 1, dtype=np.uint32)
    ids[rows] = np.arange(len(rows), dtype=np.uint32)
    roots = [info.root for info in index.sources]
    live = [info.kind == "class" for info in index.sources]  # what its listing says of sizes and times is made up
    with contextlib.closing(connect(index.folder / DATABASE)) as database:
        for row, content, source, path, apart, offset, length, size, mtime_ns in database.execute(_PLACES, (low, high)):
            media = MediaRef(source, path, offset, length)
            file = path if path.startswith("/") else f"{roots[source]}/{path}"
            if live[source]:
                yield int(ids[row]), content, MediaBytes(int(ids[row]), media, file, None, mtime_ns)
            elif apart and content is None:  # the file that names it was listed, not the picture's own
                yield int(ids[row]), content, MediaBytes(int(ids[row]), media, file, *_size_and_time(file))
            else:
                yield int(ids[row]), content, MediaBytes(int(ids[row]), media, file, size, mtime_ns)


def _size_and_time(file: str) -> tuple[int | None, int | None]:
    try:
        path = Path(file)
        if path.is_dir():  # of frames
            return size_and_time_of_all(path)
        stat = path.stat()
    except OSError:
        return None, None
    return stat.st_size, stat.st_mtime_ns


def hash_media(
    index: Index, work: Iterable[MediaBytes], count: int, known: KnownHashes, out: np.ndarray, *, look: bool, log: Log
) -> list[Reject]:
    """Hash bytes by several threads into rows of `out`; return what has none, and why.

    A file whose size or time is not what was listed is being changed: it is left alone until the next index.
    """
    rejects: list[Reject] = []
    if not look:
        return [Reject(media.file, f"{UNREADABLE}: its hash is not known, and nothing is read now") for media in work]
    reading, progress = _HashReader(index), _HashProgress(count, log)
    with ThreadPoolExecutor(min(32, 4 + 2 * (os.cpu_count() or 1))) as pool:
        waiting = iter(work)
        while some := list(islice(waiting, _CHUNK)):
            known.look()
            stamps = np.frombuffer(b"".join(media.stamp for media in some), np.uint8).reshape(-1, BYTES)

            # what another process has hashed meanwhile
            contents = known.lookup(stamps)
            known_rows = np.any(contents, axis=1)
            out[[media.record_id for media in some]] = contents
            progress.known(int(known_rows.sum()))

            # the rest is read
            unread = [media for media, is_known in zip(some, known_rows, strict=True) if not is_known]
            for media, (content, size, reason) in zip(unread, pool.map(reading, unread), strict=True):
                if content is None:
                    rejects.append(Reject(media.file, reason))
                else:
                    out[media.record_id] = np.frombuffer(content, np.uint8)
                    known.add(media.stamp, content)
                progress.add(size)
    return rejects


class _HashReader:
    """Read and hash one place. Every thread has an index of its own: sources keep files open."""

    def __init__(self, index: Index) -> None:
        self._index, self._local = index, threading.local()

    def __call__(self, media: MediaBytes) -> tuple[bytes | None, int, str]:
        try:
            if media.media is None:
                data = read_image(Path(media.file))
                content, size = content_of(data), len(data)
            else:
                if not hasattr(self._local, "index"):
                    self._local.index = self._index.reopened()
                if self._index.has_clips:  # a video is not held
                    content, size = content_of_file(self._local.index.open_media(media.media))
                else:
                    data = self._local.index.read(media.media)
                    content, size = content_of(data), len(data)
            if media.size is not None and _size_and_time(media.file) != (media.size, media.mtime_ns):
                return None, size, f"{CHANGED}: its size or time is not what it was when it was indexed"
        except OSError as error:
            return None, 0, f"{UNREADABLE}: {error.strerror or error}"
        except Unusable as error:
            return None, 0, f"{UNREADABLE}: {error}"
        return content, size, ""


class _HashProgress:
    """Say every few seconds how far the hashing has come."""

    def __init__(self, count: int, log: Log) -> None:
        self._count, self._log, self._began = count, log, time.monotonic()
        self._reported_at, self._done, self._bytes = self._began, 0, 0

    def known(self, count: int) -> None:
        self._count -= count

    def add(self, size: int) -> None:
        self._done, self._bytes = self._done + 1, self._bytes + size
        now = time.monotonic()
        if now - self._reported_at < _SAY_EVERY_S:
            return
        self._reported_at, took = now, now - self._began
        left = (self._count - self._done) * took / self._done
        self._log(
            f"cache: {self._done:,} of {self._count:,} files are read once to hash their content, "
            f"{self._bytes / took / 2**20:.0f} MiB a second, {left / 60:.1f} min left"
        )
