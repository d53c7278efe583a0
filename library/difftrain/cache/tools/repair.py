"""Making a damaged cache whole again: what is damaged is dropped, so that the next build encodes just that anew.

In this order, so that a kill at any moment loses nothing that is whole: what is whole in files that cannot be believed any
more is copied to new segments; what is damaged, and what was copied, is dropped; metadata.db is made anew, which then
names none of the old places; the old files are set aside.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.cache.store import journals, references
from difftrain.cache.store.folder import BIN, IDX, CacheFolder, disk_faults
from difftrain.cache.store.format import ROW
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.tools.compact import EntryMover, why_still_open
from difftrain.cache.tools.segment_check import JournalScan, find, read_journal
from difftrain.cache.tools.verify import Progress, VerifyReport, lacks, verify
from difftrain.contracts import ConfigFault, DataFault, Fault
from difftrain.io.files import fsync_folder

ASIDE = "set_aside"


def refuse_read_only(folder: CacheFolder, what: str) -> None:
    """Raises ConfigFault where a cache cannot be changed."""
    if not folder.writable:
        says = f"{str(folder.path)!r} cannot be written"
        raise ConfigFault([Fault("CACHE", says, f"{what} where it can, or give this user the right to")])


def repair(
    folder: CacheFolder, *, workers: int | None = None, progress: Progress = lambda done, total: None
) -> Iterator[str]:
    """Make a cache whole, and yield what is done. Raises ConfigFault, TrainingFault, DataFault."""
    refuse_read_only(folder, "repair it")
    report = verify(folder, workers=workers, progress=progress)
    yield from (str(damage) for damage in report.damages)
    if not report.damages:
        yield f"{folder.path}: is intact; nothing to repair"
        return
    aside = folder.path / ASIDE / uuid.uuid4().hex
    yield from _lists(folder, report, aside)
    if report.database is None:
        yield from _set_aside(folder, folder.database, aside)
    yield from _segments(folder, report, aside)
    _unmark(folder)
    yield f"{folder.path}: repaired; build it again with the same configuration to encode what was dropped"


def _unmark(folder: CacheFolder) -> None:
    """Let no configuration be trusted to have all of its entries that has not."""
    known = Metadata(folder.database)
    for use in references.all_references(folder):
        if use.complete and any(lacks(use, known).values()):
            with suppress(FileNotFoundError):  # forgotten meanwhile
                references.mark_complete(folder, use.id, complete=False)


def _lists(folder: CacheFolder, report: VerifyReport, aside: Path) -> Iterator[str]:
    """Set aside what is no file of a cache, and lists that cannot be read."""
    for file in (*report.foreign, *report.drops):
        yield from _set_aside(folder, folder.path / file, aside)
    for use in report.uses:
        yield f"uses/{use}: the entries of this configuration are no longer known; until it is built again, gc frees them"
        for path in (folder.references_dir / f"{use}.json", *folder.references_dir.glob(f"{use}-*.npy")):
            yield from _set_aside(folder, path, aside)


def _set_aside(folder: CacheFolder, path: Path, aside: Path) -> Iterator[str]:
    """Move a file out of the way; delete it where it is empty."""
    with disk_faults(folder.path), suppress(FileNotFoundError):
        if path.is_file() and not path.stat().st_size:
            path.unlink()
            yield f"{path.relative_to(folder.path)}: is empty, deleted"
            return
        target = aside / path.relative_to(folder.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
        fsync_folder(path.parent)
        yield f"{path.relative_to(folder.path)}: set aside as {target.relative_to(folder.path)}"


# --- segments ---


def _segments(folder: CacheFolder, report: VerifyReport, aside: Path) -> Iterator[str]:
    """Drop damaged entries, and give whole ones of broken files new places."""
    places = [(checked.name, offset) for checked in report.hurt.values() for offset in checked.bad]
    # damaged entries count no longer
    lost, broken, mover = len(places), [], EntryMover(folder)
    references.add(folder, places)
    dropped = references.offsets_of(folder)

    # whole ones of broken files go to new segments
    for name, known in _known(folder, report).items():
        journal = read_journal(folder.segments, name)
        header = journal.header or _header(folder, name)
        if why := why_still_open(folder, journal, header):
            yield f"segments/{name}: {why}; it is left as it is: repair again when that build has ended"
            continue
        rows = _countable(journal, known, dropped.get(name))
        moved = mover.take(name, header, rows)
        lost += int((~moved).sum())
        broken.append((journal, rows))
        if moved.any():
            yield f"segments/{name}: {int(moved.sum()):,} intact entries go to a new segment"
    mover.close()

    # the broken files are set aside once nothing of them counts
    references.add_many(folder, {journal.name: rows["offset"] for journal, rows in broken})
    merged = merge(folder)
    yield f"{lost:,} damaged entries are dropped; metadata.db has {merged.entries:,} entries"
    for journal, _ in broken:
        for suffix in (BIN, IDX):  # the payloads first: a journal alone, all of whose rows are dropped, is no damage
            if (path := find(folder.segments, journal.name, suffix)) is not None:
                yield from _set_aside(folder, path, aside)
    if broken:
        references.prune(folder)
        merge(folder)


def _countable(journal: JournalScan, known: np.ndarray, dropped: np.ndarray | None) -> np.ndarray:
    """Return the rows that count: the journal's, and those that only metadata.db still knows."""
    rows = np.concatenate([journal.rows, known])
    _, first = np.unique(rows["offset"], return_index=True)
    rows = rows[first]
    return rows if dropped is None else rows[~np.isin(rows["offset"], dropped)]


def _known(folder: CacheFolder, report: VerifyReport) -> dict[str, np.ndarray]:
    """Return what metadata.db knows of the segments whose files are broken, as rows of journals."""
    known = {name: np.empty(0, ROW) for name, checked in report.hurt.items() if checked.rewrite}
    if report.database is None or not known:
        return known
    with closing(journals.connect(folder.database)) as db:
        ids = {number: name for number, name in db.execute("SELECT id, name FROM segments") if name in known}
        requested = ",".join(map(str, ids))
        query = "SELECT segment, address, offset, length, crc, kind FROM entries WHERE segment IN"
        rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in known}
        for number, *row in db.execute(f"{query} ({requested})"):
            rows[ids[number]].append((*row, 0, 0))
    return {name: np.array(row, ROW) for name, row in rows.items()}


def _header(folder: CacheFolder, name: str) -> dict[str, Any]:
    """Return the header that metadata.db remembers of a segment whose own are both broken."""
    with suppress(DataFault):
        return next((segment.header for segment in Metadata(folder.database).segments() if segment.name == name), {})
    return {}
