"""Compaction: bringing metadata.db up to date from the journals of all segments. It can always be built again from nothing."""

from __future__ import annotations

import json
import random
import sqlite3
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from difftrain.cache.store import journals, references
from difftrain.cache.store.folder import BIN, IDX, CacheFolder, clean, disk_faults
from difftrain.cache.store.format import ALIGN, Damaged, OtherFormat, crc32c, rejected
from difftrain.cache.store.journals import Journal, RowSorter, addresses_of, cannot_build
from difftrain.contracts import TrainingFault
from difftrain.io.files import write_bytes

_TRIES = 10  # where others merge at the same moment
_CHUNK = 1 << 16
_ROW_BYTES = 160  # of scratch that a row takes at most
_INSERT = "INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)"
_LOCATION = "SELECT segment, offset, length FROM entries WHERE address = ?"
_REPLACE = "UPDATE entries SET segment = ?, offset = ?, length = ?, crc = ?, kind = ? WHERE address = ?"


@dataclass(frozen=True)
class MergeResult:
    """What a merge did."""

    path: Path  # of the database
    entries: int  # that count, in all
    added: int  # since the last time; negative where entries went
    rejects: int
    segments: int
    changed: bool  # a new database was written
    rebuilt: str = ""  # why one that was there was not gone on from
    notes: tuple[str, ...] = ()  # segments that are damaged or of another version, one a line


@dataclass
class _SegmentState:
    """What is known of a segment."""

    id: int
    name: str
    header: str
    sealed: bool = False  # and all of its rows were read: nothing new can be there
    rows: int = 0  # of its journal that were read
    entries: int = 0  # that count
    bytes: int = 0
    end: int = 0  # of the payload that ends last


@dataclass
class _IndexState:
    """What a database was made from."""

    generation: str = ""
    drops: str = ""
    numbers: int = 0  # entries, and the number that the next one gets
    rejects: int = 0
    segments: dict[str, _SegmentState] = field(default_factory=dict)


@dataclass
class _NewRows:
    """What journals hold beyond a state: rows, and the segments as they are after them."""

    sorter: RowSorter
    segments: dict[str, _SegmentState]
    changed: bool = False
    notes: list[str] = field(default_factory=list)


def merge(folder: CacheFolder, target: Path | None = None) -> MergeResult:
    """Bring the database up to date; nothing is written where it is. Raises TrainingFault, DataFault.

    target: another file than the cache's own, for a cache that cannot be written. Killed at any moment it leaves the
    database that was there. Of equal addresses the smallest (segment, offset) counts; drops do not count.
    """
    path, damage = folder.database if target is None else target, ""
    for attempt in range(_TRIES):
        time.sleep(random.random() * 0.02 * attempt)  # so that processes that merge all the time take turns

        # what the database holds, and whether it can be gone on from
        state, why = _index_state(path)
        dropped = references.state(folder)
        why = damage or why or ("" if state is None else _outdated(folder, state, dropped))
        base = _IndexState() if state is None or why else state

        # what journals hold beyond it
        before, generation = (0, "") if state is None else (state.numbers, state.generation)
        try:
            scratch = journals.scratch_for(_room(folder, base, path), path.parent)
            news = _new_rows(folder, base, scratch)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempt < _TRIES - 1:
                continue  # a clean-up took it away just then
            what = error.filename or folder.segments
            raise TrainingFault(f"{what}: a journal of the feature cache cannot be read ({error.strerror})") from error
        if base is state and not news.changed:
            count = len(state.segments)
            return MergeResult(path, state.numbers, 0, state.rejects, count, False, notes=tuple(news.notes))

        # a new database beside the old one, which stays where others are faster
        base.drops = dropped
        try:
            building = _build(path, base, news, scratch)
        except Damaged as error:
            damage = f"it is damaged: {error}"
            continue
        if building is None:
            continue
        try:
            if attempt < _TRIES - 1 and _generation(path) != generation:
                continue  # another process was faster: go on from what it made
            if target is None:
                _write_rejects(folder, building, base)
            building.publish(path)
        finally:
            building.close()
        # what killed processes left behind
        clean(path.parent)
        added, notes = base.numbers - before, tuple(news.notes)
        return MergeResult(path, base.numbers, added, base.rejects, len(base.segments), True, why, notes)
    raise TrainingFault(f"{path} cannot be updated: other processes replaced it {_TRIES} times meanwhile")


def _index_state(path: Path) -> tuple[_IndexState | None, str]:
    """Return what a database was made from; or none, and why it cannot be used if one is there."""
    try:
        with closing(journals.connect(path)) as db:
            facts = journals.meta(db)
            segments = [_SegmentState(*row) for row in db.execute("SELECT * FROM segments")]
            known = {segment.name: replace(segment, sealed=bool(segment.sealed)) for segment in segments}
            return _IndexState(facts["generation"], facts["drops"], facts["numbers"], facts["rejects"], known), ""
    except FileNotFoundError:
        return None, ""
    except OtherFormat as error:
        return None, str(error)
    except (OSError, Damaged, sqlite3.Error, KeyError, TypeError) as error:
        return None, f"it is damaged: {error}"


def _generation(path: Path) -> str:
    state, _ = _index_state(path)
    return "" if state is None else state.generation


def _outdated(folder: CacheFolder, state: _IndexState, dropped: str) -> str:
    """Say why a database cannot be gone on from, though it is whole."""
    if state.drops != dropped:
        return "the list of dropped entries has changed"
    listed = folder.listed()
    for name, segment in state.segments.items():
        for suffix in (BIN, IDX):
            if name not in listed[suffix] and not folder.exists(name, suffix):
                return f"segment {name} is gone"
        if not segment.sealed and _length(folder, name) < segment.rows:
            return f"the journal of segment {name} was cut"
    return ""


def _length(folder: CacheFolder, name: str) -> int:
    try:
        return Journal(folder, name).length()
    except (OSError, Damaged):
        return -1


def _room(folder: CacheFolder, base: _IndexState, path: Path) -> int:
    """Estimate the bytes of scratch that a merge needs."""
    fresh = [name for name in folder.names() if name not in base.segments or not base.segments[name].sealed]
    rows = sum(max(0, _length(folder, name)) for name in fresh)
    return rows * _ROW_BYTES + (path.stat().st_size if base.generation and path.exists() else 0)


def _new_rows(folder: CacheFolder, base: _IndexState, scratch: Path) -> _NewRows:
    """Read what journals hold beyond a state. Raises OSError, DataFault."""
    news = _NewRows(RowSorter(scratch), dict(base.segments))
    dropped = references.offsets_of(folder)

    # every journal that may hold rows beyond the state
    fresh = 1 + max((segment.id for segment in base.segments.values()), default=-1)
    listed = folder.listed()
    for name in sorted(listed[IDX]):
        known = base.segments.get(name)
        if known is not None and known.sealed:
            continue
        if name not in listed[BIN] and not folder.exists(name, BIN):
            news.notes.append(f"segment {name}: its payloads are gone, so all its entries are ignored")
            continue
        try:
            journal = Journal(folder, name)
        except FileNotFoundError:
            continue  # removed meanwhile
        except Damaged as error:
            if isinstance(error, OtherFormat) or folder.sealed(name):  # else its writer was killed when it began
                news.notes.append(f"segment {name}: {error}; all its entries are ignored")
            continue
        segment = replace(known) if known else _SegmentState(fresh, name, json.dumps(journal.header, sort_keys=True))
        fresh += known is None
        news.segments[name] = segment
        _take_rows(news, journal, segment, dropped.get(name))
        if journal.sealed:
            segment.sealed = True
            _check_ends(folder, news, journal, segment)
    return news


def _take_rows(news: _NewRows, journal: Journal, segment: _SegmentState, dropped: np.ndarray | None) -> None:
    """Take the rows of a journal that were not read before."""
    damaged = 0
    for rows, read in journal.rows(segment.rows):
        news.changed = True
        damaged += read - segment.rows - len(rows)
        segment.rows = read
        segment.end = max(segment.end, int((rows["offset"] + rows["length"]).max(initial=0)))
        news.sorter.add(rows if dropped is None else rows[~np.isin(rows["offset"], dropped)], segment.id)
    if damaged:
        news.notes.append(f"segment {segment.name}: {damaged} damaged rows in its journal; these entries are ignored")


def _check_ends(folder: CacheFolder, news: _NewRows, journal: Journal, segment: _SegmentState) -> None:
    """Compare the ends of both files of a sealed segment: no row without its payload, no payload without its row."""
    with folder.open_file(segment.name, BIN) as file:
        size = file.seek(0, 2)
    if size < segment.end:
        news.notes.append(
            f"segment {segment.name}: its payloads were cut to {size} bytes, they should end at {segment.end}"
        )
    elif size >= max(segment.end, journal.first) + ALIGN:
        news.notes.append(
            f"segment {segment.name}: its journal was cut, payloads after byte {segment.end} have no rows"
        )


def _build(path: Path, base: _IndexState, news: _NewRows, scratch: Path) -> journals.DatabaseBuild | None:
    """Add news to what a database holds; none where it was replaced meanwhile. Changes `base`. Raises Damaged."""
    try:
        building = journals.DatabaseBuild(scratch, path if base.generation else None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrainingFault(cannot_build(scratch, error)) from error
    try:
        db = building.db
        if base.generation and journals.meta(db).get("generation") != base.generation:
            building.close()
            return None

        # rows, in the order of their addresses
        db.execute("BEGIN")
        by_id = {segment.id: segment for segment in news.segments.values()}
        for rows in news.sorter.sorted():
            for start in range(0, len(rows), _CHUNK):
                _insert(db, base, rows[start : start + _CHUNK], by_id)

        # what it was made from
        base.segments, base.generation = news.segments, uuid.uuid4().hex
        columns = [tuple(vars(segment).values()) for segment in base.segments.values()]
        db.executemany("INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?)", columns)
        (base.rejects,) = db.execute("SELECT count(*) FROM entries WHERE kind = 1").fetchone()
        facts = {name: value for name, value in vars(base).items() if name != "segments"}
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", facts.items())
        db.execute("COMMIT")
        return building
    except (sqlite3.Error, OSError) as error:
        building.close()
        if base.generation and getattr(error, "sqlite_errorcode", 0) & 0xFF in (
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        ):
            raise Damaged(str(error)) from None
        raise TrainingFault(cannot_build(scratch, error)) from error
    except BaseException:
        building.close()
        raise


def _insert(db: sqlite3.Connection, base: _IndexState, rows: np.ndarray, by_id: dict[int, _SegmentState]) -> None:
    """Insert sorted rows of different addresses, and count them with their segments."""
    addresses = addresses_of(rows)
    columns = [rows[name].tolist() for name in ("segment", "offset", "length", "crc", "kind")]
    numbers = range(base.numbers, base.numbers + len(rows))
    done = db.executemany(_INSERT, zip(addresses, numbers, *columns)).rowcount
    counted = rows
    if done < len(rows):
        counted = rows[_resolve_duplicates(db, base.numbers, list(zip(addresses, *columns)), by_id)]
    base.numbers += done
    ids, places = np.unique(counted["segment"], return_inverse=True)
    sums = np.bincount(places, weights=counted["length"].astype(np.float64), minlength=len(ids))
    for number, entries, size in zip(ids.tolist(), np.bincount(places, minlength=len(ids)), sums):
        by_id[number].entries += int(entries)
        by_id[number].bytes += int(size)


def _resolve_duplicates(
    db: sqlite3.Connection,
    first: int,
    rows: list[tuple[bytes, int, int, int, int, int]],
    by_id: dict[int, _SegmentState],
) -> np.ndarray:
    """Choose between rows that were not inserted and those that have their addresses; return which rows count."""
    counts = np.ones(len(rows), bool)
    number_of_next = first
    for number, (address, segment, offset, length, crc, kind) in enumerate(rows):
        its_segment, its_offset, its_length = db.execute(_LOCATION, (address,)).fetchone()
        if (its_segment, its_offset) == (segment, offset):  # it was inserted: numbers stay without gaps
            db.execute("UPDATE entries SET number = ? WHERE address = ?", (number_of_next, address))
            number_of_next += 1
        elif (by_id[segment].name, offset) < (by_id[its_segment].name, its_offset):
            db.execute(_REPLACE, (segment, offset, length, crc, kind, address))
            by_id[its_segment].entries -= 1
            by_id[its_segment].bytes -= its_length
        else:
            counts[number] = False
    return counts


def _write_rejects(folder: CacheFolder, building: journals.DatabaseBuild, state: _IndexState) -> None:
    """Write what could not be encoded, and why. Raises TrainingFault."""
    names = {segment.id: segment.name for segment in state.segments.values()}
    lines = []
    places = "SELECT segment, offset, length, crc FROM entries WHERE kind = 1 ORDER BY segment, offset"
    for segment, offset, length, crc in building.db.execute(places):
        try:
            with folder.open_file(names[segment], BIN) as file:
                file.seek(offset)
                payload = file.read(length)
            if crc32c(payload) != crc:
                raise Damaged("its checksum differs")
            name, reason = rejected(payload)
        except (OSError, Damaged, ValueError, KeyError) as error:
            name, reason = f"{names[segment]}:{offset}", f"its entry is damaged: {error}"
        lines.append(json.dumps({"path": name, "reason": reason}, ensure_ascii=False))
    if lines or folder.rejects.exists():
        with disk_faults(folder.path):
            write_bytes(folder.rejects, "".join(f"{line}\n" for line in sorted(lines)).encode("utf-8", "surrogatepass"))
