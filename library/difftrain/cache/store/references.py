"""What configurations want of a cache: which entries each of their records reads.

A use is written before it is built, so that no clean-up takes away what is being made for it. Its rows lie in files that
are named by their checksums, its facts, written after them, name these files: a kill in between leaves the use of before.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.cache.store.folder import BIN, IDX, CacheFolder, disk_faults
from difftrain.cache.store.format import FORMAT, Damaged, crc32c, header_block, read_header
from difftrain.contracts import DataFault
from difftrain.io.files import write_bytes

REFERENCE_ROW = np.dtype([("key", "V16"), ("variant", "<u2"), ("address", "V16")])
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Reference:
    """What one configuration wants."""

    id: str
    facts: Mapping[str, Any]
    complete: bool  # everything that it wants was there
    used_at: float  # when a run last said so, in seconds since the epoch by the clock of the file system
    encoders: tuple[str, ...]
    folder: Path
    crcs: Mapping[str, int]  # of the file of each encoder

    def rows(self, encoder: str) -> np.ndarray:
        """Return its rows of an encoder, one a record and variant, sorted by key; memory-mapped. Raises DataFault."""
        return self._read(encoder, lambda path: None)

    def check(self, encoder: str) -> None:
        """Read all of an encoder's rows and compare their checksum. Raises DataFault."""

        def compare(path: Path) -> None:
            crc = 0
            with path.open("rb") as file:
                while piece := file.read(_CHUNK):
                    crc = crc32c(piece, crc)
            if crc != self.crcs[encoder]:
                raise ValueError("its checksum differs")

        self._read(encoder, compare)

    def _read(self, encoder: str, look: Callable[[Path], None]) -> np.ndarray:
        path = _rows_file(self.folder, self.id, encoder, self.crcs[encoder])
        try:
            look(path)
            rows: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            if rows.dtype != REFERENCE_ROW:
                raise ValueError(f"its rows are of {rows.dtype}")
        except (OSError, ValueError, EOFError) as error:
            raise DataFault(
                f"{path}, which lists the cache entries that a configuration needs, cannot be used ({error}). "
                "Build the cache again with that configuration, or remove the file to forget the configuration"
            ) from None
        return rows


def write(folder: CacheFolder, use: str, facts: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> None:
    """Write what a configuration wants. Shapes: rows (N,) REFERENCE_ROW, sorted by key. Raises TrainingFault."""
    with disk_faults(folder.path):
        folder.references_dir.mkdir(exist_ok=True)
        crcs = {}
        for encoder, row in sorted(rows.items()):
            head, body = _npy(row)
            crcs[encoder] = crc32c(body, crc32c(head))
            write_bytes(_rows_file(folder.references_dir, use, encoder, crcs[encoder]), head, body)
        _write_facts(folder, use, {"format": FORMAT, "facts": facts, "encoders": crcs, "whole": False})
        kept = {_rows_file(folder.references_dir, use, encoder, crc) for encoder, crc in crcs.items()}
        for path in set(folder.references_dir.glob(f"{use}-*.npy")) - kept:
            path.unlink(missing_ok=True)


def mark_complete(folder: CacheFolder, use: str, complete: bool = True) -> None:
    """Say whether everything a configuration wants is there. Raises TrainingFault, DataFault, FileNotFoundError."""
    with disk_faults(folder.path):
        facts = _facts(folder.references_dir / f"{use}.json")
        if facts["whole"] != complete:
            _write_facts(folder, use, {**facts, "whole": complete})


def all_references(folder: CacheFolder) -> list[Reference]:
    """Return all uses of a cache, by id. Raises DataFault."""
    references = []
    for path in sorted(folder.references_dir.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            references.append(reference_of(folder, path.stem))
    return references


def reference_of(folder: CacheFolder, use: str) -> Reference:
    """Return a use. Raises DataFault, FileNotFoundError."""
    path = folder.references_dir / f"{use}.json"
    facts = _facts(path)
    crcs, used_at = facts["encoders"], path.stat().st_mtime
    return Reference(use, facts["facts"], facts["whole"], used_at, tuple(crcs), folder.references_dir, crcs)


def touch(folder: CacheFolder, use: str) -> None:
    """Say that a use is still wanted; on a cache that cannot be written, say nothing."""
    with contextlib.suppress(OSError):
        os.utime(folder.references_dir / f"{use}.json")


def remove(folder: CacheFolder, use: str) -> None:
    """Forget a use. Raises TrainingFault."""
    with disk_faults(folder.path):
        path = folder.references_dir / f"{use}.json"
        path.unlink(missing_ok=True)
        for rows in folder.references_dir.glob(f"{use}-*.npy"):
            rows.unlink(missing_ok=True)


def _write_facts(folder: CacheFolder, use: str, facts: Mapping[str, Any]) -> None:
    words = json.dumps({key: value for key, value in facts.items() if key != "crc"}, sort_keys=True)
    crc = crc32c(words.encode())
    write_bytes(
        folder.references_dir / f"{use}.json", json.dumps({**json.loads(words), "crc": crc}, sort_keys=True).encode()
    )


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
        if facts["format"] != FORMAT:
            raise ValueError(f"it is of format {facts['format']}, this version reads format {FORMAT}")
        content = {key: value for key, value in facts.items() if key != "crc"}
        if facts["crc"] != crc32c(json.dumps(content, sort_keys=True).encode()):
            raise ValueError("its checksum differs")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFault(
            f"{path}, which records a use of the feature cache, cannot be read ({error}). Remove it"
        ) from None
    return facts


def _rows_file(folder: Path, use: str, encoder: str, crc: int) -> Path:
    return folder / f"{use}-{encoder}-{crc:08x}.npy"


def _npy(rows: np.ndarray) -> tuple[bytes, bytes]:
    """Return the pieces of an .npy file."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(np.ascontiguousarray(rows)))
    return head.getvalue(), np.ascontiguousarray(rows).tobytes()


# --- Entries that no longer count, by their places: what a repair found damaged, what is to be encoded anew
# Segments are never changed, so this is written beside them: a file for each time, whole or absent.


_ROWS = ".rows"
_ROW = np.dtype([("segment", "<u4"), ("offset", "<u8")])


def add(folder: CacheFolder, places: Iterable[tuple[str, int]]) -> Path | None:
    """Let entries at (segment, offset) count no longer; return the file that says so. Raises TrainingFault."""
    offsets: dict[str, list[int]] = {}
    for name, offset in places:
        offsets.setdefault(name, []).append(offset)
    return add_many(folder, {name: np.array(offset, np.uint64) for name, offset in offsets.items()})


def add_many(folder: CacheFolder, offsets: Mapping[str, np.ndarray]) -> Path | None:
    """Do the same for the offsets of each segment. Raises TrainingFault."""
    names = [name for name, offset in offsets.items() if len(offset)]
    if not names:
        return None
    rows = np.empty(sum(len(offsets[name]) for name in names), _ROW)
    rows["segment"] = np.repeat(np.arange(len(names)), [len(offsets[name]) for name in names])
    rows["offset"] = np.concatenate([offsets[name] for name in names])
    content = rows.tobytes()
    header = header_block({"segments": names, "count": len(rows), "crc": crc32c(content)})
    with disk_faults(folder.path):
        folder.tombstones_dir.mkdir(exist_ok=True)
        path = folder.tombstones_dir / f"{uuid.uuid4().hex}{_ROWS}"
        write_bytes(path, header, content)
    return path


def read(folder: CacheFolder) -> dict[str, set[int]]:
    """Return the offsets that do not count, by segment. Raises DataFault."""
    return {segment: set(offsets.tolist()) for segment, offsets in offsets_of(folder).items()}


def offsets_of(folder: CacheFolder) -> dict[str, np.ndarray]:
    """Return the same as sorted arrays of uint64, which take less memory. Raises DataFault."""
    offsets_by_segment: dict[str, list[np.ndarray]] = {}
    for name in _names(folder):
        with contextlib.suppress(FileNotFoundError):  # taken away meanwhile, with its segments
            for segment, offsets in file_offsets(folder, name).items():
                offsets_by_segment.setdefault(segment, []).append(offsets)
    return {segment: np.unique(np.concatenate(offsets)) for segment, offsets in offsets_by_segment.items()}


def file_offsets(folder: CacheFolder, name: str) -> dict[str, np.ndarray]:
    """Return the offsets of each segment in one file. Raises DataFault, FileNotFoundError."""
    names, rows = _read(folder, name)
    order = np.argsort(rows["segment"], kind="stable")
    bounds = np.searchsorted(rows["segment"][order], np.arange(len(names) + 1))
    return {name: rows["offset"][order[start:stop]] for name, start, stop in zip(names, bounds[:-1], bounds[1:])}


def prune(folder: CacheFolder) -> None:
    """Remove the files that speak only of segments that are gone. Raises TrainingFault, DataFault."""
    for name in _names(folder):
        with disk_faults(folder.path), contextlib.suppress(FileNotFoundError):
            segments, _ = _read(folder, name)
            if not any(folder.exists(segment, suffix) for segment in segments for suffix in (BIN, IDX)):
                (folder.tombstones_dir / name).unlink()


def state(folder: CacheFolder) -> str:
    """Return a digest that changes with every file that comes or goes; their content never changes."""
    return hashlib.blake2b("\n".join(_names(folder)).encode(), digest_size=16).hexdigest()


def _names(folder: CacheFolder) -> list[str]:
    return sorted(path.name for path in folder.tombstones_dir.glob(f"*{_ROWS}"))


def _read(folder: CacheFolder, name: str) -> tuple[list[str], np.ndarray]:
    path = folder.tombstones_dir / name
    try:
        content = path.read_bytes()
        header, size = read_header(content)
        if len(content) - size != header["count"] * _ROW.itemsize or crc32c(content[size:]) != header["crc"]:
            raise Damaged("its rows are damaged")
    except FileNotFoundError:
        raise
    except (OSError, Damaged, ValueError, KeyError, TypeError) as error:
        raise DataFault(
            f"{path}, which lists dropped entries of the feature cache, cannot be used ({error}). Remove it "
            "and run `difftrain cache verify` on the cache: it finds what is damaged again"
        ) from None
    return header["segments"], np.frombuffer(content, _ROW, offset=size)
