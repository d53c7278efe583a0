"""The folder of a cache: what lies where, and how files get their names there. Nothing here depends on a clock."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from difftrain.cache.store.format import FORMAT
from difftrain.config.spellings.spelling import option
from difftrain.contracts import DataFault, TrainingFault
from difftrain.io.files import write_bytes

BIN, IDX = ".bin", ".idx"
PART = ".part"  # of a segment that was not sealed: still being written, or its writer was killed
_MARK = "cache.json"


class CacheFolder:
    """A cache on a file system. Any number of processes have it open; each writes only files of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segments = path / "segments"
        self.tombstones_dir = path / "drops"
        self.references_dir = path / "uses"
        self.database = path / "metadata.db"
        self.rejects = path / "rejected.jsonl"

    @classmethod
    def open(cls, path: str | Path, create: bool = False) -> CacheFolder:
        """Open a cache. create: make it where there is none. Raises DataFault, TrainingFault."""
        folder = cls(Path(path))
        mark = folder.path / _MARK
        if create and not mark.exists():
            with disk_faults(folder.path):
                for needed in (folder.segments, folder.tombstones_dir, folder.references_dir):
                    needed.mkdir(parents=True, exist_ok=True)
                write_bytes(mark, json.dumps({"format": FORMAT}).encode())
        try:
            version = json.loads(mark.read_bytes())["format"]
        except FileNotFoundError:
            remedy = f"give the folder that was given as {option('data.cache_dir')} when it was built"
            raise DataFault(f"{folder.path}: there is no feature cache, no {_MARK} is in it; {remedy}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataFault(f"{mark} cannot be read ({error}); it should be {json.dumps({'format': FORMAT})}") from None
        if version != FORMAT:
            raise DataFault(
                f"{folder.path}: the cache is of format {version}, this version reads and writes format {FORMAT}. "
                f"Use the version that wrote it, or name another folder with {option('data.cache_dir')}"
            )
        return folder

    @cached_property
    def writable(self) -> bool:
        """Tell whether files can be made here; found out once, by making one that never has a name."""
        try:
            with tempfile.TemporaryFile(dir=self.segments if self.segments.is_dir() else self.path):
                return True
        except OSError:
            return False

    def file(self, segment: str, suffix: str) -> Path:
        """Return a file of a segment: its sealed name, else that of one still being written."""
        sealed = self.segments / f"{segment}{suffix}"
        part = self.segments / f"{segment}{suffix}{PART}"
        return part if not sealed.exists() and part.exists() else sealed

    def open_file(self, segment: str, suffix: str) -> IO[bytes]:
        """Open a file of a segment for reading, also while it is being sealed. Raises OSError."""
        for _ in range(3):
            with contextlib.suppress(FileNotFoundError):
                return self.file(segment, suffix).open("rb")
        return (self.segments / f"{segment}{suffix}").open("rb")

    def exists(self, segment: str, suffix: str) -> bool:
        """Tell whether a file of a segment is there under either name."""
        return any(self.file(segment, suffix).exists() for _ in range(2))  # it may be renamed between two looks

    def sealed(self, segment: str) -> bool:
        """Tell whether a segment was finished: nobody appends to it any more."""
        return (self.segments / f"{segment}{IDX}").exists()

    def listed(self) -> dict[str, set[str]]:
        """Return the segments that have payloads, and those that have a journal, as one look at the folder shows them."""
        names: dict[str, set[str]] = {BIN: set(), IDX: set()}
        if self.segments.is_dir():
            for name in os.listdir(self.segments):  # noqa: PTH208
                stem, suffix = os.path.splitext(name.removesuffix(PART))  # noqa: PTH122
                if suffix in names:
                    names[suffix].add(stem)
        return names

    def names(self) -> list[str]:
        """Return the names of all segments that have a journal, in order."""
        return sorted(self.listed()[IDX])

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheFolder, (self.path,)


@contextmanager
def disk_faults(folder: Path) -> Iterator[None]:
    """Name the folder where the disk refuses something. Raises TrainingFault."""
    try:
        yield
    except OSError as error:
        raise TrainingFault(
            f"{folder}: the feature cache cannot be written ({error.strerror or error}). What was committed is "
            f"kept and used by the next start. Free some space there, or name another folder with {option('data.cache_dir')}"
        ) from error


def clean(folder: Path, older_s: float = 24 * 3600.0) -> None:
    """Remove what killed processes left half written, a day later. Ages are by the clock of the file system alone."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder) as probe:
        now = os.fstat(probe.fileno()).st_mtime
        for path in (*folder.glob(".*.tmp"), *folder.glob("*.tmp-*")):  # the latter are of version 0.5
            with contextlib.suppress(OSError):
                if path.stat().st_mtime <= now - older_s:
                    path.unlink()
