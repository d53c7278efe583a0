"""A cache on an object store, read only: what is small is fetched whole, segments are read by ranges.

The index and what else is small lie in a folder of the user's cache, named by the state that they were fetched in, so that
a run keeps the state that it began with. Bytes of segments lie beside it, for all states: segments never change. An
entry that is read as a whole is kept as it is, since random reads of large samples would bring twice as much in
fixed blocks; small ones are read and kept in blocks of BLOCK bytes, for there the way costs more than the bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.config.stores import shown, why_not
from difftrain.config.user_cache import user_cache
from difftrain.contracts import ConfigFault, DataFault, Fault, TrainingFault
from difftrain.data.cache.copies import Copies, aligned
from difftrain.data.cache.fetching import File, Patience, Store, in_parallel
from difftrain.data.cache.folder import BIN, PART

Say = Callable[[str], None]
BLOCK = 256 << 10
WHOLE = BLOCK // 2  # an entry from this size on is brought by itself
_PIECE = 16 << 20  # of a file that is fetched whole
_OLD_S = 24 * 3600.0  # a state that nobody has used for so long is removed
_ALIVE_S = 3600.0
_NEEDED = ("cache.json", "metadata.db")
_STAMPS = "stamps.json"


@dataclass(frozen=True)
class RemoteCache:
    """A cache on an object store, as one process has found it. Picklable: others of the machine take it as it is."""

    url: str
    folder: Path  # with local copies of cache.json, metadata.db, uses and drops; nothing is to be written there
    bound: int  # of the copies of segments, in bytes
    patience: Patience = field(default_factory=Patience)

    @property
    def copies(self) -> Copies:
        """Return what keeps bytes of segments, for all processes of the machine."""
        return Copies(self.folder.parent, self.bound)

    @property
    def segments(self) -> RemoteSegments:
        """Return what reads its segments."""
        return RemoteSegments(self)

    def fetch_rows(self, use: str) -> None:
        """Fetch the rows of a use too, which are many. Raises TrainingFault."""
        store = Store(self.url, self.patience)
        for file in store.files("uses"):
            if file.name.startswith(f"uses/{use}-") and not (self.folder / file.name).exists():
                _fetch(store, file, self.folder / file.name)


class RemoteSegments:
    """Bytes of segments by place, from the local copies or the store."""

    def __init__(self, cache: RemoteCache) -> None:
        self._cache, self._store = cache, Store(cache.url, cache.patience)
        self._copies = cache.copies
        self._held: dict[
            str, tuple[list[int], list[np.ndarray]]
        ] = {}  # segment -> places, ascending, and what is there
        self._names: dict[str, str] = {}
        self._said_alive = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteSegments, (self._cache,)

    def want(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Bring whole entries, several at once, and hold them until the next call. Raises TrainingFault.

        ranges: segment, offset, length of each.
        """
        self._stay_alive()
        wanted: dict[tuple[str, int, int], int] = {}
        for segment, offset, length in ranges:
            for piece, least in _pieces(segment, offset, length):
                wanted[piece] = max(least, wanted.get(piece, 0))
        got = in_parallel([partial(self._piece, *piece, least) for piece, least in wanted.items()])
        self._hold(dict(zip(wanted, got)))

    def read(self, segment: str, offset: int, buffers: Sequence[Any]) -> None:
        """Fill buffers one after another with the bytes from an offset on. Raises TrainingFault."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        content = self._bytes(segment, offset, sum(map(len, views)))
        start = 0
        for view in views:
            view[:] = content[start : start + len(view)]
            start += len(view)

    def forget(self, segment: str, offset: int, length: int) -> bool:
        """Drop local copies of an entry that is not whole and bring it anew. Raises TrainingFault."""
        for (_, start, size), _ in _pieces(segment, offset, length):
            self._copies.drop(_name(segment, start, size))
        self.want([(segment, offset, length)])
        return True

    def _bytes(self, segment: str, offset: int, length: int) -> memoryview:
        """Return bytes that are held; else of blocks, for nobody knows of which entry they are."""
        starts, parts = self._held.get(segment, ([], []))
        which = bisect_right(starts, offset) - 1
        if which >= 0 and offset + length <= starts[which] + len(parts[which]):
            return parts[which][offset - starts[which] :][:length].data
        blocks = list(_blocks(segment, offset, length))
        got = in_parallel([partial(self._piece, *piece, least) for piece, least in blocks])
        begin = offset - blocks[0][0][1]
        joined = got[0] if len(got) == 1 else np.concatenate(got)
        return joined[begin : begin + length].data

    def _hold(self, got: dict[tuple[str, int, int], np.ndarray]) -> None:
        """Hold pieces by segment; blocks that touch become one, so that an entry lies in one piece."""
        self._held = {}
        for segment, start, size in sorted(got):
            starts, parts = self._held.setdefault(segment, ([], []))
            piece = got[segment, start, size]
            if parts and size == BLOCK and start % BLOCK == 0 and starts[-1] + len(parts[-1]) == start:
                joined = aligned(len(parts[-1]) + len(piece))
                np.concatenate([parts[-1], piece], out=joined)
                parts[-1] = joined
            else:
                starts.append(start)
                parts.append(piece)

    def _piece(self, segment: str, start: int, size: int, least: int) -> np.ndarray:
        """Return a piece of a segment, from the local copies or the store. Shapes: (at least `least`,) uint8."""
        name = _name(segment, start, size)
        kept = self._copies.get(name)
        if kept is not None and len(kept) >= least:
            return kept
        content = self._ask(segment, start, size, least)
        self._copies.put(name, content)
        found = aligned(len(content))
        found[:] = np.frombuffer(content, np.uint8)
        return found

    def _ask(self, segment: str, start: int, size: int, least: int) -> bytes:
        known = self._names.get(segment)
        for name in [known] if known else [f"segments/{segment}{BIN}", f"segments/{segment}{BIN}{PART}"]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                content = self._store.read(name, start, start + size, least)
                self._names[segment] = name
                return content
        raise TrainingFault(
            f"{shown(self._cache.url)}/segments/{segment}{BIN} is gone, bytes {start:,} to {start + size:,} of it are "
            "wanted. Copy the cache to the store again, with all its segments"
        )

    def _stay_alive(self) -> None:
        """Let others see that this state is in use."""
        if time.monotonic() - self._said_alive > _ALIVE_S or not self._said_alive:
            self._said_alive = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._cache.folder)
            self._copies.touch()


def fetch_cache(url: str, copy_gib: float = 50.0, say: Say = print, *, patience: Patience | None = None) -> RemoteCache:
    """Fetch what is small of a cache on an object store, where it is not here yet or has changed.

    Raises: ConfigFault where the URL cannot be read here; DataFault where no cache is there; TrainingFault where the
    store does not answer, or the user's cache folder takes nothing.
    """
    if fault := why_not(url):
        raise ConfigFault([Fault("--cache_dir", *fault)])
    store = Store(url, patience)
    home = user_cache() / "remote" / hashlib.blake2b(store.url.encode(), digest_size=12).hexdigest()
    files = _look(store)
    state = hashlib.blake2b(repr(files).encode(), digest_size=12)
    if not all(each.stamp for each in files):  # a store that tells of no change
        state.update(uuid.uuid4().bytes)
    folder = home / state.hexdigest()
    try:
        home.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            os.utime(folder)
        else:
            _fetch_all(store, files, home, folder, say)
        cache = RemoteCache(store.url, folder, round(copy_gib * (1 << 30)), store.patience)
        _remove_old(home, {folder, cache.copies.folder})
    except OSError as error:
        raise TrainingFault(
            f"{home}: what is fetched from {shown(url)} cannot be kept ({error.strerror or error}). Make room there, or "
            "let XDG_CACHE_HOME name another folder"
        ) from error
    return cache


def _look(store: Store) -> list[File]:
    """Return what is to be fetched. Raises DataFault."""
    return [
        *(_found(store, name) for name in _NEEDED),
        *(each for each in store.files("uses") if each.name.endswith(".json")),
        *(each for each in store.files("drops") if each.name.endswith(".rows")),
    ]


def _found(store: Store, name: str) -> File:
    try:
        return store.file(name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        what = "there is no feature cache" if name == "cache.json" else "the feature cache is not complete"
        raise DataFault(
            f"{shown(store.url)}: {what}, {name} is not there. Build the cache in a folder, and copy the whole folder"
        ) from None


def _fetch_all(store: Store, files: Sequence[File], home: Path, folder: Path, say: Say) -> None:
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
            raise TrainingFault(f"{shown(store.url)}/{changed[0]} was changed while it was fetched: start again")
        (aside / "URL").write_text(shown(store.url) + "\n", encoding="utf-8")
        (aside / _STAMPS).write_text(json.dumps([[file.name, file.size, file.stamp] for file in files]))
        with contextlib.suppress(OSError):  # another process was faster: its folder is as good
            aside.replace(folder)
        if not folder.is_dir():
            raise OSError(f"{folder} cannot be made")
        took = time.monotonic() - started
        say(f"cache: {len(missing)} files of {shown(store.url)} fetched ({size / 2**20:,.1f} MiB, {took:.1f} s)")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fetch(store: Store, file: File, path: Path) -> None:
    """Bring a whole file, some pieces at once. Raises OSError, TrainingFault."""
    aside = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    starts = range(0, file.size, _PIECE)
    calls = [partial(store.read, file.name, start, min(start + _PIECE, file.size)) for start in starts]
    try:
        with aside.open("xb") as out:
            for first in range(0, len(calls), 4):
                for piece in in_parallel(calls[first : first + 4]):
                    out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _earlier(home: Path) -> dict[File, Path]:
    """Return what is here of earlier states."""
    found = {}
    for path in home.glob(f"*/{_STAMPS}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            files = [File(*each) for each in json.loads(path.read_text())]
            found.update({file: path.parent / file.name for file in files if file.stamp})
    return found


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


def _pieces(segment: str, offset: int, length: int) -> list[tuple[tuple[str, int, int], int]]:
    """Return the pieces that an entry is brought in, (segment, start, size), and how many bytes of each there must be."""
    if length >= WHOLE:
        return [((segment, offset, length), length)]
    return _blocks(segment, offset, length)


def _blocks(segment: str, offset: int, length: int) -> list[tuple[tuple[str, int, int], int]]:
    stop = offset + max(length, 1)
    starts = range(offset // BLOCK * BLOCK, stop, BLOCK)
    return [((segment, start, BLOCK), min(BLOCK, stop - start)) for start in starts]


def _name(segment: str, start: int, size: int) -> str:
    return f"{segment}-{start:x}-{size:x}"
