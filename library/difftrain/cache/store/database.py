"""The file metadata.db: an SQLite database that is never changed where others have it open, and a checksum behind it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import tempfile
from contextlib import closing
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from difftrain.cache.store.folder import disk_faults
from difftrain.cache.store.format import Damaged, OtherFormat, crc32c
from difftrain.io.files import atomic_write

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
        raise Damaged("it is no SQLite database")
    version = int.from_bytes(header[60:64], "big")  # PRAGMA user_version
    if version != VERSION:
        raise OtherFormat(f"it is of version {version}, this program reads version {VERSION}")
    if size > 0:
        file.seek(size)
        magic, said, crc = _TAIL.unpack(file.read())
        if (magic, said) == (_MAGIC, size):
            return size, crc
    raise Damaged("its end is missing")


def check(path: Path) -> None:
    """Read all of a database and compare its checksum. Raises OSError, Damaged, OtherFormat."""
    with path.open("rb") as file:
        _copy(file, None)


def _copy(source: IO[bytes], target: IO[bytes] | None) -> None:
    """Copy a database without what stands behind it. Raises OSError, Damaged, OtherFormat."""
    size, wanted = check_ends(source)
    source.seek(0)
    crc = 0
    while size:
        piece = source.read(min(size, _CHUNK))
        if not piece:
            raise Damaged("it became shorter while it was read")
        crc, size = crc32c(piece, crc), size - len(piece)
        if target is not None:
            target.write(piece)
    if crc != wanted:
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
