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
        addresses = self.address_by_record.addresses(record_ids, flips)
        _refuse_unread(addresses, self.passed)
        return addresses


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
        addresses = []
        for picture, text in zip(self.address_by_record.addresses(record_ids, flips), self.texts(tokens), strict=True):
            if picture is None:
                raise Unusable("not cached", "it could not be read when the cache was built")
            addresses.append(joined_address((picture, text)))
        _refuse_unread(addresses, self.passed)
        return addresses


def _refuse_unread(addresses: Sequence[bytes | None], passed: Mapping[bytes, str]) -> None:
    for address in addresses if passed else ():
        if address is not None and address in passed:
            raise Unusable("not cached", f"{passed[address]}; the next start tries again")


def feature_store(
    manifests: Sequence[EncoderManifest],
    readers: Mapping[str, Reader],
    passed: Mapping[bytes, str],
    *,
    needs_pixels: bool,
    needs_control: bool = False,
) -> FeatureStore:
    """Put readers together, by encoder, into what makes samples. needs_pixels, needs_control: see FeatureStore."""
    pictures: list[PictureEncoderCache] = []
    captions: list[CaptionEncoderCache] = []
    pairs: list[PairEncoderCache] = []
    masks = None
    for manifest in manifests:
        # captions are looked up by their tokens; pictures and pairs by record
        reader, encoder = readers[manifest.request.name], manifest.request.encoder
        if "caption" in encoder.source:
            texts = CaptionLookup(encoder.inputs, manifest.fingerprint, manifest.request.storage)
            if encoder.source == CAPTION:
                captions.append(CaptionEncoderCache(reader, texts))
            else:
                pairs.append(
                    PairEncoderCache(reader, PairLookup(AddressByRecord(manifest.manifest.folder), texts, passed))
                )
            continue

        # pictures, and masks among them
        encoder_cache = PictureEncoderCache(reader, PictureLookup(AddressByRecord(manifest.manifest.folder), passed))
        if manifest.request.name == MASKS:
            masks = CachedMasks(encoder_cache)
        else:
            pictures.append(encoder_cache)
    return FeatureStore(
        CachedPictures(tuple(pictures)) if pictures else None,
        CachedCaptions(tuple(captions)) if captions else None,
        masks,
        CachedPairs(tuple(pairs)) if pairs else None,
        needs_pixels,
        needs_control,
    )


def rejected_records(
    encoder_manifest: EncoderManifest, bad: Sequence[bytes], reader: Reader, data: Data, passed: Mapping[bytes, str]
) -> Iterator[Reject]:
    """Name the records of an encoder that nothing could be made of. bad: addresses of rejected entries of the cache."""
    rejected = frozenset((*bad, *passed))
    if not rejected:
        return
    halves = np.unique(np.frombuffer(b"".join(rejected), "<u8")[::2])
    addresses = encoder_manifest.manifest.addresses
    for start in range(0, len(addresses), _CHUNK):
        own = np.array(addresses[start : start + _CHUNK])
        for row in np.flatnonzero(np.isin(own.view("<u8")[::2], halves)).tolist():
            address = own[row].tobytes()
            if address in rejected:
                record = data.index.record(int(encoder_manifest.manifest.entries[start + row]["record"]))
                yield Reject(data.index.path(record), passed.get(address) or reader.reject(address) or "")
