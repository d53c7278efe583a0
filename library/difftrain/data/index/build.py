"""Building the index of the configured data: list, take over what is known, look at the rest, write.

One process of a node does this, before training starts. What it costs is printed while it goes on.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.config.spellings.spelling import option
from difftrain.contracts import DataFault
from difftrain.data.index.index import FORMAT, LONG_CAPTION, Index, IndexSummary, check_columns, newest
from difftrain.data.index.inspection import CAPTIONLESS, FRAMES, FULL, QUICK, Accepted, FileBatch, Refused
from difftrain.data.index.scan import (
    Listing,
    count_items,
    count_shards,
    list_sources,
    match_files,
    name_files,
    nothing_new,
    take_over,
    unread_files,
    unread_size,
)
from difftrain.data.index.shared_sources import about_shared_sources, copy_to_shared_sources, count_copied, nearest
from difftrain.data.index.worker_pool import PoolJob, run_jobs
from difftrain.data.index.writer import IndexWriter
from difftrain.data.media.clips import CLIP_VERSION
from difftrain.data.media.media import MEDIA_VERSION
from difftrain.data.sources import SourceInfo, open_source
from difftrain.data.sources.base import printable
from difftrain.data.sources.captions import digest_of
from difftrain.data.sources.configured import Configured, configured_sources
from difftrain.data.sources.folder import listing_digest

if TYPE_CHECKING:
    from difftrain.config import CaptionSection, DataSection

Log = Callable[[str], None]

AUTO_FULL_ITEMS = 20_000
DECODE_LIMIT_S = 60.0
_MAX_WORKERS = 32
_ITEMS_A_WORKER = 50  # below this, starting another process costs more than it saves
_OUTSIDE = "outside the <repeats>_<class> folders: kohya's layout does not allow that"
_QUICK_MEANS = "headers and file ends are read, images are not decoded, duplicates are not searched"
_EXAMPLES = 3
_INSPECT = "difftrain.data.index.inspection:inspect"
_JOB_FILES = {FRAMES: 8, FULL: 32, QUICK: 512}
_LEVELS = {QUICK: "quick", FULL: "full", FRAMES: "frames"}  # as a summary says it
_EVERY_S = 10.0
_MANY = 1 << 32


class TooManyRejects(DataFault):
    """More is rejected than data.max_rejected_share allows. index: the folder of the index that names all of it."""

    def __init__(self, message: str, index: Path) -> None:
        super().__init__(message)
        self.index = index

    def __reduce__(self) -> tuple[object, ...]:
        return TooManyRejects, (str(self), self.index)


def build_index(
    data: DataSection,
    captions: CaptionSection,
    folder: Path | str,
    *,
    log: Log,
    decode_limit_s: float = DECODE_LIMIT_S,
    workers: int | None = None,
) -> IndexSummary:
    """Bring the index in `folder` up to date with the data, and return what it holds.

    folder: of the index alone; the data is only read. Files that have not changed since the last time are not opened
    (of a parquet file that names pictures by path, the pictures' own changes are not noticed).
    Raises: ConfigFault; DataFault where there is no usable data or more than data.max_rejected_share of it is rejected;
    TrainingFault where `folder` can't be written.
    """
    started = time.monotonic()
    configured = configured_sources(data, captions)

    # an earlier index spares reading files that have not changed; a damaged one is dropped
    previous = _previous(Path(folder), log) or nearest(Path(folder), configured.infos)
    while True:
        builder = _Builder(data, configured, Path(folder), log, decode_limit_s, workers)
        try:
            summary = builder.build(previous)
            break
        except sqlite3.DatabaseError as error:
            if previous is None:
                raise
            log(f"index: the previous one is damaged ({error}) and is rebuilt")
            previous = None
        finally:
            builder.writer.discard()  # of a finished index nothing is left to remove

    # what was found is told first, so that the log explains why a run stops
    changed = previous is None or summary.folder != previous.folder
    _report(summary, changed, time.monotonic() - started, log)
    _refuse(summary, data.max_rejected_share)
    return summary


def _previous(folder: Path, log: Log) -> IndexSummary | None:
    index_folder = newest(folder)
    try:
        if index_folder is None:
            return None
        summary = IndexSummary.load(index_folder)
        check_columns(summary)
        return summary
    except DataFault as fault:
        log(f"index: {fault}")
        return None


class _Builder:
    """One attempt: the writer, and what the steps share."""

    def __init__(
        self,
        data: DataSection,
        configured: Configured,
        folder: Path,
        log: Log,
        decode_limit_s: float,
        workers: int | None,
    ) -> None:
        self.data, self.configured = data, configured
        self.infos = configured.infos
        self.log, self.decode_limit_s, self.workers = log, decode_limit_s, workers
        self.writer = IndexWriter(folder)

    def build(self, previous: IndexSummary | None) -> IndexSummary:
        writer, infos = self.writer, self.infos
        listing = list_sources(writer, infos)
        level, why = self._level()
        files = name_files(writer, infos, level, self._stamp, listing)
        writer.add_rejects((None, path, _OUTSIDE) for path in self.configured.outside())

        # what an earlier index knows of these files
        own = previous if previous and Path(previous.folder).parent == writer.folder else None
        same, had = match_files(writer, previous, infos, foreign=own is None) if previous else (0, 0)

        # what is known before any picture is looked at
        remarks = [*_about_captions(listing), why, *listing.passed_over, *self._check()]
        notes = [*dict.fromkeys(self.configured.notes), *about_shared_sources(infos), *remarks]
        summary = IndexSummary(
            folder="",
            count=0,
            fingerprint="",
            duplicates=None,
            rejected=0,
            reasons={},
            sources=tuple(infos),
            shards=tuple(count_shards(writer, info) for info in infos),
            verify=_LEVELS[level],
            notes=tuple(notes),
            stamp=self._refused(),
            reused=same,
            read=files - same - count_copied(writer),
        )
        for note in notes:
            self.log(f"data: {note}")

        # where nothing has changed, the index that is there stays
        alike = own if own and had == files and _equal_but_for_notes(own, summary) else None
        if alike and same == had:
            return replace(alike, notes=summary.notes, reused=same, read=0)

        # known items are copied, the other files are read
        if same:
            take_over(writer)
        self._read(level, summary)
        copy_to_shared_sources(writer)
        if alike and nothing_new(writer, infos):  # what is looked at every time makes no new index of the same
            return replace(alike, notes=summary.notes, reused=same, read=summary.read)
        return writer.finish(summary)

    def _refused(self) -> str:
        """Hash the names of what was refused unopened: a change there is a change of the index."""
        state = hashlib.blake2b(digest_size=8)
        for (path,) in self.writer.db.execute("SELECT path FROM rejects WHERE file IS NULL ORDER BY path"):
            state.update(path.encode() + b"\n")
        return state.hexdigest()

    def _stamp(self, info: SourceInfo) -> str:
        """Return what, besides the file itself, decides what its items become."""
        parts: tuple[Any, ...] = (
            FORMAT,
            MEDIA_VERSION,
            int(info.allow_empty and info.whole_text),  # elsewhere match_files looks at what has no caption
            info.words,
            info.image_column,
            info.caption_column,
        )
        if info.whole_text or info.captions_file:
            parts += (int(info.whole_text), digest_of(info))
        if info.clips is not None:
            parts += ("clips", CLIP_VERSION, *info.clips)
        if info.num_control:
            parts += (info.num_control, listing_digest(info.control), *info.control_columns)
        return ".".join(map(str, parts))

    def _level(self) -> tuple[int, str]:
        """Decide how closely to look, and say why."""
        clips = any(info.frame_buckets for info in self.infos)
        if self.data.verify == "full":
            return FRAMES if clips else FULL, f"verify=full: every image{' and clip' if clips else ''} is decoded once"
        if self.data.verify == "quick":
            return QUICK, f"verify=quick: {_QUICK_MEANS}"
        items = count_items(self.writer, self.infos, AUTO_FULL_ITEMS + 1)
        if items > AUTO_FULL_ITEMS:
            return QUICK, f"verify=auto, more than {AUTO_FULL_ITEMS:,} items, so quick: {_QUICK_MEANS}"
        of_clips = "; of videos the packets are read" if clips else ""
        return FULL, f"verify=auto, {items:,} items, so full: every image is decoded once{of_clips}"

    def _check(self) -> Iterator[str]:
        """Look at every shard that will be read, before the work begins."""
        sources = {info.ordinal: open_source(info) for info in self.infos if open_source(info).sharded}
        if sources:
            sentences = (sources[s].check(file.path) for _, s, file in unread_files(self.writer) if s in sources)
            yield from dict.fromkeys(list(filter(None, sentences))[:3])

    def _read(self, level: int, summary: IndexSummary) -> None:
        if not summary.read:
            return
        size = unread_size(self.writer)
        named = [open_source(info).count(info.only, _MANY) for info in self.infos if info.kind == "metadata"]
        items = max(size.items, sum(named))  # the bytes of a metadata file say nothing of the pictures that it names
        workers = self.workers or max(1, min(_cpus(), _MAX_WORKERS, -(-items // _ITEMS_A_WORKER)))
        self.log(
            f"index: looking at {summary.read:,} files with {workers} processes, {summary.reused:,} are known from an earlier run"
        )
        parts = -(-workers // size.shards) if size.shards else 1
        jobs = self._jobs(level, parts)
        done = rejected = 0
        started = spoken = time.monotonic()
        for rows in run_jobs(jobs, _INSPECT, workers=workers, limit_s=self.decode_limit_s):
            refused = [row for row in rows if isinstance(row, Refused)]
            self.writer.add_records(row for row in rows if isinstance(row, Accepted))
            self.writer.add_rejects(refused)
            done, rejected, now = done + len(rows), rejected + len(refused), time.monotonic()
            if now - spoken > _EVERY_S:
                spoken, speed = now, done / (now - started)
                left = "" if size.shards else f", about {(size.items - done) / speed:.0f} s left"
                self.log(f"index: {done:,} items, {rejected:,} rejected, {speed:.0f} a second{left}")

    def _jobs(self, level: int, parts: int) -> Iterator[PoolJob]:
        """Cut the unread files into jobs: plain files by the dozen, shards one by one or, where they are few, in parts."""
        for source, group in groupby(unread_files(self.writer), key=lambda row: row[1]):
            info = self.infos[source]
            files = ((number, file) for number, _, file in group)
            if open_source(info).sharded:
                for entry in files:
                    for part in range(parts):
                        yield PoolJob(FileBatch(info, (entry,), level, part, parts))
            else:
                while chunk := tuple(islice(files, _JOB_FILES[level])):
                    yield PoolJob(FileBatch(info, chunk, level))


def _equal_but_for_notes(previous: IndexSummary, new: IndexSummary) -> bool:
    known = {name: level for level, name in _LEVELS.items()}
    looked = known.get(previous.verify, 0) >= known[new.verify]
    before, now = ([_without_listing(info) for info in summary.sources] for summary in (previous, new))
    return looked and (before, previous.stamp) == (now, new.stamp)


def _without_listing(info: SourceInfo) -> SourceInfo:
    """Return a source without what matters only where other files are listed, or files are read again."""
    return replace(info, flat=False) if info.whole_text else replace(info, flat=False, allow_empty=False)


def _about_captions(listing: Listing) -> Iterator[str]:
    if listing.captions:
        yield "captions: " + ", ".join(f"{count:,} {where}" for where, count in listing.captions.items())


def _report(summary: IndexSummary, changed: bool, seconds: float, log: Log) -> None:
    how = f"{summary.read:,} files read, {summary.reused:,} known from an earlier run"
    if not changed:
        how = f"nothing has changed{f' in {summary.read:,} files read again' if summary.read else ''}"
    log(f"index: {summary.count:,} records, {summary.rejected:,} rejected, in {seconds:.1f} s ({how})")
    if summary.duplicates:
        log(f"index: {summary.duplicates:,} records are identical to another one, byte for byte; they are kept")
    if summary.long_captions:
        log(
            f"index: {summary.long_captions:,} captions have more than {LONG_CAPTION:,} characters; "
            "what exceeds the model's token limit is cut off"
        )
    if summary.empty_captions:
        some = ", ".join(map(printable, Index(Path(summary.folder)).captionless(_EXAMPLES)))
        what = f"{summary.empty_captions:,} image{'s'[: summary.empty_captions != 1]} without a caption"
        log(f"index: {what}, trained with an empty one, for example {some}")
    for kind, count in summary.reasons.items():
        log(f"index: rejected, {kind}: {count:,}")


def _refuse(summary: IndexSummary, limit: float) -> None:
    """Stop where too little is left.

    Raises: DataFault with the sum by reason and examples.
    """
    items = summary.count + summary.rejected
    share = summary.rejected / items if items else 0.0
    if summary.count and share <= limit:
        return
    if not items:
        raise DataFault(f"{', '.join(sorted({s.root for s in summary.sources}))}: no samples in any of the files")

    # the reasons, the most frequent first, with some examples of each
    lines = [
        f"{summary.rejected:,} of {items:,} items are rejected ({share:.0%}; data.max_rejected_share is {limit:g}):"
    ]
    examples: dict[str, list[str]] = {kind: [] for kind in summary.reasons}
    for reject in Index(Path(summary.folder)).rejects():
        known = examples[reject.reason.partition(":")[0]]
        if len(known) < _EXAMPLES:
            known.append(f"      {reject.path}: {reject.reason}")
    for kind, count in summary.reasons.items():
        lines += [f"  {count:,} x {kind}", *examples[kind]]

    # what may be done about it
    remedy = (
        f"Fix or remove them, or raise {option('data.max_rejected_share')}."
        if summary.count
        else "Nothing remains to train on."
    )
    if not summary.count and set(summary.reasons) <= set(CAPTIONLESS):
        lines.insert(0, f"none of {items:,} images has a caption:")
    if any(kind in CAPTIONLESS for kind in summary.reasons):
        remedy += f" {option('captions.allow_empty', True)} accepts images without a caption."
    raise TooManyRejects("\n".join([*lines, remedy]), Path(summary.folder))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
