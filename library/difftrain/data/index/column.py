"""A column of facts on disk, read in place, without a memory map.

Each touch of a map keeps a whole run of cached pages (up to 2 MiB on file systems with large folios), so that a process
seems to grow with the file.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np


class Column:
    """Read entries of the first axis of a .npy file. Picklable; safe to use after a fork."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        version = np.lib.format.read_magic(self._file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self.shape, fortran, self.dtype = read_header(self._file)
        if fortran and len(self.shape) > 1:
            raise ValueError(f"{path}: entries are not contiguous")
        self._start = self._file.tell()
        self._size = self.dtype.itemsize * math.prod(self.shape[1:])
        if os.fstat(self._file.fileno()).st_size < self._start + len(self) * self._size:
            raise ValueError(f"{path}: shorter than its header says")

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, (self._path,)

    def __len__(self) -> int:
        return int(self.shape[0])

    def take(self, rows: list[int]) -> np.ndarray:
        """Return entries.

        Shape: (len(rows), *shape[1:]). Raises: IndexError; OSError where the disk fails.
        """
        if rows and not 0 <= min(rows) <= max(rows) < len(self):
            raise IndexError(f"{self._path.name} has {len(self)} entries; asked for {min(rows)} to {max(rows)}")
        file, start, size = self._file.fileno(), self._start, self._size
        data = b"".join([os.pread(file, size, start + size * row) for row in rows])
        if len(data) != size * len(rows):
            raise OSError(f"{self._path}: shorter than it was")
        return np.frombuffer(data, dtype=self.dtype).reshape(len(rows), *self.shape[1:])
