"""Cached features as samples take them: a picture's by its record, a caption's by its tokens, a pair's by both. Picklable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from difftrain.data.media.media import Unusable


class EntryReader(Protocol):
    """Read entries of a cache by address. Picklable."""

    def reject(self, address: bytes) -> str | None: ...  # why nothing could be made of it
    def read(self, addresses: Sequence[bytes]) -> dict[str, Tensor]: ...  # (B, ...) of each feature


@dataclass(frozen=True)
class PictureEncoderCache:
    """One encoder of pictures whose features are cached.

    addresses: of records by id, each as it is or mirrored; None where the encoder made nothing of one. Picklable.
    """

    reader: EntryReader
    addresses: Callable[[Sequence[int], Sequence[bool]], list[bytes | None]]

    def check(self, record_id: int, flip: bool) -> None:
        """Refuse a record that could not be decoded when it was to be encoded. Raises Unusable with that reason."""
        (address,) = self.addresses([record_id], [flip])
        if address is None:
            raise Unusable("not cached", "it could not be read when the cache was built")
        _refuse_rejected(self.reader, address)

    def read(self, record_ids: Sequence[int], flips: Sequence[bool]) -> dict[str, Tensor]:
        """Return features of records of one bucket. Shapes: (B, ...) of each. Raises as EntryReader.read."""
        entries = self.addresses(record_ids, flips)
        addresses = [address for address in entries if address is not None]
        if len(addresses) < len(entries):
            without = [str(number) for number, address in zip(record_ids, entries, strict=True) if address is None]
            raise ValueError(f"records {', '.join(without)} have no address; `check` says so before they are read")
        return self.reader.read(addresses)


@dataclass(frozen=True)
class CachedPictures:
    """What encoders made of pictures."""

    encoders: tuple[PictureEncoderCache, ...]

    def check(self, record_id: int, flip: bool = False) -> None:
        """Refuse a record that could not be decoded when it was to be encoded. Raises Unusable with that reason."""
        for encoder in self.encoders:
            encoder.check(record_id, flip)

    def read(self, record_ids: Sequence[int], flips: Sequence[bool]) -> dict[str, Tensor]:
        """Return features of records of one bucket, each as it is or mirrored. Shapes: (B, ...) of each feature.

        Raises: TrainingFault where an entry is missing or damaged.
        """
        features: dict[str, Tensor] = {}
        for encoder in self.encoders:
            features |= encoder.read(record_ids, flips)
        return features


@dataclass(frozen=True)
class CachedMasks:
    """Masks of the loss, cut and resized with their pictures. Records that have none count whole."""

    encoder: PictureEncoderCache

    def wants(self, record_id: int) -> bool:
        """Tell whether a record has a mask."""
        return self.encoder.addresses([record_id], [False])[0] is not None

    def check(self, record_id: int, flip: bool = False) -> None:
        """Refuse a record whose mask could not be made. Raises Unusable with that reason."""
        if self.wants(record_id):
            self.encoder.check(record_id, flip)

    def read(self, record_ids: Sequence[int], flips: Sequence[bool]) -> Tensor | None:
        """Return masks of records of one bucket, ones where a record has none; None where no record has one.

        Shapes: (B, 1, H, W) fp32 in 0..1. Raises: TrainingFault where an entry is missing or damaged.
        """
        addresses = self.encoder.addresses(record_ids, flips)
        rows = [row for row, address in enumerate(addresses) if address is not None]
        if not rows:
            return None
        (masks,) = self.encoder.reader.read([address for address in addresses if address is not None]).values()
        masks_out = torch.ones((len(addresses), *masks.shape[1:]), dtype=torch.float32)
        masks_out[rows] = masks.float() / 255
        return masks_out


@dataclass(frozen=True)
class CaptionEncoderCache:
    """One encoder of captions whose features are cached. addresses: of a batch of tokenised captions; picklable."""

    reader: EntryReader
    addresses: Callable[[Mapping[str, Tensor]], list[bytes]]


@dataclass(frozen=True)
class CachedCaptions:
    """What encoders made of captions."""

    encoders: tuple[CaptionEncoderCache, ...]

    def read(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what encoders made of tokenised captions. Shapes: (B, ...) of each feature.

        Raises: TrainingFault where an entry is missing or damaged.
        """
        features: dict[str, Tensor] = {}
        for encoder in self.encoders:
            features |= encoder.reader.read(encoder.addresses(tokens))
        return features


@dataclass(frozen=True)
class PairEncoderCache:
    """One encoder that reads pictures with their captions. addresses: of records, mirrored or not, with tokens; picklable."""

    reader: EntryReader
    addresses: Callable[[Sequence[int], Sequence[bool], Mapping[str, Tensor]], list[bytes]]


@dataclass(frozen=True)
class CachedPairs:
    """What encoders made of pictures together with their captions."""

    encoders: tuple[PairEncoderCache, ...]

    def check(self, record_id: int, flip: bool, tokens: Mapping[str, Tensor]) -> None:
        """Refuse a picture and caption, (1, ...) of each feature, that nothing could be made of. Raises Unusable."""
        for encoder in self.encoders:
            _refuse_rejected(encoder.reader, encoder.addresses([record_id], [flip], tokens)[0])

    def read(self, record_ids: Sequence[int], flips: Sequence[bool], tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return features of records of one bucket with their captions. Shapes: (B, ...) of each feature.

        Raises: TrainingFault where an entry is missing or damaged.
        """
        features: dict[str, Tensor] = {}
        for encoder in self.encoders:
            features |= encoder.reader.read(encoder.addresses(record_ids, flips, tokens))
        return features


def _refuse_rejected(reader: EntryReader, address: bytes) -> None:
    reason = reader.reject(address)
    if reason is not None:
        kind, _, detail = reason.partition(": ")
        raise Unusable(kind, detail)


@dataclass(frozen=True)
class FeatureStore:
    """What of a run's features is cached; None: made anew for every use.

    needs_pixels: an encoder that is not cached reads pictures too, so they are decoded although others' are cached.
    needs_control: the same of reference images.
    """

    pictures: CachedPictures | None = None
    captions: CachedCaptions | None = None
    masks: CachedMasks | None = None
    pairs: CachedPairs | None = None
    needs_pixels: bool = False
    needs_control: bool = False

    @property
    def decodes(self) -> bool:
        """Tell whether pictures are decoded."""
        return self.pictures is None or self.needs_pixels

    @property
    def decodes_control(self) -> bool:
        """Tell whether reference images are decoded."""
        return self.pictures is None or self.needs_control


NOTHING_CACHED = FeatureStore()
