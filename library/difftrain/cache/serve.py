"""Cached features as the data room reads them: for each encoder a reader, and what finds its entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from difftrain.cache.disk import EncoderManifest
from difftrain.cache.manifest.address import MASKS, joined_address, text_addresses
from difftrain.cache.manifest.manifest import AddressByRecord
from difftrain.cache.store.read import Reader
from difftrain.contracts import CAPTION, Reject
from difftrain.data.features import (
    CachedCaptions,
    CachedMasks,
    CachedPairs,
    CachedPictures,
    CaptionEncoderCache,
    FeatureStore,
    PairEncoderCache,
    PictureEncoderCache,
)
from difftrain.data.media.media import Unusable

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.data.prepare import Data

_CHUNK = 1 << 20


@dataclass(frozen=True)
class PictureLookup:
    """Find pictures by record. passed: addresses of what could not be read this time, and has no entry. Picklable."""

    address_by_record: AddressByRecord
    passed: Mapping[bytes, str]

    def __call__(self, record_ids: Sequence[int], flips: Sequence[bool]) -> list[bytes | None]:
        """Return an address each, None where nothing is made of a record. Raises Unusable."""
        found = self.address_by_record.addresses(record_ids, flips)
        _refuse_unread(found, self.passed)
        return found


@dataclass(frozen=True)
class CaptionLookup:
    """Find captions by their tokens. Picklable."""

    inputs: tuple[str, ...]
    fingerprint: str
    storage: str

    def __call__(self, tokens: Mapping[str, Tensor]) -> list[bytes]:
        """Return the address of each caption of a batch."""
        return text_addresses(tokens, self.inputs, self.fingerprint, self.storage)


@dataclass(frozen=True)
class PairLookup:
    """Find pictures with their captions. passed: as of pictures. Picklable."""

    address_by_record: AddressByRecord
    texts: CaptionLookup
    passed: Mapping[bytes, str]

    def __call__(self, record_ids: Sequence[int], flips: Sequence[bool], tokens: Mapping[str, Tensor]) -> list[bytes]:
        """Return an address each. Raises Unusable."""
        found = []
        for picture, text in zip(self.address_by_record.addresses(record_ids, flips), self.texts(tokens), strict=True):
            if picture is None:
                raise Unusable("not cached", "it could not be read when the cache was built")
            found.append(joined_address((picture, text)))
        _refuse_unread(found, self.passed)
        return found


def _refuse_unread(found: Sequence[bytes | None], passed: Mapping[bytes, str]) -> None:
    for address in found if passed else ():
        if address is not None and address in passed:
            raise Unusable("not cached", f"{passed[address]}; the next start tries again")


def feature_store(
    manifests: Sequence[EncoderManifest],
    readers: Mapping[str, Reader],
    passed: Mapping[bytes, str],
    *,
    needs_pixels: bool,
) -> FeatureStore:
    """Put readers together, by encoder, into what makes samples. needs_pixels: see FeatureStore."""
    pictures: list[PictureEncoderCache] = []
    captions: list[CaptionEncoderCache] = []
    pairs: list[PairEncoderCache] = []
    masks = None
    for each in manifests:
        reader, encoder = readers[each.request.name], each.request.encoder
        if "caption" in encoder.source:
            texts = CaptionLookup(encoder.inputs, each.fingerprint, each.request.storage)
            if encoder.source == CAPTION:
                captions.append(CaptionEncoderCache(reader, texts))
            else:
                pairs.append(PairEncoderCache(reader, PairLookup(AddressByRecord(each.manifest.folder), texts, passed)))
            continue

        # pictures, and masks among them
        found = PictureEncoderCache(reader, PictureLookup(AddressByRecord(each.manifest.folder), passed))
        if each.request.name == MASKS:
            masks = CachedMasks(found)
        else:
            pictures.append(found)
    return FeatureStore(
        CachedPictures(tuple(pictures)) if pictures else None,
        CachedCaptions(tuple(captions)) if captions else None,
        masks,
        CachedPairs(tuple(pairs)) if pairs else None,
        needs_pixels,
    )


def rejected_records(
    encoder_manifest: EncoderManifest, bad: Sequence[bytes], reader: Reader, data: Data, passed: Mapping[bytes, str]
) -> Iterator[Reject]:
    """Name the records of an encoder that nothing could be made of. bad: addresses of rejected entries of the cache."""
    told = frozenset((*bad, *passed))
    if not told:
        return
    halves = np.unique(np.frombuffer(b"".join(told), "<u8")[::2])
    addresses = encoder_manifest.manifest.addresses
    for start in range(0, len(addresses), _CHUNK):
        own = np.array(addresses[start : start + _CHUNK])
        for row in np.flatnonzero(np.isin(own.view("<u8")[::2], halves)).tolist():
            address = own[row].tobytes()
            if address in told:
                record = data.index.record(int(encoder_manifest.manifest.entries[start + row]["record"]))
                yield Reject(data.index.path(record), passed.get(address) or reader.reject(address) or "")
