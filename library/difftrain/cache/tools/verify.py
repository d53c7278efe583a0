"""Reading all of a cache, in several processes and bounded memory, and naming everything that is not whole.

Nothing is written. Beside a running build it judges what was committed when it looked; that metadata.db does not know yet
what was built since it was made is no damage.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from difftrain.cache.store import journals, references
from difftrain.cache.store.folder import BIN, IDX, CacheFolder
from difftrain.cache.store.format import Damaged
from difftrain.cache.store.index import Metadata
from difftrain.cache.tools.segment_check import SegmentDamage, SegmentReport, check_segment, find, row_tuples
from difftrain.contracts import DataFault, TrainingFault

Progress = Callable[[int, int], None]
SEGMENT_FILE = re.compile(r"(?P<name>seg-[0-9a-f]{32}-[0-9]{6})\.(bin|idx)(\.part)?")
_PASSING = re.compile(  # of a system, or of a process that writes it or looks whether it can
    r"\..*|.*\.tmp-[0-9a-f]{32}|tmp[a-z0-9_]{8}|difftrain-.*\.db"
)
_SMALL = 256 << 20  # bytes that are not worth another process
_MOST_WORKERS = 8
_CHUNK = 1 << 17
_PRINTED = 200
_MOST_LISTED = 10_000


@dataclass
class DatabaseReport:
    """What metadata.db knows, and how much of it was found again in the journals."""

    path: str = ""
    count: int = 0
    matched: int = 0
    behind: int = 0  # committed entries that it does not know yet


@dataclass
class VerifyReport:
    """What a cache was found to be."""

    cache: str
    damages: list[SegmentDamage] = field(default_factory=list)
    unnamed: int = 0  # damaged entries beyond those that are named
    notes: list[str] = field(default_factory=list)
    segments: int = 0
    entries: int = 0  # that are whole, copies of equal addresses included
    bytes: int = 0
    seconds: float = 0.0
    hurt: dict[str, SegmentReport] = field(default_factory=dict)  # segments with damage
    database: DatabaseReport | None = None  # None: it cannot be used
    drops: list[str] = field(default_factory=list)  # files that cannot be used
    uses: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Say it, one damage a line."""
        for damage in self.damages[:_PRINTED]:
            yield str(damage)
        if (more := len(self.damages) - _PRINTED) > 0:
            yield f"and {more:,} more of the kind; --json has them"
        if self.unnamed:
            yield f"and {self.unnamed:,} more damaged entries in these segments"
        yield from self.notes
        read = f"{self.entries:,} intact entries, {self.bytes / 2**30:,.2f} GiB in {self.segments:,} segments"
        if self.damages:
            count = len(self.damages) + self.unnamed
            yield f"{self.cache}: DAMAGED in {count:,} place{'s' if count > 1 else ''}; {read}"
            yield f"difftrain cache repair {self.cache} drops what is damaged; the next build encodes only that again"
        else:
            yield f"{self.cache}: intact; {read} read in {self.seconds:.1f} s"

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "cache": self.cache,
            "whole": not self.damages,
            "damages": [damage.document() for damage in self.damages],
            "unnamed": self.unnamed,
            "notes": self.notes,
            "segments": self.segments,
            "entries": self.entries,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
        }


def verify(
    folder: CacheFolder, *, workers: int | None = None, progress: Progress = lambda done, total: None
) -> VerifyReport:
    """Read every entry and compare all files with one another. Raises TrainingFault where a process dies."""
    began = time.monotonic()
    report = VerifyReport(str(folder.path))
    known = _database(folder, report)
    dropped = _drops(folder, report)
    names = _segment_names(folder, report)
    report.segments = len(names)
    _segments(folder, names, dropped, known is not None, workers, progress, report)
    if known is not None:
        _compare(folder, known, set(names), report)
    _uses(folder, known, report)
    report.seconds = time.monotonic() - began
    return report


def _database(folder: CacheFolder, report: VerifyReport) -> Metadata | None:
    """Read metadata.db through."""
    name, remedy = folder.database.name, "repair, or the next build, restores it"
    try:
        journals.check(folder.database)
        known = Metadata(folder.database)
        report.database = DatabaseReport(name, known.count)
        return known
    except FileNotFoundError:
        if any(IDX in entry for entry in _listed(folder, "segments")):
            report.damages.append(SegmentDamage("database", name, f"is missing; {remedy}"))
    except (Damaged, DataFault, OSError) as error:  # another version too
        why = error.strerror if isinstance(error, OSError) else error
        report.damages.append(SegmentDamage("database", name, f"cannot be used: {why}; {remedy}"))
    return None


def _listed(folder: CacheFolder, part: str) -> list[str]:
    """Return the names of the files of a folder."""
    path = folder.path / part
    return sorted(entry.name for entry in os.scandir(path) if entry.is_file()) if path.is_dir() else []


def _foreign(report: VerifyReport, file: str) -> None:
    report.foreign.append(file)
    report.damages.append(SegmentDamage("foreign", file, "is not a file of a cache"))


def _drops(folder: CacheFolder, report: VerifyReport) -> dict[str, np.ndarray]:
    """Return the offsets of what does not count, of each segment, from the files that can be read."""
    offsets_by_segment: dict[str, list[np.ndarray]] = {}
    for name in _listed(folder, "drops"):
        if _PASSING.fullmatch(name):
            continue
        if not re.fullmatch(r"[0-9a-f]{32}\.rows", name):
            _foreign(report, f"drops/{name}")
            continue
        try:
            for segment, offsets in references.file_offsets(folder, name).items():
                offsets_by_segment.setdefault(segment, []).append(offsets)
        except FileNotFoundError:
            continue  # taken away meanwhile, with its segments
        except DataFault:
            report.drops.append(f"drops/{name}")
            says = "a list of dropped entries is damaged"
            report.damages.append(SegmentDamage("drops", f"drops/{name}", says))
    return {segment: np.unique(np.concatenate(offsets)) for segment, offsets in offsets_by_segment.items()}


def _segment_names(folder: CacheFolder, report: VerifyReport) -> list[str]:
    names = set()
    for file in _listed(folder, "segments"):
        if match := SEGMENT_FILE.fullmatch(file):
            names.add(match["name"])
        elif not _PASSING.fullmatch(file):
            _foreign(report, f"segments/{file}")
    return sorted(names)


# --- segments ---


def _segments(
    folder: CacheFolder, names: list[str], dropped: dict[str, np.ndarray], compare: bool, workers: int | None,
    progress: Progress, report: VerifyReport,
) -> None:  # fmt: skip
    sizes = {name: _size(folder, name) for name in names}
    total, done = sum(sizes.values()), 0
    nothing = np.empty(0, np.uint64)
    tasks = ((folder, name, dropped.get(name, nothing), compare) for name in names)
    count = min(workers or _MOST_WORKERS, len(names) or 1)
    if workers is None:
        # a process takes longer to start than a small cache to read
        count = min(count, os.cpu_count() or 1, 1 + total // _SMALL)
    for findings in _in_processes(tasks, count) if count > 1 else map(_task, tasks):
        done += sizes[findings.checked.name]
        progress(done, total)
        _take(findings, report)


def _size(folder: CacheFolder, name: str) -> int:
    path = find(folder.segments, name, BIN)
    try:
        return path.stat().st_size if path else 0
    except OSError:
        return 0


def _in_processes(tasks: Iterable[tuple[Any, ...]], count: int) -> Iterator[SegmentFindings]:
    """Yield what is found as it comes, with few tasks waiting."""
    context = multiprocessing.get_context("spawn")  # threads of libraries do not survive a fork
    with ProcessPoolExecutor(count, context) as pool:
        waiting: set[Future[SegmentFindings]] = set()
        try:
            for task in tasks:
                waiting.add(pool.submit(_task, task))
                if len(waiting) >= 3 * count:
                    ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in ready)
            for future in waiting:
                yield future.result()
        except BrokenProcessPool as error:
            raise TrainingFault("a process that was reading segments was killed: perhaps memory ran out") from error
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass
class SegmentFindings:
    """What a process found out about a segment."""

    checked: SegmentReport
    matched: int = 0
    behind: int = 0
    wrong: list[SegmentDamage] = field(default_factory=list)


def _task(task: tuple[CacheFolder, str, np.ndarray, bool]) -> SegmentFindings:
    folder, name, dropped, compare = task
    known = Metadata(folder.database)
    entries = known.query("SELECT entries FROM segments WHERE name = ?", name).fetchone() if compare else None
    checked, journal = check_segment(folder.segments, name, dropped)  # which knows what the database took before
    if any(damage.kind == "deleted" for damage in checked.damages):  # a clean-up may just be taking it away
        with suppress(DataFault):
            dropped = references.offsets_of(folder).get(name, dropped)
        checked, journal = check_segment(folder.segments, name, dropped)
    findings = SegmentFindings(checked)
    if compare:
        _look_up(known, name, journal.rows, findings)
        lost = (entries or (0,))[0] - findings.matched
        if journal.idx is not None and lost > 0 and not checked.rewrite:
            says = f"the journal lacks {lost:,} entries that metadata.db names"
            checked.add(
                SegmentDamage("journal", f"segments/{journal.idx.name}", says, name, entries=lost), rewrite=True
            )
    return findings


def _look_up(known: Metadata, name: str, rows: np.ndarray, findings: SegmentFindings) -> None:
    """Look up the rows of a journal: each is known as it stands there, or by an earlier copy, or came later."""
    chunks = (rows["address"][start : start + _CHUNK] for start in range(0, len(rows), _CHUNK))
    places = (row for chunk in chunks for row in known.rows(chunk))
    for (address, offset, length, crc, kind, *_), row in zip(row_tuples(rows), places, strict=True):
        if row is None or (row.segment, row.offset) > (name, offset):
            findings.behind += 1
        elif (row.segment, row.offset) == (name, offset):
            findings.matched += 1
            if (row.length, row.crc, row.kind) != (length, crc, kind):
                says = "describes an entry differently from its journal"
                findings.wrong.append(SegmentDamage("database", "metadata.db", says, name, offset, address.hex()))


def _take(findings: SegmentFindings, report: VerifyReport) -> None:
    checked = findings.checked
    report.entries += checked.entries
    report.bytes += checked.bytes
    room = max(1, _MOST_LISTED - len(report.damages))  # each segment is named at least
    every = [*checked.damages, *findings.wrong]
    report.damages += every[:room]
    report.unnamed += checked.unnamed + len(every[room:])
    if report.database is not None:
        report.database.matched += findings.matched
        report.database.behind += findings.behind
    if checked.damages:
        report.hurt[checked.name] = checked


# --- what must agree ---


def _compare(folder: CacheFolder, known: Metadata, names: set[str], report: VerifyReport) -> None:
    """What metadata.db knows must be in journals; that it does not know all of them is only said."""
    assert report.database is not None
    name, lost = folder.database.name, 0
    gone = {
        segment.name: segment.entries for segment in known.segments() if segment.name not in names and segment.entries
    }
    for _ in range(3 if gone else 0):  # unless a clean-up is just taking them away, and makes the database anew
        still = {segment.name for segment in Metadata(folder.database).segments()}
        gone = {segment: entries for segment, entries in gone.items() if segment in still}
        time.sleep(0.1 if gone else 0.0)
    for segment, entries in gone.items():
        says = f"is deleted with its journal: {entries:,} entries are lost"
        report.damages.append(SegmentDamage("deleted", f"segments/{segment}{BIN}", says, segment, entries=entries))
        report.hurt[segment] = SegmentReport(segment, rewrite=True)
        lost += entries
    if (nowhere := report.database.count - report.database.matched - lost) > 0 and _is_current(folder, known):
        says = f"names {nowhere:,} entries that no journal has"
        report.damages.append(SegmentDamage("database", name, says, entries=nowhere))
    if report.database.behind:
        report.notes.append(
            f"{name} lacks {report.database.behind:,} entries that were committed after it was made: a build is "
            "running, or was stopped; the next one adds them"
        )


def _is_current(folder: CacheFolder, known: Metadata) -> bool:
    """Tell whether no other process has made metadata.db anew while this one was reading."""
    return Metadata(folder.database).generation == known.generation


def _uses(folder: CacheFolder, known: Metadata | None, report: VerifyReport) -> None:
    """What is marked whole must be so."""
    for file in _listed(folder, "uses"):
        name, dot, suffix = file.rpartition(".")
        if _PASSING.fullmatch(file) or suffix == "npy":
            continue
        if not dot or suffix != "json":
            _foreign(report, f"uses/{file}")
            continue
        try:
            use, missing = _read_use(folder, name, known)
        except FileNotFoundError:
            continue  # forgotten meanwhile
        except DataFault as fault:
            report.uses.append(name)
            report.damages.append(SegmentDamage("uses", f"uses/{file}", str(fault)))
            continue
        if use.complete and any(missing.values()):
            which = ", ".join(f"{count:,} of {encoder}" for encoder, count in missing.items() if count)
            says = f"a configuration is marked as complete and lacks entries: {which}"
            report.damages.append(SegmentDamage("missing", f"uses/{file}", says, entries=sum(missing.values())))


def _read_use(folder: CacheFolder, name: str, known: Metadata | None) -> tuple[references.Reference, dict[str, int]]:
    """Read a use through, and count what it lacks. Raises DataFault, FileNotFoundError where it is gone."""
    for tries in (2, 1, 0):
        try:
            use = references.reference_of(folder, name)
            for encoder in use.encoders:
                use.check(encoder)
            return use, lacks(use, known) if known is not None else {}
        except DataFault:  # it may just be written anew, or forgotten
            if not tries:
                raise
            time.sleep(0.05)
    raise AssertionError


def lacks(use: references.Reference, known: Metadata) -> dict[str, int]:
    """Count the rows of a use, of each encoder, whose entries are not there. Raises DataFault."""
    missing = dict.fromkeys(use.encoders, 0)
    for encoder in use.encoders:
        rows = use.rows(encoder)
        for start in range(0, len(rows), _CHUNK):
            missing[encoder] += int((~known.has_many(rows["address"][start : start + _CHUNK])).sum())
    return missing
