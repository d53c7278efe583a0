"""What configurations want of a cache: which entries each of their records reads.

A use is written before it is built, so that no clean-up takes away what is being made for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.contracts import DataFault
from difftrain.data.cache.folder import CacheFolder, disk_faults, write_whole
from difftrain.data.cache.format import FORMAT

USE_ROW = np.dtype([("key", "V16"), ("variant", "<u2"), ("address", "V16")])
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Use:
    """What one configuration wants."""

    id: str
    facts: Mapping[str, Any]
    whole: bool  # everything that it wants was there
    used_at: float  # when a run last said so, in seconds since the epoch by the clock of the file system
    encoders: tuple[str, ...]
    folder: Path

    def rows(self, encoder: str) -> np.ndarray:
        """Return its rows of an encoder, one a record and variant, sorted by key; memory-mapped. Raises DataFault."""
        path = _rows_file(self.folder, self.id, encoder)
        try:
            rows: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            if rows.dtype != USE_ROW:
                raise ValueError(f"its rows are of {rows.dtype}")
        except (OSError, ValueError, EOFError) as error:
            raise DataFault(
                f"{path}, which lists what a configuration wants of the feature cache, cannot be used ({error}). "
                "Build the cache again with that configuration, or remove the file to forget the configuration"
            ) from None
        return rows


def write(folder: CacheFolder, use: str, facts: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> None:
    """Write what a configuration wants. Shapes: rows (N,) USE_ROW, sorted by key. Raises TrainingFault."""
    with disk_faults(folder.path):
        folder.uses.mkdir(exist_ok=True)
        for encoder, each in rows.items():
            write_whole(_rows_file(folder.uses, use, encoder), *_npy(each))
        _write_facts(folder, use, {"format": FORMAT, "facts": facts, "encoders": sorted(rows), "whole": False})


def mark_whole(folder: CacheFolder, use: str) -> None:
    """Say that everything a configuration wants is there. Raises TrainingFault."""
    with disk_faults(folder.path):
        said = _facts(folder.uses / f"{use}.json")
        if not said["whole"]:
            _write_facts(folder, use, {**said, "whole": True})


def all_uses(folder: CacheFolder) -> list[Use]:
    """Return all uses of a cache, by id. Raises DataFault."""
    found = []
    for path in sorted(folder.uses.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            said = _facts(path)
            used_at = path.stat().st_mtime
            found.append(Use(path.stem, said["facts"], said["whole"], used_at, tuple(said["encoders"]), folder.uses))
    return found


def touch(folder: CacheFolder, use: str) -> None:
    """Say that a use is still wanted; on a cache that cannot be written, say nothing."""
    with contextlib.suppress(OSError):
        os.utime(folder.uses / f"{use}.json")


def remove(folder: CacheFolder, use: str) -> None:
    """Forget a use. Raises TrainingFault."""
    with disk_faults(folder.path):
        path = folder.uses / f"{use}.json"
        with contextlib.suppress(FileNotFoundError, DataFault):
            for encoder in _facts(path)["encoders"]:
                _rows_file(folder.uses, use, encoder).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _write_facts(folder: CacheFolder, use: str, said: Mapping[str, Any]) -> None:
    write_whole(folder.uses / f"{use}.json", json.dumps(said, sort_keys=True).encode())


def _facts(path: Path) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(path.read_bytes())
        if said["format"] != FORMAT:
            raise ValueError(f"it is of format {said['format']}, this version reads format {FORMAT}")
        _ = said["facts"], said["whole"], said["encoders"]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFault(
            f"{path}, which tells of a use of the feature cache, cannot be read ({error}). Remove it"
        ) from None
    return said


def _rows_file(folder: Path, use: str, encoder: str) -> Path:
    return folder / f"{use}-{encoder}.npy"


def _npy(rows: np.ndarray) -> list[Any]:
    """Return the pieces of an .npy file."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(np.ascontiguousarray(rows)))
    return [head.getvalue(), np.ascontiguousarray(rows).tobytes()]
