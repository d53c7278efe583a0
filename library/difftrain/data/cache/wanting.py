"""What the configurations of a cache want of its entries, while builds come and go."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import numpy as np

from difftrain.contracts import DataFault, TrainingFault
from difftrain.data.cache import drops, uses
from difftrain.data.cache.folder import CacheFolder
from difftrain.data.cache.format import ADDRESS
from difftrain.data.cache.metadata import Metadata, merge
from difftrain.data.cache.moving import payloads
from difftrain.data.cache.uses import Use

T = TypeVar("T")
_TRIES = 20
_CHUNK = 1 << 18
_ASKED = 1000  # addresses of one query


def steady(folder: CacheFolder, read: Callable[[list[Use]], T]) -> T:
    """Read something of all uses, again where one is being replaced or forgotten just then. Raises DataFault."""
    for _ in range(_TRIES - 1):
        try:
            return read(uses.all_uses(folder))
        except DataFault:
            time.sleep(0.02)
    return read(uses.all_uses(folder))


def wanted_numbers(folder: CacheFolder, known: Metadata, without: Collection[str] = ()) -> np.ndarray:
    """Return which entries uses want, a bit each by their numbers. without: ids that do not count. Raises DataFault."""

    def read(every: list[Use]) -> np.ndarray:
        bits = np.zeros(known.count // 8 + 1, np.uint8)
        for addresses in _addresses(use for use in every if use.id not in without):
            numbers = np.array(_numbers(known, addresses), np.int64)
            np.bitwise_or.at(bits, numbers >> 3, (1 << (numbers & 7)).astype(np.uint8))
        return bits

    return steady(folder, read)


def _addresses(every: Iterator[Use]) -> Iterator[np.ndarray]:
    for use in every:
        for encoder in use.encoders:
            rows = use.rows(encoder)
            for start in range(0, len(rows), _CHUNK):
                yield np.ascontiguousarray(rows["address"][start : start + _CHUNK])


def _numbers(known: Metadata, addresses: np.ndarray) -> list[int]:
    """Return the numbers of the entries at some addresses."""
    asked = np.unique(addresses.view(f"S{ADDRESS.itemsize}")).view(ADDRESS).tolist()
    found: list[int] = []
    for start in range(0, len(asked), _ASKED):
        some = asked[start : start + _ASKED]
        marks = ",".join("?" * len(some))
        found += [number for (number,) in known.query(f"SELECT number FROM entries WHERE address IN ({marks})", *some)]
    return found


def still_wanted(folder: CacheFolder, going: Mapping[str, np.ndarray]) -> int:
    """Count the whole entries in rows of segments, all of them dropped by now, that are wanted and nowhere else.

    Raises: DataFault, TrainingFault.
    """
    if not going:
        return 0
    known = _with_all_drops(folder)
    starts = np.unique(np.concatenate([_start(rows["address"]) for rows in going.values()]))

    def read(every: list[Use]) -> list[np.ndarray]:
        lost = []
        for addresses in _addresses(iter(every)):
            among = addresses[np.isin(_start(addresses), starts)]  # perhaps others that begin alike: no harm
            if len(among):
                lost.append(_start(among[~known.has_many(among)]))
        return lost

    lost = np.unique(np.concatenate([np.empty(0, np.uint64), *steady(folder, read)]))
    if not len(lost):
        return 0
    count = 0
    for name, rows in going.items():
        # what a repair has dropped is wanted too, but no loss
        count += sum(1 for _ in payloads(folder, name, rows[np.isin(_start(rows["address"]), lost)]))
    return count


def _with_all_drops(folder: CacheFolder) -> Metadata:
    """Return the index as it is with all drops of now, also where others change it at the same time."""
    for _ in range(_TRIES):
        merge(folder)
        known = Metadata(folder.database)
        ((state,),) = known.query("SELECT value FROM meta WHERE name = 'drops'")
        if state == drops.state(folder):
            return known
        time.sleep(random.random() / 10)
    raise TrainingFault(f"{folder.path}: too many others are changing it; nothing was lost. Run this again later")


def _start(addresses: np.ndarray) -> np.ndarray:
    """Return the first half of each address."""
    return np.ascontiguousarray(addresses).view(np.uint64).reshape(-1, 2)[:, 0]
