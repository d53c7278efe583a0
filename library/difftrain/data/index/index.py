"""The index: every usable record of the configured data, opened in constant time and constant memory."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from difftrain.contracts import Clip, DataFault, MediaRef, Record, Reject
from difftrain.data.index.clips import clip_of_json
from difftrain.data.index.column import Column
from difftrain.data.media.clips import FramesFolder, MediaFile
from difftrain.data.sources import SOURCES, SourceInfo, open_source
from difftrain.data.sources.base import DataSource, FramesRef, read_image
from difftrain.io.files import read_regular

T = TypeVar("T")


FORMAT = 1  # of the index on disk; raise it when the schema or the meaning of a row changes
CURRENT = "current"  # names the folder of the newest whole index
DATABASE = "index.sqlite"
META = "index.json"
_MOST_META = 1 << 28  # bytes of index.json: of 65,536 sources some 30 MB
LONG_CAPTION = 2000  # characters: more than any text encoder here takes in

_RECORD = """
SELECT files.source, coalesce(records.path, files.path), records.member, records.offset, records.length,
       records.width, records.height, records.captions, records.content, files.path, records.key, {control}, {clip}
FROM records JOIN files ON files.id = records.file WHERE records.row = ?
"""
_CONTROL = """
SELECT records.row, files.source, records.control, files.size, files.mtime_ns FROM records
JOIN files ON files.id = records.file WHERE records.control IS NOT NULL ORDER BY records.row
"""
_STAMPS = """
SELECT records.row, records.content, files.size, files.mtime_ns, records.path, records.offset, records.length
FROM records JOIN files ON files.id = records.file
"""
_CAPTIONLESS = """
SELECT files.source, files.path, records.member, {clip} FROM records JOIN files ON files.id = records.file
WHERE records.captions = '[""]' ORDER BY records.row LIMIT ?
"""
_PLACES = """
SELECT records.row, files.source, coalesce(records.path, files.path), iif(records.path IS NULL, records.member, NULL), {clip}
FROM records JOIN files ON files.id = records.file WHERE files.source IN ({marks}) ORDER BY records.row
"""


@dataclass(frozen=True)
class IndexColumns:
    """What planning needs of every record, entry i for id i; memory-mapped, read-only.

    Shapes: keys (N, 16) uint8, ascending byte by byte; width, height, shard, row (N,) uint32; source (N,) uint16.
    width and height are those after EXIF rotation. shard counts the tars or parquet files of a source by name, 0 for
    plain files. row is the record's place in the database. clips (N, 3) uint32: how many frames (1 of an image), the
    first of them, milliseconds before it; None where there are images alone.
    """

    keys: np.ndarray
    width: np.ndarray
    height: np.ndarray
    source: np.ndarray
    shard: np.ndarray
    row: np.ndarray
    clips: np.ndarray | None = None

    @property
    def present(self) -> dict[str, np.ndarray]:
        """Return the columns that there are, by their names."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: column for name, column in named.items() if column is not None}

    @property
    def frames(self) -> np.ndarray:
        """Return how many frames each record has as a sample. Shape: (N,)."""
        return np.ones(len(self.keys), np.uint32) if self.clips is None else self.clips[:, 0]

    @classmethod
    def open(cls, folder: Path) -> IndexColumns:
        """Map the columns of an index folder."""
        names = [name for name in cls.__dataclass_fields__ if name != "clips" or (folder / "clips.npy").is_file()]
        return cls(**{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names})


@dataclass(frozen=True)
class IndexSummary:
    """What an index holds, as written beside it and printed at start."""

    folder: str
    count: int
    fingerprint: str  # of the keys and sizes of all records
    duplicates: int | None  # records whose bytes another record has too; None: not looked for (see notes)
    rejected: int
    reasons: dict[str, int]  # kind of reason -> how many
    sources: tuple[SourceInfo, ...]
    shards: tuple[int, ...]  # of each source
    verify: str  # full | quick
    long_captions: int = 0  # of more than LONG_CAPTION characters
    empty_captions: int = field(default=0, compare=False)  # of records that had none, where that is allowed
    notes: tuple[str, ...] = ()  # choices made and things passed over, one sentence each
    stamp: str = ""  # of what was refused before any file was opened
    checksums: Mapping[str, int] = field(default_factory=dict, compare=False)  # CRC-32 of each column; of 0.5 none
    reused: int = field(default=0, compare=False)  # files taken over from the previous index unread
    read: int = field(default=0, compare=False)

    def to_json(self) -> str:
        """Write as JSON."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1)

    @classmethod
    def load(cls, folder: Path) -> IndexSummary:
        """Read the summary of an index folder.

        Raises: DataFault where it is missing, damaged or of another version.
        """
        try:
            raw: dict[str, Any] = json.loads(read_regular(folder / META, _MOST_META))
            if raw.pop("format") != FORMAT:
                raise DataFault(f"{folder}: an index of another version; remove the folder and it is built again")
            raw["sources"] = tuple(
                _checked(SourceInfo(**s | {name: tuple(s[name]) for name in _TUPLES if name in s}), _OF_A_SOURCE)
                for s in raw["sources"]
            )
            raw |= {name: tuple(raw[name]) for name in ("shards", "notes")} | {"folder": str(folder)}
            summary = _checked(cls(**raw), _OF_A_SUMMARY)
            if unknown := {info.kind for info in summary.sources} - SOURCES.keys():
                raise ValueError(f"sources of kind {', '.join(sorted(unknown))}")
            if [info.ordinal for info in summary.sources] != list(range(len(summary.shards))):
                raise ValueError("its sources are not numbered")
            return summary
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataFault(
                f"{folder}: the index cannot be read ({error}); remove the folder and it is built again"
            ) from None


_TUPLES = ("suffixes", "control", "control_columns", "frame_buckets")  # fields of a source that JSON has as lists
# field -> the types that its value may have
_OF_A_SOURCE: dict[str, tuple[type, ...]] = {
    "ordinal": (int,), "name": (str,), "kind": (str,), "root": (str,), "repeats": (int, float), "share": (int, float),
}  # fmt: skip
_OF_A_SOURCE |= {f.name: (type(f.default),) for f in fields(SourceInfo) if f.name not in _OF_A_SOURCE}
_OF_A_SUMMARY: dict[str, tuple[type, ...]] = {
    "folder": (str,), "count": (int,), "fingerprint": (str,), "duplicates": (int, type(None)), "rejected": (int,),
    "reasons": (dict,), "sources": (tuple,), "shards": (tuple,), "verify": (str,), "checksums": (dict,),
}  # fmt: skip
_OF_A_SUMMARY |= {
    f.name: (type(f.default),) for f in fields(IndexSummary) if f.name not in _OF_A_SUMMARY and f.default is not MISSING
}


def _checked(read: T, types: Mapping[str, tuple[type, ...]]) -> T:
    """Return what was read of a file. Raises TypeError where a value is of another type."""
    for name, allowed in types.items():
        value = getattr(read, name)
        if type(value) not in allowed:
            raise TypeError(f"{name} is {type(value).__name__}")
    return read


def _behind(member: str | None, clip: str | None) -> str:
    """Return what stands behind a file's path in a record's name: a member; of several clips of a plain file which it is."""
    if not member:
        return ""
    return member if clip and member == clip_of_json(clip).part else f"!{member}"


def newest(folder: Path) -> Path | None:
    """Return the folder of the newest whole index under `folder`, None where there is none."""
    try:
        name = read_regular(folder / CURRENT, 1024).decode().strip()
    except (OSError, ValueError):
        return None
    if name != Path(name).name or "\0" in name:  # it names a folder beside it, nothing else
        return None
    folder_path = folder / name
    return folder_path if name and (folder_path / META).is_file() and (folder_path / DATABASE).is_file() else None


def checksum_of(path: Path) -> int:
    """Return the CRC-32 of a column's file."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def check_columns(summary: IndexSummary) -> None:
    """Compare the columns of an index with their checksums; the keys and sizes of an old one with its fingerprint.

    One pass over 34 bytes a record. Raises: DataFault where they differ or cannot be read.
    """
    folder = Path(summary.folder)
    try:
        if summary.checksums:
            damaged = [
                name for name, crc in sorted(summary.checksums.items()) if checksum_of(folder / f"{name}.npy") != crc
            ]
        else:
            columns = IndexColumns.open(folder)
            damaged = [] if fingerprint_of(columns) == summary.fingerprint else ["keys, width or height"]
    except (OSError, ValueError) as error:
        raise DataFault(
            f"{folder}: the index cannot be read ({error}); remove the folder and it is built again"
        ) from None
    if damaged:
        what = f"{folder}: the index is damaged: the checksum of {', '.join(damaged)} differs"
        raise DataFault(f"{what}; remove the folder and it is built again")


def fingerprint_of(columns: IndexColumns) -> str:
    """Hash the count, keys and sizes of a data set."""
    state = hashlib.blake2b(digest_size=16, person=b"difftrain.index")
    state.update(len(columns.keys).to_bytes(8, "little"))
    clips = () if columns.clips is None else (columns.clips.astype("<u4"),)
    for column in (columns.keys, columns.width.astype("<u4"), columns.height.astype("<u4"), *clips):
        state.update(np.ascontiguousarray(column).tobytes())
    return state.hexdigest()


def connect(database: Path) -> sqlite3.Connection:
    """Open a finished database: read-only, without locks (it never changes)."""
    return sqlite3.connect(f"file:{quote(str(database))}?mode=ro&immutable=1", uri=True, check_same_thread=False)


class Index:
    """Read an index. Picklable; each process and thread opens SQLite for itself, when it first looks something up.

    classes: (dotted name, argument) of the data set classes that the configuration names: only these are imported,
    whatever the files of the index say.
    """

    def __init__(
        self, folder: Path, classes: Collection[tuple[str, str]] = (), summary: IndexSummary | None = None
    ) -> None:
        self.folder = folder
        self.classes = frozenset(classes)
        self.summary = IndexSummary.load(folder) if summary is None else summary
        self._local = threading.local()

    @classmethod
    def open(cls, folder: Path | str) -> Index:
        """Open the newest index under a folder that build_index was given.

        Raises: DataFault where there is none.
        """
        path = newest(Path(folder))
        if path is None:
            raise DataFault(f"{folder}: no index here; it is built when a training starts")
        return cls(path)

    def __reduce__(self) -> tuple[Any, ...]:
        # the very folder, not the newest, and what was read of it: workers see what their parent sees
        return Index, (self.folder, self.classes, self.summary)

    def reopened(self) -> Index:
        """Return the same index with files of its own, for another thread."""
        return Index(self.folder, self.classes, self.summary)

    @property
    def count(self) -> int:
        """Return the number of records."""
        return self.summary.count

    @property
    def fingerprint(self) -> str:
        """Return the hash of all keys and sizes."""
        return self.summary.fingerprint

    @property
    def sources(self) -> tuple[SourceInfo, ...]:
        """Return the sources, by ordinal."""
        return self.summary.sources

    @property
    def duplicates(self) -> int | None:
        """Return how many records have the bytes of another one; None where that was not looked for."""
        return self.summary.duplicates

    @cached_property
    def _columns(self) -> IndexColumns:
        return IndexColumns.open(self.folder)

    @cached_property
    def _rows(self) -> Column:
        return Column(self.folder / "row.npy")

    @cached_property
    def _sources(self) -> list[DataSource]:
        if strangers := self.foreign_classes():
            what = f"{self.folder}: this index names {', '.join(strangers)}, which the configuration does not"
            raise DataFault(f"{what}; no code is taken from it. Remove the folder and it is built again")
        return [open_source(info) for info in self.sources]

    def foreign_classes(self) -> list[str]:
        """Name what its files would have imported and the configuration does not name."""
        return [
            info.root for info in self.sources if info.kind == "class" and (info.root, info.only) not in self.classes
        ]

    @cached_property
    def _labels(self) -> list[str]:
        return [info.label for info in self.sources]

    @cached_property
    def _is_paired(self) -> bool:
        """Tell whether records have reference images; an index of before there were any has no column of them."""
        return any(info.num_control for info in self.sources)

    @cached_property
    def has_clips(self) -> bool:
        """Tell whether records may be clips; an index of before there were any has no column of them."""
        return any(info.frame_buckets for info in self.sources)

    def window(self, source: int, frames: int, first: int, start_ms: int) -> Clip | None:
        """Return the window that a source's clip is, by its row of the column; None of an image."""
        return Clip(start_ms, first, frames, 0, self.sources[source].fps) if frames > 1 else None

    def columns(self) -> IndexColumns:
        """Return the memory-mapped columns."""
        return self._columns

    def record(self, record_id: int) -> Record:
        """Look up one record.

        Raises: IndexError where there is no such id.
        """
        if not 0 <= record_id < self.summary.count:
            raise IndexError(f"record {record_id}: this index has ids 0 to {self.count - 1}")
        control = "records.control" if self._is_paired else "NULL"
        statement = _RECORD.format(control=control, clip="records.clip" if self.has_clips else "NULL")
        row = self._connection().execute(statement, (int(self._rows.take([record_id])[0]),)).fetchone()
        source, path, member, offset, length, width, height, captions, content, file, key, control, clip = row
        return Record(
            id=record_id,
            key=key,
            media=MediaRef(source, path, offset, length),
            captions=tuple(json.loads(captions)),
            size_hw=(height, width),
            content=content,
            name=f"{self._labels[source]}/{file}" + _behind(member, clip),
            control=tuple(MediaRef(source, *reference) for reference in json.loads(control)) if control else (),
            clip=clip_of_json(clip) if clip else None,
        )

    def records(self, ids: Iterable[int]) -> list[Record]:
        """Look up several records, in the order asked for."""
        return [self.record(int(i)) for i in ids]

    def stamps(self) -> np.ndarray:
        """Return what changes with the bytes of each picture, entry i for id i. Shape: (N, 16) uint8.

        The hash of the bytes where all were read; else of the file's size and time, and the place in it.
        """
        rows = np.zeros((int(self._columns.row.max(initial=0)) + 1, 16), dtype=np.uint8)
        for row, content, *remaining in self._connection().execute(_STAMPS):
            stamp = content or hashlib.blake2b(json.dumps(remaining).encode(), digest_size=16).digest()
            rows[row] = np.frombuffer(stamp, dtype=np.uint8)
        return rows[np.asarray(self._columns.row)]

    def path(self, record: Record) -> str:
        """Return what rejects call a record: the whole path, and the member where it lies in a shard."""
        return str(Path(self.sources[record.media.source].root).parent / record.name)

    def read(self, media: MediaRef) -> bytes:
        """Read the bytes of a picture, in place.

        Raises: OSError where they are gone or shorter than when they were indexed.
        """
        if media.path.startswith("/") and self.sources[media.source].num_control:
            return read_image(Path(media.path))  # a reference in a folder of its own
        return self._sources[media.source].read(media)

    def open_media(self, media: MediaRef) -> MediaFile:
        """Return a picture or video to be read in place: a seekable file, a path, a folder of frames. Raises: OSError."""
        file = self._sources[media.source].open_media(media)
        return FramesFolder(*file) if isinstance(file, FramesRef) else file

    def references(self, number: int) -> Iterator[tuple[int, MediaRef, int, int]]:
        """Iterate over (row, reference `number`, size and mtime_ns of the record's own file), by row."""
        for row, source, control, size, mtime_ns in self._connection().execute(_CONTROL):
            yield row, MediaRef(source, *json.loads(control)[number]), size, mtime_ns

    def rejects(self) -> Iterator[Reject]:
        """Iterate over what is not trained on and why, by path."""
        for path, reason in self._connection().execute("SELECT path, reason FROM rejects ORDER BY path, reason"):
            yield Reject(path, reason)

    def captionless(self, most: int) -> list[str]:
        """Return the names of some records that have an empty caption because they had none."""
        clip = "records.clip" if self.has_clips else "NULL"
        rows = self._connection().execute(_CAPTIONLESS.format(clip=clip), (most,))
        return [f"{self._labels[source]}/{path}" + _behind(member, clip) for source, path, member, clip in rows]

    def places(self, sources: Sequence[int]) -> Iterator[tuple[int, int, str, str | None]]:
        """Iterate over (row, source, path, member) of the records of some sources, by row.

        path: of the file that holds the picture or video, relative to its source. member: only where that holds several.
        """
        marks, clip = ", ".join("?" * len(sources)), "records.clip" if self.has_clips else "NULL"
        rows = self._connection().execute(_PLACES.format(marks=marks, clip=clip), tuple(sources))
        for row, source, path, member, written in rows:
            part = clip_of_json(written).part if written else ""
            yield row, source, path, (member.removesuffix(part) or None) if member and part else member

    def shard_paths(self, source: int) -> list[str]:
        """Return the shards of a source by ordinal: paths relative to its root; empty for plain files."""
        rows = self._connection().execute(
            "SELECT path FROM files WHERE source = ? AND shard IS NOT NULL ORDER BY shard", (source,)
        )
        return [path for (path,) in rows] if self.summary.shards[source] else []

    def _connection(self) -> sqlite3.Connection:
        connection = getattr(self._local, "connection", None)
        if connection is None or connection[0] != os.getpid():  # SQLite must not be carried across a fork
            self._local.connection = connection = (os.getpid(), connect(self.folder / DATABASE))
        return connection[1]
