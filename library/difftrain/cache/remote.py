"""A cache on an object store, read only: what is small is fetched whole, segments are read by ranges."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from difftrain.cache.object_store import GONE, File, LocalCopies, ObjectStore, OpenCopy, RetryPolicy, in_parallel
from difftrain.cache.store.folder import BIN, PART
from difftrain.config.paths import shown_url, unreadable_url, user_cache
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, DataFault, Fault, TrainingFault
from difftrain.io.files import atomic_write

BLOCK = 256 << 10
LARGE = BLOCK // 2  # an entry from this size on is brought by itself
_OPEN = 128  # copies that are held open; more are held in memory
_ALIVE_S = 3600.0


class RemoteRange(NamedTuple):
    """What is brought at once: an entry, or a block, which the end of a segment may cut short."""

    segment: str
    start: int
    size: int

    @property
    def name(self) -> str:
        """Return the name of its copy."""
        return f"{self.segment}-{self.start:x}-{self.size:x}"


class RemoteSegments:
    """Read segments as store/read.py wants to: whole entries are asked for, then read in parts. Picklable."""

    def __init__(self, url: str, patience: RetryPolicy, copies: LocalCopies, state: Path) -> None:
        """Prepare. state: the folder of the state that is read, which must not be removed meanwhile."""
        self._store, self._copies, self._state = ObjectStore(url, patience), copies, state
        self._cached_pieces: dict[
            str, tuple[list[int], list[OpenCopy | memoryview]]
        ] = {}  # segment -> starts, ascending; contents
        self._names: dict[str, str] = {}
        self._said_alive = -_ALIVE_S

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteSegments, (self._store.url, self._store.patience, self._copies, self._state)

    def want(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Bring entries, several at once, and hold them until the next call. Raises TrainingFault.

        ranges: segment, offset, length of each.
        """
        self._stay_alive()
        needed: dict[RemoteRange, int] = {}
        for span in ranges:
            for piece, least in _pieces(*span):
                needed[piece] = max(least, needed.get(piece, 0))
        self._cached_pieces = {}
        copies = self._bring(needed)
        for piece in sorted(copies):
            starts, contents = self._cached_pieces.setdefault(piece.segment, ([], []))
            starts.append(piece.start)
            contents.append(copies[piece])

    def read(self, segment: str, offset: int, buffers: Sequence[Any]) -> None:
        """Fill buffers one after another with the bytes from an offset on. Raises TrainingFault."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        length = sum(map(len, views))
        starts, contents = self._cached_pieces.get(segment, ([], []))
        which = bisect_right(starts, offset) - 1
        if which >= 0 and _fill(contents[which], offset - starts[which], views, length):
            return
        start = 0
        joined = self._joined(segment, offset, length)
        for view in views:
            view[:] = joined[start : start + len(view)]
            start += len(view)

    def forget(self, segment: str, offset: int, length: int) -> bool:
        """Drop local copies of an entry that is not whole and bring it anew. Raises TrainingFault."""
        for piece, _ in _pieces(segment, offset, length):
            self._copies.drop(piece.name)
        self.want([(segment, offset, length)])
        return True

    def _joined(self, segment: str, offset: int, length: int) -> memoryview:
        """Return bytes of several blocks: of a small entry, or of nobody knows which."""
        needed = dict(_blocks(segment, offset, length))
        starts, contents = self._cached_pieces.get(segment, ([], []))
        cached = {piece: contents[starts.index(piece.start)] for piece in needed if piece.start in starts}
        copies = cached | self._bring({piece: least for piece, least in needed.items() if piece not in cached})
        joined = bytearray(sum(needed.values()))
        at = 0
        for piece, least in needed.items():
            part = memoryview(joined)[at : at + least]
            if not _fill(copies[piece], 0, [part], least):
                self._copies.drop(piece.name)
                part[:] = self._ask(piece, least)[:least]
            at += least
        begin = offset - min(piece.start for piece in needed)
        return memoryview(joined)[begin : begin + length]

    def _bring(self, needed: dict[RemoteRange, int]) -> dict[RemoteRange, OpenCopy | memoryview]:
        """Return pieces, from the local copies or the store."""
        copies: dict[RemoteRange, OpenCopy | memoryview] = {}
        for piece, least in needed.items():
            copy = self._copies.open(piece.name)
            if copy is not None and copy.size >= least:
                copies[piece] = copy if len(copies) < _OPEN else copy.content()
        missing = [piece for piece in needed if piece not in copies]
        brought = in_parallel([partial(self._fetched, piece, needed[piece]) for piece in missing])
        return copies | dict(zip(missing, brought, strict=True))

    def _fetched(self, piece: RemoteRange, least: int) -> memoryview:
        content = self._ask(piece, least)
        self._copies.put(piece.name, content)
        return memoryview(content)

    def _ask(self, piece: RemoteRange, least: int) -> bytes:
        known = self._names.get(piece.segment)
        sealed = f"segments/{piece.segment}{BIN}"
        stop = piece.start + piece.size
        for name in [known] if known else [sealed, sealed + PART]:
            with contextlib.suppress(*GONE):
                content = self._store.read(name, piece.start, stop, least)
                self._names[piece.segment] = name
                return content
        raise TrainingFault(
            f"{shown_url(self._store.url)}/{sealed} is gone, bytes {piece.start:,} to {stop:,} of it are needed. Copy the "
            "cache to the store again, with all its segments"
        )

    def _stay_alive(self) -> None:
        """Let others see that this state is in use."""
        if time.monotonic() - self._said_alive > _ALIVE_S:
            self._said_alive = time.monotonic()
            self._copies.touch()
            with contextlib.suppress(OSError):
                os.utime(self._state)


def _fill(content: OpenCopy | memoryview, at: int, views: list[memoryview], length: int) -> bool:
    """Fill buffers from a place on; tell whether there is enough."""
    if isinstance(content, OpenCopy):
        return content.fill(at, views, length)
    if len(content) - at < length:
        return False
    for view in views:
        view[:] = content[at : at + len(view)]
        at += len(view)
    return True


def _pieces(segment: str, offset: int, length: int) -> Iterator[tuple[RemoteRange, int]]:
    """Yield the pieces that an entry is brought in, and how many bytes of each there must be."""
    if length >= LARGE:
        yield RemoteRange(segment, offset, length), length
    else:
        yield from _blocks(segment, offset, length)


def _blocks(segment: str, offset: int, length: int) -> Iterator[tuple[RemoteRange, int]]:
    stop = offset + max(length, 1)
    for start in range(offset // BLOCK * BLOCK, stop, BLOCK):
        yield RemoteRange(segment, start, BLOCK), min(BLOCK, stop - start)


Log = Callable[[str], None]
_PIECE = 16 << 20  # of a file that is fetched whole
_OLD_S = 24 * 3600.0  # a state that nobody has used for so long is removed
_NEEDED = ("cache.json", "metadata.db")
_STAMPS = "stamps.json"


@dataclass(frozen=True)
class RemoteCache:
    """A cache on an object store, as one process has found it. Picklable: others of the machine take it as it is."""

    url: str
    folder: Path  # with local copies of cache.json, metadata.db, uses and drops; nothing is to be written there
    bound: int  # of the copies of segments, in bytes
    patience: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def copies(self) -> LocalCopies:
        """Return what keeps bytes of segments, for all processes of the machine."""
        return LocalCopies(self.folder.parent, self.bound)

    @property
    def segments(self) -> RemoteSegments:
        """Return what reads its segments."""
        return RemoteSegments(self.url, self.patience, self.copies, self.folder)

    def fetch_rows(self, use: str) -> None:
        """Fetch the rows of a use too, which are many. Raises TrainingFault."""
        store = ObjectStore(self.url, self.patience)
        for file in store.files("uses"):
            if file.name.startswith(f"uses/{use}-") and not (self.folder / file.name).exists():
                _fetch(store, file, self.folder / file.name)


def fetch_cache(
    url: str, copy_gib: float = 50.0, log: Log = print, *, patience: RetryPolicy | None = None
) -> RemoteCache:
    """Fetch what is small of a cache on an object store, where it is not here yet or has changed.

    Raises: ConfigFault where the URL cannot be read here; DataFault where no cache is there; TrainingFault where the
    store does not answer, or the user's cache folder takes nothing.
    """
    if fault := unreadable_url(url):
        raise ConfigFault([Fault(option("data.cache_dir"), *fault)])
    store = ObjectStore(url, patience)
    home = user_cache() / "remote" / hashlib.blake2b(store.url.encode(), digest_size=12).hexdigest()
    files = _look(store)

    # a folder for each state of the store
    state = hashlib.blake2b(repr(files).encode(), digest_size=12)
    if not all(file.stamp for file in files):  # a store that tells of no change
        state.update(uuid.uuid4().bytes)
    folder = home / state.hexdigest()

    # fetch it, unless another process has
    try:
        home.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            os.utime(folder)
        else:
            _fetch_all(store, files, home, folder, log)
        cache = RemoteCache(store.url, folder, round(copy_gib * (1 << 30)), store.patience)
        _remove_old(home, {folder, cache.copies.folder})
    except OSError as error:
        raise TrainingFault(
            f"{home}: files fetched from {shown_url(url)} cannot be stored ({error.strerror or error}). Free some space "
            "there, or set XDG_CACHE_HOME to another folder"
        ) from error
    return cache


def _look(store: ObjectStore) -> list[File]:
    """Return what is to be fetched. Raises DataFault."""
    return [
        *(_needed_file(store, name) for name in _NEEDED),
        *(file for file in store.files("uses") if file.name.endswith(".json")),
        *(file for file in store.files("drops") if file.name.endswith(".rows")),
    ]


def _needed_file(store: ObjectStore, name: str) -> File:
    try:
        return store.file(name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        what = "there is no feature cache" if name == "cache.json" else "the feature cache is not complete"
        raise DataFault(
            f"{shown_url(store.url)}: {what}, {name} is not there. Build the cache in a folder, and copy the whole folder"
        ) from None


def _fetch_all(store: ObjectStore, files: Sequence[File], home: Path, folder: Path, log: Log) -> None:
    """Bring files into a folder that is whole or absent; what has not changed is taken from earlier ones."""
    aside = home / f"tmp-{uuid.uuid4().hex}"
    try:
        (aside / "segments").mkdir(parents=True)
        for file in files:
            (aside / file.name).parent.mkdir(exist_ok=True)
        earlier = _earlier(home)
        missing = [file for file in files if not _taken(earlier.get(file), aside / file.name)]
        started, size = time.monotonic(), sum(file.size for file in missing)
        for file in missing:
            _fetch(store, file, aside / file.name)
        changed = [file.name for file in missing if file.stamp and store.file(file.name) != file]
        if changed:
            raise TrainingFault(f"{shown_url(store.url)}/{changed[0]} was changed while it was fetched: start again")
        (aside / "URL").write_text(shown_url(store.url) + "\n", encoding="utf-8")
        (aside / _STAMPS).write_text(json.dumps([[file.name, file.size, file.stamp] for file in files]))
        with contextlib.suppress(OSError):  # another process was faster: its folder is as good
            aside.replace(folder)
        if not folder.is_dir():
            raise OSError(f"{folder} cannot be made")
        took = time.monotonic() - started
        log(f"cache: {len(missing)} files of {shown_url(store.url)} fetched ({size / 2**20:,.1f} MiB, {took:.1f} s)")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fetch(store: ObjectStore, file: File, path: Path) -> None:
    """Bring a whole file, some pieces at once. Raises OSError, TrainingFault."""
    starts = range(0, file.size, _PIECE)
    calls = [partial(store.read, file.name, start, min(start + _PIECE, file.size)) for start in starts]
    with atomic_write(path) as out:
        for first in range(0, len(calls), 4):
            for piece in in_parallel(calls[first : first + 4]):
                out.write(piece)


def _earlier(home: Path) -> dict[File, Path]:
    """Return what is here of earlier states."""
    stamps = {}
    for path in home.glob(f"*/{_STAMPS}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            files = [File(*fields) for fields in json.loads(path.read_text())]
            stamps.update({file: path.parent / file.name for file in files if file.stamp})
    return stamps


def _taken(earlier: Path | None, path: Path) -> bool:
    """Tell whether a file could be had from an earlier state."""
    with contextlib.suppress(OSError):
        if earlier is not None:
            os.link(earlier, path)
            return True
    return False


def _remove_old(home: Path, current: set[Path]) -> None:
    for path in home.iterdir():
        with contextlib.suppress(OSError):
            if path not in current and path.stat().st_mtime < time.time() - _OLD_S:
                shutil.rmtree(path, ignore_errors=True)
