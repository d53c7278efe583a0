"""Freeing what no configuration wants any more, beside builds and readers, so that a kill at any moment loses nothing.

For a group of segments, in this order: what is wanted of them is copied to new segments; all of their entries are dropped;
metadata.db is made anew, which then names none of them; what configurations want is read once more, and if one wants by now
what would be lost, the drops are taken back; only then the files go. A build writes down what it wants before it looks what
is there, so it either finds an entry gone and encodes it, or is found here in time.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from difftrain.cache.store import references
from difftrain.cache.store.folder import CacheFolder, clean, disk_faults
from difftrain.cache.store.index import Metadata, SegmentInfo, merge
from difftrain.cache.store.references import Reference
from difftrain.cache.tools.compact import (
    EntryMover,
    count_still_referenced,
    delete_segment,
    referenced_numbers,
    retry_while_changing,
    why_still_open,
)
from difftrain.cache.tools.info import size_text
from difftrain.cache.tools.repair import ASIDE, refuse_read_only
from difftrain.cache.tools.segment_check import JournalScan, read_journal
from difftrain.cache.tools.verify import SEGMENT_FILE
from difftrain.contracts import DataFault

DAY_S = 24 * 3600.0
KEPT_FROM = 0.5  # share of a segment's bytes in use from which it stays as it is
GROUP_ROWS = 10_000_000  # entries of segments that go together
SAID_FROM = 1_000_000  # entries from which it takes long enough to say what is done


@dataclass
class _SparseSegment:
    """A segment of which less is wanted than is worth its room."""

    info: SegmentInfo
    journal: JournalScan
    size: int  # of its files
    live: int  # entries that are wanted
    live_bytes: int


@dataclass
class _Freed:
    """What was freed, or would be."""

    deleted: int = 0
    rewritten: int = 0
    entries: int = 0
    freed: int = 0
    lines: list[str] = field(default_factory=list)


def collect_garbage(folder: CacheFolder, *, unused_days: int | None = None, dry_run: bool = False) -> Iterator[str]:
    """Free what no configuration wants, and yield what is done. Raises ConfigFault, DataFault, TrainingFault."""
    if not dry_run:
        refuse_read_only(folder, "clean it up")
    kept, forgotten = retry_while_changing(folder, lambda every: _split_by_age(folder, every, unused_days))
    for use in forgotten:
        yield f"use {use.id}: not used for {unused_days} days or more, {'would be ' if dry_run else ''}forgotten"
    if not dry_run:
        for use in forgotten:
            references.remove(folder, use.id)
        merge(folder)

    # what no reference wants
    known = Metadata(folder.database)
    if known.count and not kept and not forgotten:
        raise DataFault(
            f"{folder.path}: no known configuration uses it, so everything would be removed; nothing was "
            "removed. Build or train with it once, or delete the folder"
        )
    if known.count > SAID_FROM:
        yield f"looking up the entries of {len(kept):,} configurations want of {known.count:,} entries"
    needed = referenced_numbers(folder, known, {use.id for use in forgotten})
    sparse, notes = _sparse(folder, known, needed)
    yield from notes

    # free it, a group of segments after another
    done = _Freed()
    if dry_run:
        for segment in sparse:
            _count(done, segment)
        done.freed = sum(segment.size - segment.live_bytes for segment in sparse)
    else:
        for group in _groups(sparse, folder):
            yield from _free(folder, known, needed, group, done)
        done.freed += _sweep(folder)
    would = "would be " if dry_run else ""
    yield (
        f"{folder.path}: {size_text(done.freed)} {would}freed: {done.deleted:,} segments {would}deleted, "
        f"{done.rewritten:,} rewritten, {done.entries:,} entries {would}removed; {_count_live(known, sparse):,} stay"
    )


def _count_live(known: Metadata, sparse: Iterable[_SparseSegment]) -> int:
    return known.count - sum(segment.info.entries - segment.live for segment in sparse)


def _count(done: _Freed, segment: _SparseSegment) -> None:
    done.deleted += not segment.live
    done.rewritten += bool(segment.live)
    done.entries += segment.info.entries - segment.live


def _split_by_age(
    folder: CacheFolder, every: list[Reference], unused_days: int | None
) -> tuple[list[Reference], list[Reference]]:
    """Part the uses that count from those that are too old, by the clock of the file system alone."""
    if unused_days is None:
        return every, []
    try:
        with tempfile.TemporaryFile(dir=folder.references_dir) as probe:
            now = os.fstat(probe.fileno()).st_mtime
    except OSError:  # a cache that is only looked at
        now = max((use.used_at for use in every), default=0.0)
    old = [use for use in every if use.used_at <= now - unused_days * DAY_S]
    return [use for use in every if use not in old], old


# --- what there is to free ---


def _sparse(folder: CacheFolder, known: Metadata, needed: np.ndarray) -> tuple[list[_SparseSegment], list[str]]:
    """Return segments of which too little is wanted, and why some must stay."""
    live, live_bytes = _live(known, needed)
    rows = dict(known.query("SELECT name, rows FROM segments"))
    sparse, notes = [], []
    for info in known.segments():
        size = _size(folder, info.name)
        kept = live_bytes.get(info.name, 0)
        if size is None or kept >= KEPT_FROM * size:
            continue
        journal = read_journal(folder.segments, info.name)
        if why := why_still_open(folder, journal, info.header):
            notes.append(f"segments/{info.name}: {why}; it stays")
        elif journal.damages:
            notes.append(f"segments/{info.name}: {journal.damages[0].says}; it stays: difftrain cache repair first")
        elif len(journal.rows) == rows[info.name]:  # or somebody has just added to it
            sparse.append(_SparseSegment(info, journal, size, live.get(info.name, 0), kept))
    return sparse, notes


def _live(known: Metadata, needed: np.ndarray) -> tuple[dict[str, int], dict[str, int]]:
    """Count wanted entries and their bytes in each segment."""
    counts: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for number, segment, length in known.query("SELECT number, segment, length FROM entries"):
        if needed[number >> 3] & (1 << (number & 7)):
            counts[segment] += 1
            sizes[segment] += length
    names = dict(known.query("SELECT id, name FROM segments"))
    return {names[key]: value for key, value in counts.items()}, {names[key]: value for key, value in sizes.items()}


def _size(folder: CacheFolder, name: str) -> int | None:
    try:
        return sum(folder.file(name, suffix).stat().st_size for suffix in (".bin", ".idx"))
    except OSError:
        return None  # taken away meanwhile


def _groups(segments: list[_SparseSegment], folder: CacheFolder) -> Iterator[list[_SparseSegment]]:
    """Yield segments that go together, first those of which nothing stays: then there is room for copies of the rest."""
    group: list[_SparseSegment] = []
    rows = size = 0
    for segment in sorted(segments, key=lambda segment: segment.live > 0):
        room = os.statvfs(folder.segments)
        if group and (rows > GROUP_ROWS or size + segment.live_bytes > room.f_bavail * room.f_frsize // 2):
            yield group
            group, rows, size = [], 0, 0
        group.append(segment)
        rows, size = rows + len(segment.journal.rows), size + segment.live_bytes
    if group:
        yield group


# --- freeing it ---


def _free(
    folder: CacheFolder, known: Metadata, needed: np.ndarray, group: list[_SparseSegment], done: _Freed
) -> Iterator[str]:
    """Copy what is wanted of some segments, and take them away."""
    mover = EntryMover(folder)
    going: dict[str, np.ndarray] = {}
    for segment in group:
        name, rows = segment.info.name, segment.journal.rows
        if segment.live:
            kept = rows[_kept(known, needed, name, rows)]
            if not mover.take(name, segment.journal.header or {}, kept).all():
                yield f"segments/{name}: some entries cannot be read; it stays: difftrain cache repair first"
                continue
        going[name] = rows
    mover.close()
    # also what others have dropped: they may take that back
    file = references.add_many(folder, {name: rows["offset"] for name, rows in going.items()})
    lost = None
    try:
        lost = count_still_referenced(folder, going)
    finally:
        if lost != 0 and file is not None:
            file.unlink(missing_ok=True)
            merge(folder)
    if lost:
        yield f"{lost:,} entries of {len(going):,} segments are used by a build that has just begun: they stay"
        return
    for segment in group:
        if segment.info.name in going:
            done.freed += delete_segment(folder, segment.info.name)
            _count(done, segment)
    done.freed -= mover.bytes
    references.prune(folder)
    merge(folder)


def _kept(known: Metadata, needed: np.ndarray, name: str, rows: np.ndarray) -> np.ndarray:
    """Tell which rows of a segment count, rather than a copy elsewhere, and are wanted."""
    kept = np.zeros(len(rows), bool)
    for at, (row, offset) in enumerate(zip(known.rows(rows["address"]), rows["offset"].tolist(), strict=True)):
        if row is not None and (row.segment, row.offset) == (name, offset):
            kept[at] = needed[row.number >> 3] >> (row.number & 7) & 1
    return kept


def _sweep(folder: CacheFolder) -> int:
    """Delete segments that a repair set aside, and what killed processes left half written; return the bytes."""
    freed = 0
    with disk_faults(folder.path):
        for path in sorted((folder.path / ASIDE).rglob("*"), reverse=True):
            if path.is_file() and (SEGMENT_FILE.fullmatch(path.name) or path.name == folder.database.name):
                freed += path.stat().st_size
                path.unlink(missing_ok=True)
        for leftover in sorted([folder.path / ASIDE, *(folder.path / ASIDE).rglob("*")], reverse=True):
            with suppress(OSError):  # a file, or it holds something else
                leftover.rmdir()
        for name in (folder.segments, folder.references_dir, folder.tombstones_dir):
            clean(name)
    return freed
