"""Listing the sources into an index under construction: which files there are, and which are known from before.

Listings of tens of millions of files never stand in memory: they go into a scratch database, where SQL joins pictures
with their captions and with the previous index.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from difftrain.config.spellings.spelling import option
from difftrain.contracts import DataFault
from difftrain.data.index.index import DATABASE, IndexSummary
from difftrain.data.index.inspection import CAPTIONLESS, PASSING
from difftrain.data.index.shared_sources import KINDS, firsts_of, list_shared_sources
from difftrain.data.index.writer import IndexWriter, disk_faults
from difftrain.data.sources import SourceInfo, open_source
from difftrain.data.sources.base import VIDEO_SUFFIXES, FileRef, is_picture, printable, split_suffix
from difftrain.data.sources.captions import blanks_in, named_by, names_in
from difftrain.data.sources.folder import walk
from difftrain.data.sources.side_files import SUFFIX

_FOREIGN_CACHES = ("_sdxl.npz", "_sd.npz", "_sd3.npz", "_flux.npz", "_te_outputs.npz", "_sd3_te.npz", "_flux_te.npz")
_PAGE = 4096
_BYTES_AN_ITEM = 50_000

_SCRATCH = """
CREATE TABLE scan.media (source INTEGER, path TEXT, stem TEXT, size INTEGER, mtime_ns INTEGER, uncut TEXT);
CREATE TABLE scan.captions (source INTEGER, stem TEXT, rank INTEGER, path TEXT, size INTEGER, mtime_ns INTEGER);
CREATE TABLE scan.mapping (old INTEGER PRIMARY KEY, new INTEGER, name TEXT);
CREATE TABLE scan.same (old INTEGER PRIMARY KEY, new INTEGER UNIQUE);
"""
_FILES = """
INSERT INTO main.files (source, path, size, mtime_ns, stamp, level, shard, caption)
SELECT m.source, m.path, m.size, m.mtime_ns, ? || coalesce('|' || c.path || '|' || c.size || '|' || c.mtime_ns, '')
       || coalesce((SELECT '|' || j.size || '|' || j.mtime_ns FROM scan.captions j
                    WHERE j.source = m.source AND j.stem = m.stem AND {side}), ''),
       ?, {shard}, c.path
FROM scan.media m LEFT JOIN scan.captions c ON c.rowid = coalesce(
    (SELECT rowid FROM scan.captions k WHERE k.source = m.source AND k.stem = m.stem ORDER BY k.rank LIMIT 1),
    (SELECT rowid FROM scan.captions k WHERE k.source = m.source AND k.stem = m.uncut ORDER BY k.rank LIMIT 1))
WHERE m.source = ?
"""
_SAME = """
INSERT OR IGNORE INTO scan.same
SELECT o.id, n.id FROM scan.mapping p JOIN main.files n ON n.source = p.new
JOIN old.files o ON o.source = p.old AND o.path = n.path AND o.size = n.size AND o.mtime_ns = n.mtime_ns
    AND o.stamp = n.stamp AND o.level >= n.level
"""
_RAISE_LEVEL = """
UPDATE main.files SET level = (SELECT o.level FROM scan.same s JOIN old.files o ON o.id = s.old WHERE s.new = main.files.id)
WHERE id IN (SELECT s.new FROM scan.same s JOIN old.files o ON o.id = s.old WHERE o.level > main.files.level)
"""
_TAKE_RECORDS = """
INSERT INTO main.records (file, path, member, offset, length, width, height, captions, content, key, control, clip)
SELECT s.new, r.path, r.member, r.offset, r.length, r.width, r.height, r.captions, r.content,
       iif(p.name IS NULL, r.key, record_key(p.name, f.path, r.member)), {control}, {clip}
FROM old.records r JOIN scan.same s ON s.old = r.file JOIN old.files f ON f.id = r.file
JOIN scan.mapping p ON p.old = f.source ORDER BY r.row
"""
_TAKE_REJECTS = (
    "INSERT INTO main.rejects SELECT s.new, r.path, r.reason FROM old.rejects r JOIN scan.same s ON s.old = r.file"
)
# of what was not taken over; {db}: main or old, {source}: the ordinal as it is now, {row}: of scan.same
_UNTAKEN = (
    "SELECT {source}, path, size, iif({source} IN ({timeless}), 0, mtime_ns), stamp, shard, caption"
    " FROM {db}.files f WHERE id NOT IN (SELECT {row} FROM scan.same)",
    "SELECT r.key, f.path, r.path, r.member, r.offset, r.length, r.width, r.height, r.captions,"
    " coalesce(r.content, f.mtime_ns) FROM {db}.records r JOIN {db}.files f ON f.id = r.file"
    " WHERE f.id NOT IN (SELECT {row} FROM scan.same)",
    "SELECT path, reason, count(*) FROM {db}.rejects"
    " WHERE file NOT IN (SELECT {row} FROM scan.same) GROUP BY path, reason",
)
_UNREAD = (
    "NOT EXISTS (SELECT 1 FROM scan.same WHERE new = files.id)"
    " AND NOT EXISTS (SELECT 1 FROM scan.twins WHERE source = files.source)"
)
# what is looked at again: what was refused for a reason, and what has no caption
_REFUSED = "DELETE FROM scan.same WHERE old IN (SELECT file FROM old.rejects WHERE reason LIKE ?)"
_REFUSED_OF = """
DELETE FROM scan.same WHERE old IN (
    SELECT r.file FROM old.rejects r JOIN old.files f ON f.id = r.file WHERE r.reason LIKE ? AND f.source = ?)
"""
_EMPTY_OF = """
DELETE FROM scan.same WHERE old IN (
    SELECT r.file FROM old.records r JOIN old.files f ON f.id = r.file WHERE r.captions = '[""]' AND f.source = ?)
"""
_INSERT = {
    "media": "INSERT INTO scan.media VALUES (?, ?, ?, ?, ?, ?)",
    "captions": "INSERT INTO scan.captions VALUES (?, ?, ?, ?, ?, ?)",
    "rejects": "INSERT INTO main.rejects VALUES (?, ?, ?)",
}


@dataclass
class Listing:
    """What listing the sources found. passed_over: sentences about files that are no data."""

    passed_over: list[str] = field(default_factory=list)
    captions: Counter[str] = field(default_factory=Counter)  # where captions come from -> pictures


def list_sources(writer: IndexWriter, infos: Sequence[SourceInfo]) -> Listing:
    """List every source that is read itself into the scratch database.

    Raises: DataFault where a folder cannot be listed.
    """
    with disk_faults(writer.folder):
        writer.attach("scan", "scan.sqlite")
        writer.db.executescript(_SCRATCH)

    # one transaction a source; memory does not grow with the number of files
    by_source: dict[str, Counter[str]] = {}
    uses = Counter(firsts_of(infos))
    for info in _distinct_sources(infos):
        rows = _rows(info, by_source.setdefault(info.root, Counter()))
        with disk_faults(writer.folder):
            writer.db.execute("BEGIN")
            for table, row in rows:
                for _ in range(uses[info.ordinal] if table == "rejects" else 1):  # an item is counted at every use
                    writer.db.execute(_INSERT[table], row)
            writer.db.execute("COMMIT")

    # an index made behind the rows costs less than one kept beside them
    with disk_faults(writer.folder):
        writer.db.execute("CREATE INDEX scan.by_stem ON captions (source, stem, rank)")
    listing = Listing()
    listing.passed_over = [sentence for root, counts in by_source.items() for sentence in _about_others(root, counts)]
    return listing


def _distinct_sources(infos: Sequence[SourceInfo]) -> list[SourceInfo]:
    return [info for info, first in zip(infos, firsts_of(infos), strict=True) if first == info.ordinal]


def _rows(info: SourceInfo, by_folder: Counter[str]) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Iterate over (table, row) of a source's files; count those that are no data."""
    try:
        for file in open_source(info).listing():
            stem, suffix = split_suffix(file.path)
            if printable(file.path) != file.path:
                by_folder["names that are not UTF-8"] += file.role != "media"
                if file.role == "media":
                    reason = "name not UTF-8: the file name cannot be recorded; rename it"
                    yield "rejects", (None, f"{info.root}/{printable(file.path)}", reason)
            elif file.role == "media":
                uncut = None if info.whole_text else _uncut(stem)
                yield "media", (info.ordinal, file.path, stem, file.size, file.mtime_ns, uncut)
            elif file.role == "caption":
                rank = info.suffixes.index(suffix)
                yield "captions", (info.ordinal, stem, rank, file.path, file.size, file.mtime_ns)
            elif file.role == "hidden":
                by_folder["images whose names begin with a dot"] += 1
            elif file.path != info.captions_file:
                by_folder[_kind_of_other(file.path)] += 1
    except OSError as error:
        raise DataFault(f"{error.filename or info.root}: cannot be listed ({error.strerror})") from None


def _uncut(stem: str) -> str | None:
    """Return the name of the image that a face was cut out of: kohya's tool appends four numbers, and captions stay."""
    folder, slash, name = stem.rpartition("/")
    parts = name.rsplit("_", 4)
    return f"{folder}{slash}{parts[0]}" if len(parts) == 5 and parts[0] else None


def _kind_of_other(path: str) -> str:
    for ending in _FOREIGN_CACHES:
        if path.endswith(ending):
            return f"*{ending}"
    return split_suffix(path)[1] or "no suffix"


def _about_others(root: str, counts: Counter[str]) -> Iterator[str]:
    caches = {kind: count for kind, count in counts.items() if kind.startswith("*")}
    if caches:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(caches.items()))
        yield f"{root}: {listed}: features cached by another trainer: not used"
    remaining = [(kind, count) for kind, count in counts.most_common() if count and not kind.startswith("*")]
    if remaining:
        listed = ", ".join(f"{count} {kind}" for kind, count in remaining[:6]) + (
            " and more" if len(remaining) > 6 else ""
        )
        unread = VIDEO_SUFFIXES & {kind for kind, _ in remaining}
        remedy = f" ({option('data.frame_buckets')} says which videos are read)" if unread else ""
        yield f"{root}: files that are not data of this kind, not read: {listed}{remedy}"


def name_files(
    writer: IndexWriter,
    infos: Sequence[SourceInfo],
    level: int,
    stamp_of: Callable[[SourceInfo], str],
    listing: Listing,
) -> int:
    """Turn the listing into the index's files: captions joined, shards numbered in the order of their names.

    Return how many there are.
    """
    with disk_faults(writer.folder):
        for info in _distinct_sources(infos):
            shard = "row_number() OVER (ORDER BY m.path) - 1" if open_source(info).sharded else "NULL"
            # the JSON of a video says more than a caption: a change of it is one beside a text, too
            side = f"j.rank = {info.suffixes.index(SUFFIX)}" if info.frame_buckets and SUFFIX in info.suffixes else "0"
            writer.db.execute(_FILES.format(shard=shard, side=side), (stamp_of(info), level, info.ordinal))
            if info.suffixes:
                _count_captions(writer, info, listing)
    _count_named(writer, infos, listing)
    _count_masks(writer, infos, listing)
    list_shared_sources(writer, infos)
    (count,) = writer.db.execute("SELECT count(*) FROM main.files").fetchone()
    return int(count)


def _count_captions(writer: IndexWriter, info: SourceInfo, listing: Listing) -> None:
    for suffix in info.suffixes:
        (count,) = writer.db.execute(
            "SELECT count(*) FROM main.files WHERE source = ? AND lower(substr(caption, ?)) = ?",
            (info.ordinal, -len(suffix), suffix),
        ).fetchone()
        if count:
            listing.captions[f"from {suffix} files"] += count

    # pictures without a caption file, and caption files without a picture
    (bare,) = writer.db.execute(
        "SELECT count(*) FROM main.files WHERE source = ? AND caption IS NULL", (info.ordinal,)
    ).fetchone()
    if bare:
        listing.captions["the folder's class words" if info.words else "none"] += bare
    lone = "FROM scan.captions WHERE source = ?1 AND stem NOT IN (SELECT stem FROM scan.media WHERE source = ?1)"
    lone += " AND stem NOT IN (SELECT uncut FROM scan.media WHERE source = ?1 AND uncut IS NOT NULL)"
    count, example = writer.db.execute(f"SELECT count(*), min(path) {lone}", (info.ordinal,)).fetchone()
    if count:
        listing.passed_over.append(f"{info.root}: {count} caption files without an image, for example {example}")


def _count_named(writer: IndexWriter, infos: Sequence[SourceInfo], listing: Listing) -> None:
    """Count the pictures that files of captions name, and say what else stands in these. Of tars the names are counted."""
    used_of: dict[Path, tuple[SourceInfo, set[str]]] = {}
    for info in _distinct_sources(infos):
        if not info.captions_file:
            continue
        _, used = used_of.setdefault(Path(info.root) / info.captions_file, (info, set()))
        where, names = f"from {info.captions_file}", names_in(info)
        if open_source(info).sharded:
            listing.captions[where] += len(names)
            used |= names
            continue
        listing.captions[where] += 0  # comes before those that have none
        for (path,) in writer.db.execute("SELECT path FROM scan.media WHERE source = ?", (info.ordinal,)):
            name = named_by(names, path)
            listing.captions["none" if name is None else where] += 1
            used |= set() if name is None else {name}

    for path, (info, used) in used_of.items():
        if strangers := names_in(info) - used:
            listing.passed_over.append(
                f"{path}: {len(strangers):,} names match no image there, for example {min(strangers)!r}"
            )
        if blank := blanks_in(info):
            listing.passed_over.append(f"{path}: {blank:,} empty captions next to others, which are never used")


def _count_masks(writer: IndexWriter, infos: Sequence[SourceInfo], listing: Listing) -> None:
    """Say how many pictures have masks of their own, where not all have to. What lies in tars is not known yet."""
    for info in _distinct_sources(infos):
        folder = Path(info.masks).expanduser()
        if not info.masks or not info.masks_optional or open_source(info).sharded or not folder.is_dir():
            continue
        masked = {split_suffix(path)[0] for path, _ in walk(folder) if is_picture(path)}
        stems = [stem for (stem,) in writer.db.execute("SELECT stem FROM scan.media WHERE source = ?", (info.ordinal,))]
        own = sum(stem in masked or stem.rpartition("/")[2] in masked for stem in stems)
        if own < len(stems):
            remainder = "the others use the common one" if info.default_mask else "the others count in full"
            listing.passed_over.append(
                f"{info.root}: {own:,} of {len(stems):,} images have a mask in {folder}, {remainder}"
            )


def match_files(
    writer: IndexWriter, previous: IndexSummary, infos: Sequence[SourceInfo], *, foreign: bool = False
) -> tuple[int, int]:
    """Find the files that have not changed since the previous index; return how many, and how many it had.

    A file is unchanged when its source, path, size, time and caption file are, and it was looked at as closely.
    foreign: the previous index is one of other data: a source of the same reading is the same there, whatever its name.
    """
    db = writer.db
    with disk_faults(writer.folder):
        earlier = (Path(previous.folder) / DATABASE).absolute()
        db.execute("ATTACH DATABASE ? AS old", (f"{earlier.as_uri()}?mode=ro&immutable=1",))
        db.executemany("INSERT INTO scan.mapping VALUES (?, ?, ?)", _mapping(previous.sources, infos, foreign))
        db.execute(_SAME)

        # what may have been a passing fault is looked at again, and what has no caption where that counts otherwise now
        for kind in PASSING:
            db.execute(_REFUSED, (f"{kind}:%",))
        for old, new in _read_otherwise(db, previous.sources, infos):
            if infos[new].allow_empty:
                for kind in CAPTIONLESS:
                    db.execute(_REFUSED_OF, (f"{kind}%", old))
            else:
                db.execute(_EMPTY_OF, (old,))
        (same,) = db.execute("SELECT count(*) FROM scan.same").fetchone()
        (had,) = db.execute("SELECT count(*) FROM old.files").fetchone()
    return same, had


def _read_otherwise(
    db: sqlite3.Connection, before: Sequence[SourceInfo], now: Sequence[SourceInfo]
) -> Iterator[tuple[int, int]]:
    """Yield (ordinal before, ordinal now) of sources whose images without a caption count only before, or only now."""
    earlier = {info.ordinal: info.allow_empty for info in before}
    for old, new in db.execute("SELECT old, new FROM scan.mapping").fetchall():
        if earlier[old] != now[new].allow_empty:
            yield old, new


def _mapping(
    sources: Sequence[SourceInfo], infos: Sequence[SourceInfo], foreign: bool
) -> Iterator[tuple[int, int, str | None]]:
    """Yield the ordinal of a source in the previous index, in this one, and its name where its keys are to be made anew."""
    if foreign:
        alike = {old.reading: old.ordinal for old in sources if old.kind in KINDS}
        for info in _distinct_sources(infos):
            if info.reading in alike:
                yield alike[info.reading], info.ordinal, info.name
        return
    ordinal_of = {(old.name, old.prefix, old.root, old.kind): old.ordinal for old in sources}
    for info in infos:
        old = ordinal_of.get((info.name, info.prefix, info.root, info.kind))
        if old is not None:
            yield old, info.ordinal, None


def take_over(writer: IndexWriter) -> None:
    """Copy what the previous index knows of the matched files."""
    with disk_faults(writer.folder):
        # an index of before there were references, or clips, has no column of them
        columns = {row[1] for row in writer.db.execute("PRAGMA old.table_info(records)")}
        later = {name: f"r.{name}" if name in columns else "NULL" for name in ("control", "clip")}
        records = _TAKE_RECORDS.format(**later)
        for statement in (records, _TAKE_REJECTS, _RAISE_LEVEL):
            writer.db.execute(statement)


def nothing_new(writer: IndexWriter, infos: Iterable[SourceInfo]) -> bool:
    """Tell whether the files that were looked at again are what they were: the same records, refused for the same reasons.

    A class that has no fingerprint gives every listing another time, so that only what was read of its pictures counts.
    """
    timeless = ", ".join(str(info.ordinal) for info in infos if info.kind == "class")
    now = {"db": "main", "row": "new", "source": "f.source", "timeless": timeless}
    before = now | {"db": "old", "row": "old", "source": "(SELECT new FROM scan.mapping p WHERE p.old = f.source)"}
    with disk_faults(writer.folder):
        for rows in _UNTAKEN:
            for newer, older in ((now, before), (before, now)):
                more = f"SELECT EXISTS ({rows.format(**newer)} EXCEPT {rows.format(**older)})"
                if writer.db.execute(more).fetchone()[0]:
                    return False
    return True


def unread_files(writer: IndexWriter) -> Iterator[tuple[int, int, FileRef]]:
    """Iterate over (id, source, file) of what was not taken over, grouped by source; nothing of shared sources."""
    last = 0
    while True:
        rows = writer.db.execute(
            f"SELECT id, source, path, caption FROM main.files WHERE id > ? AND {_UNREAD} ORDER BY id LIMIT ?",
            (last, _PAGE),
        ).fetchall()
        if not rows:
            return
        last = rows[-1][0]
        for number, source, path, caption in rows:
            yield number, source, FileRef(path, caption)


class Unread(NamedTuple):
    """How much is left to read. items: of shards an estimate by their bytes."""

    items: int
    shards: int


def unread_size(writer: IndexWriter) -> Unread:
    """Estimate the work."""
    plain, shards, size = writer.db.execute(
        "SELECT count(*) - count(shard), count(shard), coalesce(sum(CASE WHEN shard IS NOT NULL THEN size END), 0)"
        f" FROM main.files WHERE {_UNREAD}"
    ).fetchone()
    return Unread(plain + size // _BYTES_AN_ITEM, shards)


def count_shards(writer: IndexWriter, info: SourceInfo) -> int:
    """Return how many shards a source has, 0 for plain files."""
    (count,) = writer.db.execute("SELECT count(shard) FROM main.files WHERE source = ?", (info.ordinal,)).fetchone()
    return int(count)


def count_items(writer: IndexWriter, infos: Sequence[SourceInfo], enough: int) -> int:
    """Count items by the headers of shards, those of shared sources too, stopping at `enough`."""
    total = 0
    uses = Counter(firsts_of(infos))
    for info in _distinct_sources(infos):
        source, times = open_source(info), uses[info.ordinal]
        if not source.sharded:
            query = "SELECT count(*) FROM scan.media WHERE source = ?"
            total += times * writer.db.execute(query, (info.ordinal,)).fetchone()[0]
            continue
        for (path,) in writer.db.execute("SELECT path FROM scan.media WHERE source = ?", (info.ordinal,)):
            if total >= enough:
                return total
            with suppress(OSError):  # a damaged shard is named when it is read
                total += times * source.count(path, enough - total)
    return total
