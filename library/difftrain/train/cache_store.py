"""Handing what is cached to the data: readers of entries, and who finds which of them by what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from difftrain.contracts import Reject
from difftrain.data.cache.address import text_addresses
from difftrain.data.cache.reader import Reader
from difftrain.data.cache.store import Cached, CachedCaptions, CachedMasks, CachedPictures, CachedText, FeatureStore
from difftrain.data.cache.wanted import Places
from difftrain.data.media import Unusable
from difftrain.train.cache_disk import Listed
from difftrain.train.cache_plan import MASKS

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.data.prepare import Data

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Found:
    """Find pictures by record. passed: addresses of what could not be read this time, and has no entry. Picklable."""

    places: Places
    passed: Mapping[bytes, str]

    def __call__(self, record_ids: Sequence[int], flips: Sequence[bool]) -> list[bytes | None]:
        """Return an address each, None where nothing is made of a record. Raises Unusable."""
        found = self.places.addresses(record_ids, flips)
        for address in found if self.passed else ():
            if address is not None and address in self.passed:
                raise Unusable("not cached", f"{self.passed[address]}; the next start tries again")
        return found


@dataclass(frozen=True)
class FoundText:
    """Find captions by their tokens. Picklable."""

    inputs: tuple[str, ...]
    fingerprint: str
    storage: str

    def __call__(self, tokens: Mapping[str, Tensor]) -> list[bytes]:
        """Return the address of each caption of a batch."""
        return text_addresses(tokens, self.inputs, self.fingerprint, self.storage)


def store_of(listed: Sequence[Listed], readers: Mapping[str, Reader], passed: Mapping[bytes, str]) -> FeatureStore:
    """Put readers together, by encoder, into what makes samples."""
    pictures: list[Cached] = []
    captions: list[CachedText] = []
    masks = None
    for each in listed:
        reader, encoder = readers[each.wish.name], each.wish.encoder
        if encoder.source == "caption":
            captions.append(CachedText(reader, FoundText(encoder.inputs, each.fingerprint, each.wish.storage)))
            continue
        found = Cached(reader, Found(Places(each.wanted.folder), passed))
        if each.wish.name == MASKS:
            masks = CachedMasks(found)
        else:
            pictures.append(found)
    return FeatureStore(
        CachedPictures(tuple(pictures)) if pictures else None,
        CachedCaptions(tuple(captions)) if captions else None,
        masks,
    )


def rejects_of(
    each: Listed, bad: Sequence[bytes], reader: Reader, data: Data, passed: Mapping[bytes, str]
) -> Iterator[Reject]:
    """Name the records of an encoder that nothing could be made of. bad: addresses of rejected entries of the cache."""
    told = frozenset((*bad, *passed))
    if not told:
        return
    halves = np.unique(np.frombuffer(b"".join(told), "<u8")[::2])
    addresses = each.wanted.addresses
    for start in range(0, len(addresses), _CHUNK):
        own = np.array(addresses[start : start + _CHUNK])
        for row in np.flatnonzero(np.isin(own.view("<u8")[::2], halves)).tolist():
            address = own[row].tobytes()
            if address in told:
                record = data.index.record(int(each.wanted.entries[start + row]["record"]))
                yield Reject(data.index.path(record), passed.get(address) or reader.reject(address) or "")
