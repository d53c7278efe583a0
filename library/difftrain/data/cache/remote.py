"""A cache on an object store, read only: what is small is fetched whole, segments are read by ranges (ranges.py).

The index and what else is small lie in a folder of the user's cache, named by the state that they were fetched in, so that
a run keeps the state that it began with. Bytes of segments lie beside it, for all states: segments never change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from difftrain.config.stores import shown, why_not
from difftrain.config.user_cache import user_cache
from difftrain.contracts import ConfigFault, DataFault, Fault, TrainingFault
from difftrain.data.cache.copies import Copies
from difftrain.data.cache.fetching import File, Patience, Store, in_parallel
from difftrain.data.cache.ranges import RemoteSegments

Say = Callable[[str], None]
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
    patience: Patience = field(default_factory=Patience)

    @property
    def copies(self) -> Copies:
        """Return what keeps bytes of segments, for all processes of the machine."""
        return Copies(self.folder.parent, self.bound)

    @property
    def segments(self) -> RemoteSegments:
        """Return what reads its segments."""
        return RemoteSegments(self.url, self.patience, self.copies, self.folder)

    def fetch_rows(self, use: str) -> None:
        """Fetch the rows of a use too, which are many. Raises TrainingFault."""
        store = Store(self.url, self.patience)
        for file in store.files("uses"):
            if file.name.startswith(f"uses/{use}-") and not (self.folder / file.name).exists():
                _fetch(store, file, self.folder / file.name)


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
