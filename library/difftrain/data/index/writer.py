"""Writing an index: under a temporary name, whole, then renamed. Nothing half-made is ever picked up.

A finished index is a folder that never changes; `current` names the newest. Two processes that build at once each finish
a folder of their own, and the last one to be named wins: wasteful, never wrong.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from difftrain.contracts import DataFault, TrainingFault
from difftrain.data.index.clips import clip_of_json
from difftrain.data.index.index import (
    CURRENT,
    DATABASE,
    LONG_CAPTION,
    META,
    IndexColumns,
    IndexSummary,
    checksum_of,
    fingerprint_of,
    newest,
)
from difftrain.io.files import fsync_file, fsync_folder, write_text

_SCHEMA = """
CREATE TABLE files (
    id INTEGER PRIMARY KEY, source INTEGER NOT NULL, path TEXT NOT NULL, size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL, stamp TEXT NOT NULL, level INTEGER NOT NULL, shard INTEGER, caption TEXT);
CREATE TABLE records (
    row INTEGER PRIMARY KEY, file INTEGER NOT NULL, path TEXT, member TEXT, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL, captions TEXT NOT NULL,
    content BLOB, key BLOB NOT NULL, control TEXT, clip TEXT);
CREATE TABLE rejects (file INTEGER, path TEXT NOT NULL, reason TEXT NOT NULL);
"""
_ADD_RECORD = """
INSERT INTO records (file, path, member, offset, length, width, height, captions, content, key, control, clip)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_CHUNK = 1 << 16
_KEPT = 3  # finished indexes: runs that started before the data changed still read theirs
_STALE_S = 24 * 3600

RecordRow = tuple[int, str | None, str | None, int, int, int, int, str, bytes | None, bytes, str | None, str | None]


@dataclass(frozen=True)
class _Sorted:
    """What comes of one pass over all records."""

    columns: IndexColumns
    fingerprint: str
    duplicates: int | None
    long_captions: int
    empty_captions: int


class IndexWriter:
    """Build one index. `db` may be used for queries of the builder; `finish` or `discard` ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder)
            self.temporary = folder / f"tmp-{uuid.uuid4().hex}"
            self.temporary.mkdir()
            self.db = sqlite3.connect(self._uri(self.temporary / DATABASE), uri=True, isolation_level=None)
            # Nobody else sees this file before it is whole: no journal, no locks, one fsync at the end.
            self.db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;")
            self.db.executescript(_SCHEMA)

    @staticmethod
    def _uri(database: Path) -> str:
        return f"file:{quote(str(database))}?nolock=1"

    def attach(self, name: str, file: str) -> None:
        """Attach a scratch database that is gone when the index is finished."""
        self.db.execute(f"ATTACH DATABASE ? AS {name}", (self._uri(self.temporary / file),))
        self.db.executescript(f"PRAGMA {name}.journal_mode = OFF; PRAGMA {name}.synchronous = OFF;")

    def add_files(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add (id, source, path, size, mtime_ns, stamp, level, shard, caption)."""
        with self._transaction():
            self.db.executemany("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def add_records(self, rows: Iterable[RecordRow]) -> None:
        """Add (file, path, member, offset, length, width, height, captions as JSON, content, key, references, clip as JSON)."""
        with self._transaction():
            self.db.executemany(_ADD_RECORD, rows)

    def add_rejects(self, rows: Iterable[tuple[int | None, str, str]]) -> None:
        """Add (file, path, reason)."""
        with self._transaction():
            self.db.executemany("INSERT INTO rejects VALUES (?, ?, ?)", rows)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with disk_faults(self.folder):
            self.db.execute("BEGIN")
            yield
            self.db.execute("COMMIT")

    def finish(self, summary: IndexSummary) -> IndexSummary:
        """Sort, write the columns, make everything durable and give the index its name.

        summary: everything but count, fingerprint, duplicates, rejected and reasons, which are found here.
        """
        with disk_faults(self.folder):
            made = self._sort()
            columns = made.columns.present
            for name, column in columns.items():
                np.save(self.temporary / f"{name}.npy", column)

            # rejects are counted by kind: what stands before the colon of a reason
            reasons = dict(
                self.db.execute(
                    "SELECT CASE WHEN instr(reason, ':') THEN substr(reason, 1, instr(reason, ':') - 1) ELSE reason END"
                    " AS kind, count(*) FROM rejects GROUP BY kind ORDER BY count(*) DESC, kind"
                )
            )

            # the summary names the folder that the index will have
            target = self.folder / f"index-{uuid.uuid4().hex[:12]}"
            summary = replace(
                summary,
                folder=str(target),
                count=len(made.columns.row),
                fingerprint=made.fingerprint,
                duplicates=made.duplicates,
                long_captions=made.long_captions,
                empty_captions=made.empty_captions,
                rejected=sum(reasons.values()),
                reasons=reasons,
                checksums={name: checksum_of(self.temporary / f"{name}.npy") for name in columns},
            )

            # all of it is on the disk before it has its name: nobody finds half an index
            self.db.close()
            kept = {DATABASE, META, *(f"{name}.npy" for name in columns)}
            (self.temporary / META).write_text(summary.to_json(), encoding="utf-8")
            for path in list(self.temporary.iterdir()):
                if path.name in kept:
                    fsync_file(path)
                else:
                    path.unlink()
            fsync_folder(self.temporary)
            self.temporary.rename(target)
            self._name(target)
        return summary

    def discard(self) -> None:
        """Remove everything this writer has made."""
        self.db.close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _sort(self) -> _Sorted:
        """Give ids by the rank of the key, so that neither listing nor insertion order shows anywhere."""
        (count,) = self.db.execute("SELECT count(*) FROM records").fetchone()
        if count >= 1 << 32:
            raise DataFault(f"{count} records: an index holds at most 4,294,967,295")

        # whole columns in memory, filled in chunks in the order of insertion
        keys = np.empty((count, 16), np.uint8)
        hashed = self.db.execute("SELECT 1 FROM records WHERE content IS NULL LIMIT 1").fetchone() is None
        content = np.empty((count if hashed else 0, 16), np.uint8)
        numbers, clips = np.empty((count, 6), np.uint32), np.array([[1, 0, 0]], np.uint32).repeat(count, 0)
        cursor = self.db.execute(
            "SELECT records.key, width, height, source, coalesce(shard, 0), row,"
            " (length(captions) > ?) + 2 * (captions = '[\"\"]'), records.content, records.clip"
            " FROM records JOIN files ON files.id = records.file ORDER BY row",
            (LONG_CAPTION,),
        )
        start = 0
        while rows := cursor.fetchmany(_CHUNK):
            stop = start + len(rows)
            keys[start:stop] = np.frombuffer(b"".join(row[0] for row in rows), np.uint8).reshape(-1, 16)
            numbers[start:stop] = [row[1:7] for row in rows]
            if hashed:
                content[start:stop] = np.frombuffer(b"".join(row[7] for row in rows), np.uint8).reshape(-1, 16)
            for at, row in enumerate(rows, start):
                if row[8]:
                    clip = clip_of_json(row[8])
                    clips[at] = clip.frames, clip.first, clip.start_ms
            start = stop

        # sorted by key; records of the same content are counted, and kept
        order = sort_keys(keys)
        width, height, source, shard, row = (numbers[order, i] for i in range(5))
        moving = clips[order] if (clips[:, 0] > 1).any() else None
        columns = IndexColumns(keys[order], width, height, source.astype(np.uint16), shard, row, moving)
        duplicates = count - _distinct(content) if hashed else None
        length = numbers[:, 5]  # 1: long, 2: empty
        return _Sorted(columns, fingerprint_of(columns), duplicates, int((length == 1).sum()), int((length == 2).sum()))

    def _name(self, target: Path) -> None:
        """Make `target` the current index and remove those that nobody starts from any more."""
        fsync_folder(self.folder)
        write_text(self.folder / CURRENT, target.name)
        finished = [path for path in self.folder.glob("index-*") if path != target]
        for path in sorted(finished, key=_age, reverse=True)[_KEPT - 1 :]:
            if path != newest(self.folder):
                shutil.rmtree(path, ignore_errors=True)


def sort_keys(keys: np.ndarray) -> np.ndarray:
    """Return the order of keys (N, 16) uint8 compared byte by byte."""
    words = np.ascontiguousarray(keys).view(">u8").astype(np.uint64).reshape(-1, 2)
    order: np.ndarray = np.argsort(words[:, 0], kind="stable")
    first = words[order, 0]
    if len(order) and bool((first[1:] == first[:-1]).any()):
        order = np.lexsort((words[:, 1], words[:, 0]))
        ordered = words[order]
        if bool((ordered[1:] == ordered[:-1]).all(axis=1).any()):
            raise AssertionError("two records have the same key: a source gave the same name twice")
    return order


def _distinct(hashes: np.ndarray) -> int:
    words = np.ascontiguousarray(hashes).view(np.uint64)
    ordered = words[np.lexsort((words[:, 1], words[:, 0]))]
    return int((ordered[1:] != ordered[:-1]).any(axis=1).sum()) + 1 if len(ordered) else 0


@contextmanager
def disk_faults(folder: Path) -> Iterator[None]:
    """Say where the index was to be written when the disk refuses it.

    Raises: TrainingFault for a full or read-only disk.
    """
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        free = _free_mib(folder)
        raise TrainingFault(
            f"{folder}: the index cannot be written ({error}; {free} MiB free there). "
            "An earlier index is untouched. Free some space, or name another folder with data.cache_dir."
        ) from error


def _free_mib(folder: Path) -> int | str:
    try:
        return shutil.disk_usage(folder if folder.exists() else folder.parent).free >> 20
    except OSError:
        return "?"


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _remove_stale(folder: Path) -> None:
    """Remove what a killed build left behind, a day later: nobody builds for that long."""
    for path in (*folder.glob("tmp-*"), *folder.glob(".*.tmp")):
        if _age(path) < time.time() - _STALE_S:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
