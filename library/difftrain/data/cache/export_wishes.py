"""Which entries belong together: those of one record, by a configuration that was built; else each by itself."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from typing import NamedTuple

import numpy as np

from difftrain.config.names import did_you_mean
from difftrain.contracts import ConfigFault, Fault
from difftrain.data.cache import database, uses
from difftrain.data.cache.folder import CacheFolder
from difftrain.data.cache.metadata import Metadata, Row
from difftrain.data.cache.uses import Use

NOBODY = bytes(16).hex()  # the key of the empty caption, which belongs to no record
_CHUNK = 1 << 16


class Entry(NamedTuple):
    """One entry of a sample."""

    encoder: str
    variant: int
    address: bytes
    row: Row | None


class Wish(NamedTuple):
    """The entries of one sample. key: its name in the export."""

    key: str
    entries: list[Entry]


def chosen(folder: CacheFolder, use: str | None, *, dated: bool) -> tuple[Use | None, str]:
    """Return the use to export, None where none was built to its end, and what is to be said of it. Raises ConfigFault.

    dated: the folder tells which one was used last; a copy of it does not.
    """
    known = uses.all_uses(folder)
    whole = sorted((each for each in known if each.whole), key=lambda each: (each.used_at, each.id))
    if use is not None:
        found = next((each for each in known if each.id == use), None)
        if found is None:
            remedy = did_you_mean(use, [each.id for each in known]) or "`difftrain cache info` lists them"
            raise ConfigFault([Fault("--use", f"{use!r} is no configuration that this cache knows", remedy)])
        if not found.whole:
            what = f"{use!r} was not built to its end"
            raise ConfigFault([Fault("--use", what, "build it first, or leave this out to get what others have built")])
        return found, ""
    if not whole:
        return (
            None,
            "no configuration was built to its end, so every entry is a sample of its own, named by its address",
        )
    if len(whole) > 1 and not dated:
        what = f"is missing: {len(whole)} configurations were built, {', '.join(each.id for each in whole[:20])}"
        raise ConfigFault([Fault("--use", what, "name one of them")])
    note = f"of {len(whole)} configurations the one that was used last is taken, --use={whole[-1].id}"
    return whole[-1], note if len(whole) > 1 else ""


def encoders_of(metadata: Metadata, use: Use | None, asked: Sequence[str] | None) -> list[str]:
    """Return the encoders to export, all that there are unless asked for."""
    there = sorted(use.encoders if use else {str(info.header.get("encoder")) for info in metadata.segments()})
    for name in asked or ():
        if name not in there:
            remedy = did_you_mean(name, there) or f"there are {', '.join(there) or 'none'}"
            raise ConfigFault([Fault("--encoders", f"{name!r} has nothing in this cache", remedy)])
    return [name for name in there if not asked or name in asked]


def by_record(metadata: Metadata, use: Use, encoders: Sequence[str]) -> Iterator[Wish]:
    """Yield every record with all its variants of all encoders, by key."""
    streams = [_by_key(use.rows(encoder), encoder) for encoder in encoders]
    for key, group in groupby(heapq.merge(*streams, key=lambda each: each[0]), key=lambda each: each[0]):
        samples: list[list[Entry]] = []
        seen: Counter[tuple[str, int]] = Counter()  # one name may be in several data sets
        for _, encoder, variant, address in group:
            place = seen[encoder, variant]
            seen[encoder, variant] += 1
            while len(samples) <= place:
                samples.append([])
            samples[place].append(Entry(encoder, variant, address, metadata.lookup(address)))
        for number, entries in enumerate(samples):
            yield Wish(key.hex() + (f"-{number}" if number else ""), sorted(entries))


def _by_key(rows: np.ndarray, encoder: str) -> Iterator[tuple[bytes, str, int, bytes]]:
    """Yield key, encoder, variant and address of rows, by key."""
    words = np.ndarray((len(rows), 2), ">u8", rows, strides=(rows.itemsize, 8))
    high, low = words[:-1], words[1:]
    steps = (high[:, 0] < low[:, 0]) | ((high[:, 0] == low[:, 0]) & (high[:, 1] <= low[:, 1]))
    order = None if steps.all() else np.lexsort((rows["variant"], words[:, 1], words[:, 0]))
    for start in range(0, len(rows), _CHUNK):
        some = rows[start : start + _CHUNK] if order is None else rows[order[start : start + _CHUNK]]
        for row in some:
            yield row["key"].tobytes(), encoder, int(row["variant"]), row["address"].tobytes()


def by_address(metadata: Metadata, encoders: Sequence[str]) -> Iterator[Wish]:
    """Yield every entry, as they lie."""
    encoder_of = {info.name: str(info.header.get("encoder")) for info in metadata.segments()}
    query = (
        "SELECT address, number, name, offset, length, crc, kind FROM entries JOIN segments ON segments.id = segment "
        "ORDER BY name, offset"
    )
    with closing(database.connect(metadata.path)) as db:
        for address, *row in db.execute(query):
            encoder = encoder_of[row[1]]
            if encoder in encoders:
                yield Wish(address.hex(), [Entry(encoder, 0, address, Row(*row))])
