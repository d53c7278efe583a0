"""Rows of many journals in the order of their addresses, in bounded memory: sorted runs on disk, then range by range."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np

from difftrain.cache.store.folder import IDX, CacheFolder, disk_faults
from difftrain.cache.store.format import (
    HEADER_START,
    ROW,
    Damaged,
    OtherFormat,
    crc32c,
    header_size,
    read_header,
    whole_rows,
)
from difftrain.contracts import TrainingFault
from difftrain.io.files import atomic_write

RUN_ROWS = 1 << 20  # sorted in memory at once
SHARES = 1 << 12  # of the addresses, which are hashes: about equally many rows in each
ENTRY = np.dtype(  # a row of a journal, with its address as numbers that sort as its bytes do
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("segment", "<u4"),
        ("crc", "<u4"),
        ("kind", "<u4"),
    ]
)


class Journal:
    """The journal of one segment. Raises Damaged where its header is."""

    def __init__(self, folder: CacheFolder, segment: str) -> None:
        self.segment, self.sealed = segment, folder.sealed(segment)  # first: what is sealed now is whole below
        with folder.open_file(segment, IDX) as file:  # `first`: where its rows begin
            start = file.read(HEADER_START)
            self.header, self.first = read_header(start + file.read(max(0, header_size(start) - len(start))))
        self._folder = folder

    def rows(self, skip: int = 0) -> Iterator[tuple[np.ndarray, int]]:
        """Yield right rows behind the first `skip`, and how many rows have been read by then, right or damaged.

        A sealed journal is whole, so a damaged row in it is one entry lost. In any other the first row that is not right
        is where its writer was killed, or where it is writing just now: the rest is for the next time.
        """
        with self._folder.open_file(self.segment, IDX) as file:
            file.seek(self.first + skip * ROW.itemsize)
            while buffer := file.read(RUN_ROWS * ROW.itemsize):
                rows, right = whole_rows(buffer)
                if not self.sealed and not right.all():
                    rows = rows[: int(np.argmin(right))]
                    if len(rows):
                        yield rows, skip + len(rows)
                    return
                skip += len(rows)
                if len(rows):
                    yield rows[right], skip

    def length(self) -> int:
        """Return how many whole rows its file has room for."""
        with self._folder.open_file(self.segment, IDX) as file:
            return (file.seek(0, 2) - self.first) // ROW.itemsize


class RowSorter:
    """Take rows in the order of their segments' names, and give them back in the order of their addresses."""

    def __init__(self, scratch: Path) -> None:
        """Begin. scratch: a folder; what is put there has no name and is gone with this process."""
        self.count = 0
        self._scratch = scratch
        self._waiting: list[np.ndarray] = []
        self._waits = 0
        self._file: IO[bytes] | None = None
        self._runs: list[np.ndarray] = []  # where each share of the addresses begins in each run, as rows of the file

    def add(self, rows: np.ndarray, segment: int) -> None:
        """Take rows of a journal. Raises TrainingFault where there is no room for them."""
        taken = np.empty(len(rows), ENTRY)
        words = np.ascontiguousarray(rows["address"]).view(">u8").reshape(-1, 2)
        taken["high"], taken["low"], taken["segment"] = words[:, 0], words[:, 1], segment
        for name in ("offset", "length", "crc", "kind"):
            taken[name] = rows[name]
        self._waiting.append(taken)
        self._waits += len(taken)
        self.count += len(taken)
        if self._waits >= RUN_ROWS:
            self._spill()

    def sorted(self) -> Iterator[np.ndarray]:
        """Yield all rows in order, of equal addresses the first that was taken. Raises OSError."""
        if self._file is None:
            if self._waiting:
                yield first_of_equal(in_order(np.concatenate(self._waiting)))
            return
        if self._waiting:
            self._spill()
        step = max(1, SHARES // len(self._runs))
        for share in range(0, SHARES, step):
            rows = [self._read(cuts[share], cuts[min(share + step, SHARES)]) for cuts in self._runs]
            yield first_of_equal(in_order(np.concatenate(rows)))

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115
        run = in_order(np.concatenate(self._waiting))
        shares = np.arange(SHARES, dtype=np.uint64) << np.uint64(64 - SHARES.bit_length() + 1)
        cuts = np.append(np.searchsorted(run["high"], shares), len(run))
        self._runs.append(cuts + (self._runs[-1][-1] if self._runs else 0))
        try:
            self._file.write(run.tobytes())
            self._file.flush()
        except OSError as error:
            raise TrainingFault(cannot_build(self._scratch, error)) from error
        self._waiting, self._waits = [], 0

    def _read(self, start: int, stop: int) -> np.ndarray:
        assert self._file is not None
        self._file.seek(int(start) * ENTRY.itemsize)
        return np.frombuffer(self._file.read(int(stop - start) * ENTRY.itemsize), ENTRY)


def cannot_build(scratch: Path, error: Exception) -> str:
    """Say where there is no room."""
    return f"{scratch}: the index of the feature cache cannot be built there ({error}). Free some space, or set TMPDIR"


def in_order(rows: np.ndarray) -> np.ndarray:
    """Sort rows by address; those of equal addresses stay as they are."""
    return rows[order_of(rows["high"], rows["low"])]


def order_of(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return the order of addresses, which keeps that of equal ones. Shapes: (N,) uint64 each."""
    order = np.argsort(high, kind="stable")
    firsts, seconds = high[order], low[order]
    if bool(((firsts[1:] == firsts[:-1]) & (seconds[1:] != seconds[:-1])).any()):
        order = np.lexsort((low, high))  # different ones that begin alike
    return order


def first_of_equal(rows: np.ndarray) -> np.ndarray:
    """Leave out rows whose address the row before them has."""
    again = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
    return rows if not again.any() else rows[np.concatenate([[True], ~again])]


def addresses_of(rows: np.ndarray) -> list[bytes]:
    """Return the addresses of rows."""
    words = np.empty((len(rows), 2), ">u8")
    words[:, 0], words[:, 1] = rows["high"], rows["low"]
    content = words.tobytes()
    return [content[start : start + 16] for start in range(0, len(content), 16)]


# --- The file metadata.db: an SQLite database that is never changed where others have it open, and a checksum behind it


VERSION = 1  # of the tables; raise it when they change: an older database is built again
SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, header TEXT NOT NULL, sealed INTEGER NOT NULL,
    rows INTEGER NOT NULL, entries INTEGER NOT NULL, bytes INTEGER NOT NULL, end INTEGER NOT NULL);
CREATE TABLE entries (
    address BLOB PRIMARY KEY, number INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, crc INTEGER NOT NULL, kind INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX rejects ON entries (kind) WHERE kind = 1;
"""
_TAIL = struct.Struct("<16sQI4x")  # magic, size of the database, its checksum
_MAGIC = b"difftrain index\n"
_CHUNK = 1 << 22
_HEADER = 100  # bytes of SQLite's own


def connect(path: Path) -> sqlite3.Connection:
    """Open a database that nobody changes. Raises FileNotFoundError, OSError, Damaged, OtherFormat."""
    with path.open("rb") as file:
        check_ends(file)
    return sqlite3.connect(_uri(path, "mode=ro&immutable=1"), uri=True, isolation_level=None, check_same_thread=False)


def check_ends(file: IO[bytes]) -> tuple[int, int]:
    """Return size and checksum that stand behind a database. Raises Damaged, OtherFormat."""
    size = file.seek(0, os.SEEK_END) - _TAIL.size
    file.seek(0)
    header = file.read(_HEADER)
    if not header.startswith(b"SQLite format 3\0") or len(header) < _HEADER:
        raise Damaged("it is not an SQLite database")
    version = int.from_bytes(header[60:64], "big")  # PRAGMA user_version
    if version != VERSION:
        raise OtherFormat(f"it is of version {version}, this program reads version {VERSION}")
    if size > 0:
        file.seek(size)
        magic, rows, crc = _TAIL.unpack(file.read())
        if (magic, rows) == (_MAGIC, size):
            return size, crc
    raise Damaged("its end is missing")


def check(path: Path) -> None:
    """Read all of a database and compare its checksum. Raises OSError, Damaged, OtherFormat."""
    with path.open("rb") as file:
        _copy(file, None)


def _copy(source: IO[bytes], target: IO[bytes] | None) -> None:
    """Copy a database without what stands behind it. Raises OSError, Damaged, OtherFormat."""
    size, expected = check_ends(source)
    source.seek(0)
    crc = 0
    while size:
        piece = source.read(min(size, _CHUNK))
        if not piece:
            raise Damaged("it became shorter while it was read")
        crc, size = crc32c(piece, crc), size - len(piece)
        if target is not None:
            target.write(piece)
    if crc != expected:
        raise Damaged("its checksum differs")


class DatabaseBuild:
    """A database being built, in a file without a name that is gone with this process."""

    def __init__(self, scratch: Path, base: Path | None) -> None:
        """Begin with the tables of `base`, or with empty ones. Raises OSError, Damaged, OtherFormat."""
        handle, name = tempfile.mkstemp(prefix="difftrain-", suffix=".db", dir=scratch)
        path = Path(name)
        self._file = os.fdopen(handle, "r+b")
        try:
            if base is not None:
                with base.open("rb") as old:
                    _copy(old, self._file)
                self._file.flush()
            self.db = sqlite3.connect(_uri(path, "nolock=1"), uri=True, isolation_level=None)
            # Nobody else sees this file: no journal, no locks, no waiting for the disk.
            self.db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;")
            if base is None:
                self.db.executescript(f"{SCHEMA} PRAGMA user_version = {VERSION};")
            self.db.execute("SELECT count(*) FROM meta").fetchone()  # so that it has its file open
        except BaseException:
            self._file.close()
            raise
        finally:
            path.unlink()

    def publish(self, target: Path) -> None:
        """Copy it beside the target with its checksum, make it durable and rename it. Raises TrainingFault."""
        self.db.close()
        with disk_faults(target.parent), atomic_write(target) as file:
            crc, size = 0, 0
            self._file.seek(0)
            while piece := self._file.read(_CHUNK):
                crc, size = crc32c(piece, crc), size + len(piece)
                file.write(piece)
            file.write(_TAIL.pack(_MAGIC, size, crc))

    def close(self) -> None:
        """Give back its room."""
        self.db.close()
        self._file.close()


def scratch_for(size: int, folder: Path) -> Path:
    """Return where so many bytes can be put while a database is built: the temporary folder, else the cache itself."""
    local = Path(tempfile.gettempdir())
    return local if shutil.disk_usage(local).free > 2 * size else folder


def meta(db: sqlite3.Connection) -> dict[str, Any]:
    """Return the facts of a database. Raises sqlite3.Error."""
    with closing(db.execute("SELECT name, value FROM meta")) as cursor:
        return dict(cursor.fetchall())


def _uri(path: Path, options: str) -> str:
    return f"file:{quote(str(path))}?{options}"
