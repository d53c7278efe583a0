"""Entries that no longer count, by their places: what a repair found damaged, what is to be encoded anew.

Segments are never changed, so this is written beside them: a file for each time, whole or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from difftrain.cache.store.folder import BIN, IDX, CacheFolder, disk_faults
from difftrain.cache.store.format import Damaged, crc32c, header_block, read_header
from difftrain.contracts import DataFault
from difftrain.io.files import write_bytes

_ROWS = ".rows"
_ROW = np.dtype([("segment", "<u4"), ("offset", "<u8")])


def add(folder: CacheFolder, places: Iterable[tuple[str, int]]) -> Path | None:
    """Let entries at (segment, offset) count no longer; return the file that says so. Raises TrainingFault."""
    offsets: dict[str, list[int]] = {}
    for name, offset in places:
        offsets.setdefault(name, []).append(offset)
    return add_many(folder, {name: np.array(each, np.uint64) for name, each in offsets.items()})


def add_many(folder: CacheFolder, offsets: Mapping[str, np.ndarray]) -> Path | None:
    """Do the same for the offsets of each segment. Raises TrainingFault."""
    names = [name for name, each in offsets.items() if len(each)]
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
    found: dict[str, list[np.ndarray]] = {}
    for name in _names(folder):
        with contextlib.suppress(FileNotFoundError):  # taken away meanwhile, with its segments
            for segment, offsets in file_offsets(folder, name).items():
                found.setdefault(segment, []).append(offsets)
    return {segment: np.unique(np.concatenate(each)) for segment, each in found.items()}


def file_offsets(folder: CacheFolder, name: str) -> dict[str, np.ndarray]:
    """Return the offsets of each segment in one file. Raises DataFault, FileNotFoundError."""
    names, rows = _read(folder, name)
    order = np.argsort(rows["segment"], kind="stable")
    bounds = np.searchsorted(rows["segment"][order], np.arange(len(names) + 1))
    return {each: rows["offset"][order[start:stop]] for each, start, stop in zip(names, bounds[:-1], bounds[1:])}


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
            f"{path}, which lists entries of the feature cache that do not count, cannot be used ({error}). Remove it "
            "and run `difftrain cache verify` on the cache: it finds what is damaged again"
        ) from None
    return header["segments"], np.frombuffer(content, _ROW, offset=size)
