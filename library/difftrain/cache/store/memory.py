"""Entries in memory that all processes of a machine share: kept there instead of a folder, or copied from one."""

from __future__ import annotations

import json
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from difftrain.cache.store.format import ADDRESS, ALIGN, REJECT, Damaged, PackedEntry, crc32c
from difftrain.cache.store.index import EntryRow
from difftrain.cache.store.segment import SegmentSource, checked_payload, damage
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, TrainingFault

if TYPE_CHECKING:
    from difftrain.cache.store.index import Metadata


SEGMENT_BYTES = 1 << 30
_HEAD = 16  # of the table: entries, bytes of the segments' paths
ROW = np.dtype(
    list(zip(("high", "low", "offset", "length", "segment", "crc", "kind", "spare"), ["<u8"] * 4 + ["<u4"] * 4))
)
_RESERVED: list[IO[bytes]] = []  # open for as long as this process lives


def reserve(size: int, name: str = "difftrain-cache") -> str:
    """Make a block of zeros that all processes of this machine can open, and return its path.

    It takes memory only where it is written, stays as long as this process, and is gone with the last that has it open.
    """
    if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm, which is 64 MiB in many containers
        file: IO[bytes] = os.fdopen(os.memfd_create(name), "r+b")
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        file = tempfile.NamedTemporaryFile(prefix=f"{name}-")  # noqa: SIM115
        path = file.name
    file.truncate(size)
    _RESERVED.append(file)
    return path


class Verified:
    """Which entries were found to be whole since the run began: a bit each, for all processes of a machine.

    Bits are read and written, not mapped: of a hundred million entries they would be resident in every worker. Two
    processes that set bits of one byte at the same moment may lose one: that entry is checked twice, and nothing else.
    """

    def __init__(self, path: str, generation: str) -> None:
        """Share what `reserve` made. generation: Metadata.generation of the index that numbers the entries."""
        self._path, self.generation = path, generation
        self._bits: IO[bytes] | None = None

    @staticmethod
    def reserve(count: int) -> str:
        """Make room for a number of entries, in one process of a machine that outlives the others; return the path."""
        return reserve(max(1, -(-count // 8)), "difftrain-verified")

    def has(self, number: int) -> bool:
        """Tell whether an entry was checked."""
        return bool(self._byte(number) >> (number & 7) & 1)

    def add(self, number: int) -> None:
        """Remember that an entry is whole."""
        byte = self._byte(number) | 1 << (number & 7)
        os.pwrite((self._bits or self._open()).fileno(), bytes([byte]), number >> 3)

    def _byte(self, number: int) -> int:
        return os.pread((self._bits or self._open()).fileno(), 1, number >> 3)[0]

    def _open(self) -> IO[bytes]:
        self._bits = Path(self._path).open("r+b", buffering=0)  # noqa: SIM115
        return self._bits

    def __reduce__(self) -> tuple[Any, ...]:
        return Verified, (self._path, self.generation)


@dataclass(frozen=True)
class MemoryRows:
    """Where the entries of one sink lie. Shapes: places (N,), their segment is a row of paths."""

    paths: tuple[str, ...]
    places: np.ndarray


class MemorySink:
    """Append entries to blocks of memory of its own, as SegmentWriter does to files."""

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.written = 0
        self._most, self._paths = segment_bytes, list[str]()
        self._file: IO[bytes] | None = None
        self._end = 0
        self._places: list[np.ndarray] = []

    def append(self, items: Sequence[PackedEntry]) -> None:
        """Copy entries to memory. Raises TrainingFault where there is no more of it."""
        places = np.zeros(len(items), ROW)
        for number, item in enumerate(items):
            views = [memoryview(piece).cast("B") for piece in item.pieces if memoryview(piece).nbytes]
            size, crc = sum(map(len, views)), 0
            if self._file is None or (self._end and self._end + size > self._most):
                self._grow()
            for view in views:
                crc = crc32c(view, crc)
            self._write(views)
            places[number] = (*halves(item.address), self._end, size, len(self._paths) - 1, crc, item.kind, 0)
            self._end += -(-size // ALIGN) * ALIGN
        self._places.append(places)
        self.written += len(items)

    def close(self) -> None:
        """Let go of the block that is open here; it stays, as `reserve` says."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def rows(self) -> MemoryRows:
        """Return where all entries lie, to be put together with those of the machine's other processes."""
        return MemoryRows(tuple(self._paths), np.concatenate([np.zeros(0, ROW), *self._places]))

    def _grow(self) -> None:
        self.close()
        self._paths.append(reserve(0))
        self._file, self._end = Path(self._paths[-1]).open("r+b", buffering=0), 0  # noqa: SIM115

    def _write(self, views: Sequence[memoryview]) -> None:
        assert self._file is not None
        try:
            self._file.seek(self._end)
            for view in views:
                done = 0
                while done < len(view):
                    done += self._file.write(view[done:])
        except OSError as error:
            raise TrainingFault(
                f"this machine's memory cannot hold the cached features ({error.strerror or error}); "
                f"{option('cache.latents_to_disk', True)} and {option('cache.text_to_disk', True)}, without {option('cache.preload', True)}, keep them in files"
            ) from error


class MemoryEntries:
    """A table of entries in memory, by address. Segments are paths: read them with Segments(None). Picklable."""

    def __init__(self, path: str) -> None:
        """Share the table that `reserve` made."""
        self._path = path
        self._table: tuple[np.ndarray, np.ndarray, list[str]] | None = None

    @staticmethod
    def reserve(shares: Iterable[MemoryRows]) -> str:
        """Put together what all processes of a machine hold, in one of them; return the table's path.

        Of equal addresses the first counts.
        """
        paths: list[str] = []
        pieces = [np.zeros(0, ROW)]
        for share in shares:
            piece = share.places.copy()
            piece["segment"] += len(paths)
            paths += share.paths
            pieces.append(piece)
        places = np.concatenate(pieces)
        places = places[np.lexsort((places["low"], places["high"]))]  # stable
        if len(places):
            again = (places["high"][1:] == places["high"][:-1]) & (places["low"][1:] == places["low"][:-1])
            places = places[np.concatenate([[True], ~again])]
        words = json.dumps(paths).encode()
        path = reserve(0, "difftrain-cache-table")
        with Path(path).open("r+b") as file:
            file.write(np.array([len(places), len(words)], "<u8").tobytes())
            file.write(np.ascontiguousarray(places["high"]).tobytes())  # apart: a search touches little memory
            file.write(places.tobytes())
            file.write(words)
        return path

    @property
    def generation(self) -> str:
        """Return what differs between any two tables."""
        return self._path

    @property
    def count(self) -> int:
        """Return the number of entries."""
        return len(self._open()[0])

    def lookup(self, address: bytes) -> EntryRow | None:
        """Find an entry."""
        highs, places, paths = self._table or self._open()
        high, low = halves(address)
        number = int(highs.searchsorted(np.uint64(high)))
        while number < len(highs) and int(highs[number]) == high:
            row = places[number]
            if int(row["low"]) == low:
                return row_of(number, paths, row)
            number += 1
        return None

    def rejects(self) -> list[bytes]:
        """Return the addresses of all entries that say why nothing could be made of something."""
        _, places, _ = self._open()
        bad = places[places["kind"] == REJECT]
        return [int(row["high"]).to_bytes(8, "big") + int(row["low"]).to_bytes(8, "big") for row in bad]

    def has_many(self, addresses: np.ndarray) -> np.ndarray:
        """Tell which addresses have an entry. Shapes: addresses (N,) V16, result (N,) bool."""
        highs, places, _ = self._open()
        requested = np.ascontiguousarray(addresses).view(">u8").reshape(-1, 2).astype("<u8")
        if not len(highs):
            return np.zeros(len(requested), dtype=bool)
        at = np.minimum(highs.searchsorted(requested[:, 0]), len(highs) - 1)
        begins = highs[at] == requested[:, 0]
        matches: np.ndarray = begins & (places["low"][at] == requested[:, 1])
        for number in np.flatnonzero(begins & ~matches):  # two addresses that begin alike
            matches[number] = self.lookup(requested[number].astype(">u8").tobytes()) is not None
        return matches

    def _open(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        if self._table is None:
            with Path(self._path).open("rb") as file:
                block = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            count, length = (int(number) for number in block[:_HEAD].view("<u8"))
            first, last = _HEAD + 8 * count, _HEAD + (8 + ROW.itemsize) * count
            paths = json.loads(bytes(block[last : last + length]))
            self._table = block[_HEAD:first].view("<u8"), block[first:last].view(ROW), paths
        return self._table

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryEntries, (self._path,)


def row_of(number: int, segments: Sequence[str], row: np.void) -> EntryRow:
    """Return an entry of a table."""
    segment, *numbers = (int(row[name]) for name in ("segment", "offset", "length", "crc", "kind"))
    return EntryRow(number, segments[segment], *numbers)


def halves(address: bytes) -> tuple[int, int]:
    """Return an address as two numbers that sort as it does."""
    return int.from_bytes(address[:8], "big"), int.from_bytes(address[8:], "big")


log = logging.getLogger("difftrain")
_SAY_EVERY_S = 10.0
_AT_ONCE = 64 << 20  # bytes that are asked for together


def preload(
    metadata: Metadata, source: SegmentSource, addresses: np.ndarray, room_bytes: int | None, cache: str
) -> str:
    """Copy entries to memory in the order in which they lie, each checked; return the path for MemoryEntries.

    One process of a machine does it. room_bytes: memory that is free, None where that is not known. Shapes: addresses
    (N,) V16. Raises: ConfigFault where they do not fit, TrainingFault for one that is damaged.
    """
    # where the entries lie, and whether they fit
    names: dict[str, int] = {}
    matches = (
        (
            *halves(address.tobytes()),
            row.offset,
            row.length,
            names.setdefault(row.segment, len(names)),
            row.crc,
            row.kind,
            0,
        )
        for address, row in _with_rows(metadata, addresses)
    )
    needed = np.fromiter(matches, ROW)
    total = int((-(-needed["length"].astype(np.int64) // ALIGN) * ALIGN).sum())
    if room_bytes is not None and total > room_bytes:
        what = f"the cache's {total / 2**30:.3g} GiB do not fit into the {room_bytes / 2**30:.3g} GiB that are free"
        raise ConfigFault([Fault(option("cache.preload", True), what, "without it, the cache is read from its files")])

    # in the order of the files
    segments = list(names)
    by_name = np.empty(len(segments), np.int64)
    # rank of each segment by name: disks are read front to back
    by_name[sorted(range(len(segments)), key=segments.__getitem__)] = np.arange(len(segments))
    needed = needed[np.lexsort((needed["offset"], by_name[needed["segment"]] if segments else needed["segment"]))]

    # each is copied once its checksum is right
    sink = MemorySink()
    log.info(
        f"{option('cache.preload', True)}: %s entries, %.3g GiB, are copied into memory",
        f"{len(needed):,}",
        total / 2**30,
    )
    reported = time.monotonic()
    for group in _groups(needed):
        if time.monotonic() - reported > _SAY_EVERY_S:
            reported = time.monotonic()
            log.info(f"{option('cache.preload', True)}: %s of %s entries", f"{sink.written:,}", f"{len(needed):,}")
        rows = [row_of(0, segments, entry) for entry in group]
        source.want([(row.segment, row.offset, row.length) for row in rows])
        for entry, row in zip(group, rows, strict=True):
            address = int(entry["high"]).to_bytes(8, "big") + int(entry["low"]).to_bytes(8, "big")
            try:
                sink.append([PackedEntry(address, [checked_payload(source, row)], row.kind)])
            except Damaged as error:
                raise damage(cache, row, error) from error
    sink.close()
    return MemoryEntries.reserve([sink.rows()])


def _with_rows(metadata: Metadata, addresses: np.ndarray) -> Iterator[tuple[Any, EntryRow]]:
    for address in np.unique(np.ascontiguousarray(addresses).view(">u8").reshape(-1, 2), axis=0).view(ADDRESS).ravel():
        row = metadata.lookup(address.tobytes())
        if row is not None:
            yield address, row


def _groups(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Cut rows into groups of about as many bytes as are asked for together."""
    ends = np.cumsum(rows["length"].astype(np.int64))
    start = 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _AT_ONCE, side="right")))
        yield rows[start:stop]
        start = stop
