"""Sources that read the same, as one folder at several resolutions: what is read of the first counts for all.

The first of several alike is read; a shared source is one of the others. Its records differ in their keys alone, since
the source's name is in those. And what a set of data is indexed for
the first time has often been read for another one: of the folders that both name, its index is taken over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from difftrain.contracts import DataFault
from difftrain.data.index.index import IndexSummary, newest
from difftrain.data.index.inspection import record_key
from difftrain.data.index.writer import IndexWriter, disk_faults
from difftrain.data.sources import SourceInfo
from difftrain.data.sources.base import key_path

KINDS = ("folder", "tar", "parquet")  # whose keys are made of the path in the source and the member alone
_CHUNK = 1 << 16

# shift: from the number of a file of the first to that of the shared source's; `twins` are the shared sources
_SCHEMA = """
CREATE TABLE scan.twins (source INTEGER PRIMARY KEY, name TEXT, first INTEGER, shift INTEGER);
CREATE INDEX scan.by_first ON twins (first);
"""
_FILES = """
INSERT INTO main.files (source, path, size, mtime_ns, stamp, level, shard, caption)
SELECT ?, path, size, mtime_ns, stamp, level, shard, caption FROM main.files WHERE source = ? ORDER BY id
"""
_RECORDS = """
INSERT INTO main.records (file, path, member, offset, length, width, height, captions, content, key, control, clip)
SELECT f.id + t.shift, r.path, r.member, r.offset, r.length, r.width, r.height, r.captions, r.content,
       record_key(t.name, f.path, r.member), r.control, r.clip
FROM main.records r JOIN main.files f ON f.id = r.file JOIN scan.twins t ON t.first = f.source
WHERE r.row > ? AND r.row <= ? AND NOT EXISTS (SELECT 1 FROM scan.same s WHERE s.new = f.id + t.shift)
ORDER BY r.row, t.source
"""
_REJECTS = """
INSERT INTO main.rejects
SELECT f.id + t.shift, r.path, r.reason
FROM main.rejects r JOIN main.files f ON f.id = r.file JOIN scan.twins t ON t.first = f.source
WHERE NOT EXISTS (SELECT 1 FROM scan.same s WHERE s.new = f.id + t.shift)
"""


def firsts_of(infos: Sequence[SourceInfo]) -> list[int]:
    """Return for each source the first one that reads the same, by their ordinals: its own where there is none before."""
    first: dict[SourceInfo, int] = {}
    return [first.setdefault(info.reading, info.ordinal) if info.kind in KINDS else info.ordinal for info in infos]


def about_shared_sources(infos: Sequence[SourceInfo]) -> Iterator[str]:
    """Say which folders are read once for several uses."""
    for ordinal, uses in Counter(firsts_of(infos)).items():
        if uses > 1:
            info = infos[ordinal]
            yield f"{info.root}{info.prefix and '/' + info.prefix}: used {uses} times, indexed once"


def list_shared_sources(writer: IndexWriter, infos: Sequence[SourceInfo]) -> None:
    """Give every shared source the files of its first."""
    writer.db.create_function("record_key", 3, _key, deterministic=True)
    with disk_faults(writer.folder):
        writer.db.executescript(_SCHEMA)
        for info, first in zip(infos, firsts_of(infos), strict=True):
            if first != info.ordinal:
                writer.db.execute(_FILES, (info.ordinal, first))
                shift = _first_file(writer, info.ordinal) - _first_file(writer, first)
                writer.db.execute("INSERT INTO scan.twins VALUES (?, ?, ?, ?)", (info.ordinal, info.name, first, shift))


def _key(name: str, path: str, member: str | None) -> bytes:
    return record_key(name, key_path(path, member))


def _first_file(writer: IndexWriter, source: int) -> int:
    row = writer.db.execute("SELECT coalesce(min(id), 0) FROM main.files WHERE source = ?", (source,)).fetchone()
    return int(row[0])


def count_copied(writer: IndexWriter) -> int:
    """Return how many files of shared sources are not known from before, and come from their firsts."""
    row = writer.db.execute(
        "SELECT count(*) FROM main.files f JOIN scan.twins t ON t.source = f.source"
        " WHERE NOT EXISTS (SELECT 1 FROM scan.same s WHERE s.new = f.id)"
    ).fetchone()
    return int(row[0])


def copy_to_shared_sources(writer: IndexWriter) -> None:
    """Give the shared sources what was read of the files of their firsts, whether now or before."""
    db = writer.db
    (last,) = db.execute("SELECT coalesce(max(row), 0) FROM main.records").fetchone()
    with disk_faults(writer.folder):
        if db.execute("SELECT 1 FROM scan.twins LIMIT 1").fetchone():
            for start in range(0, last, _CHUNK):  # SQLite puts what it copies within a table aside
                db.execute(_RECORDS, (start, min(start + _CHUNK, last)))
            db.execute(_REJECTS)


def nearest(own: Path, infos: Sequence[SourceInfo]) -> IndexSummary | None:
    """Return the index of other data, among those that lie beside a folder, that knows most of these sources."""
    needed = {info.reading for info in infos if info.kind in KINDS}
    best: tuple[int, IndexSummary] | None = None
    for folder in sorted(own.parent.glob("*/")):
        if folder == own:
            continue
        latest = newest(folder)
        try:
            summary = IndexSummary.load(latest) if latest else None
        except DataFault:
            continue  # of another version, or damaged: reported by the run that uses it
        if summary is not None:
            common = len(needed & {info.reading for info in summary.sources if info.kind in KINDS})
            if common > (best[0] if best else 0):
                best = common, summary
    return best[1] if best else None
