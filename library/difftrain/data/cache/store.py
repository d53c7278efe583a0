"""Reading cached features: a picture's by its record, a caption's by its text. Picklable; runs in loader workers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from difftrain.contracts import DataFault
from difftrain.data.cache.layout import Layout, Part
from difftrain.data.media import Unusable
from difftrain.data.order import Recent

if TYPE_CHECKING:
    from difftrain.data.cache.reader import Reader

_OPEN_FILES = 64


def hash_of(caption: str) -> tuple[int, int]:
    """Return the hash that a caption is found by: its high and its low 64 bits."""
    digest = hashlib.blake2b(caption.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


class Shelf:
    """The entries of one encoder, by number."""

    def __init__(self, layout: Layout, places: Sequence[tuple[str, int]]) -> None:
        """Open. places: path and offset of each part's first entry."""
        self._layout, self._places = layout, places
        self._files = Recent(_OPEN_FILES)

    def read(self, slots: Sequence[int], variants: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Copy entries of one bucket into tensors of their own.

        Shapes: (len(slots), ...) of each feature. Raises DataFault where a file can no longer be read.
        """
        bucket = self._layout.part_of(slots[0]).bucket
        entry = self._layout.entries[bucket]
        made, rows = entry.empty(len(slots))
        for i, slot in enumerate(slots):
            part = self._layout.part_of(slot)
            if part.bucket != bucket:
                raise ValueError(f"entries {slots[0]} and {slot} are of different buckets")
            start = (slot - part.first) * part.stride + (variants[i] * entry.variant_bytes if variants else 0)
            self._fill(part, start, [each[i] for each in rows])
        return made

    def _fill(self, part: Part, start: int, rows: list[np.ndarray]) -> None:
        path, offset = self._places[part.number]
        try:
            file: IO[bytes] = self._files.get(path, lambda: Path(path).open("rb", buffering=0))  # noqa: SIM115
            count = os.preadv(file.fileno(), [row.data for row in rows], offset + start)
        except OSError as error:
            raise DataFault(f"{path}: cached features can no longer be read ({error}); start again") from error
        if count != sum(row.nbytes for row in rows):
            raise DataFault(f"{path}: cached features end too early; start again, and they are encoded anew")


@dataclass(frozen=True)
class Pictures:
    """The features of pictures. slots: entry of each record by its id, -1 for none. rejected: id -> why it has none."""

    shelf: Shelf
    slots: np.ndarray
    rejected: Mapping[int, str]

    def check(self, record_id: int) -> None:
        """Refuse a record that could not be decoded when it was to be encoded. Raises Unusable."""
        reason = self.rejected.get(record_id)
        if reason is not None:
            kind, _, detail = reason.partition(": ")
            raise Unusable(kind, detail)

    def read(self, record_ids: Sequence[int], mirrored: Sequence[bool]) -> dict[str, Tensor]:
        """Return features of records, each as it is or mirrored."""
        return self.shelf.read([int(self.slots[each]) for each in record_ids], [int(each) for each in mirrored])


@dataclass(frozen=True)
class Captions:
    """The features of captions. high, low: the hash of each entry, (N,) uint64, ascending."""

    shelf: Shelf
    high: np.ndarray
    low: np.ndarray

    def read(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return features of captions. Raises KeyError for one that was not encoded."""
        return self.shelf.read([self._slot(caption) for caption in captions])

    def _slot(self, caption: str) -> int:
        high, low = hash_of(caption)
        slot = int(np.searchsorted(self.high, np.uint64(high)))
        while slot < len(self.high) and int(self.high[slot]) == high:
            if int(self.low[slot]) == low:
                return slot
            slot += 1
        raise KeyError(f"this caption was not encoded: {caption!r}")


@dataclass(frozen=True)
class Cached:
    """One encoder of pictures whose features are cached.

    addresses: of records by id, each as it is or mirrored; None where the encoder made nothing of one. Picklable.
    """

    reader: Reader
    addresses: Callable[[Sequence[int], Sequence[bool]], list[bytes | None]]

    def check(self, record_id: int, flip: bool) -> None:
        """Refuse a record that could not be decoded when it was to be encoded. Raises Unusable with that reason."""
        (address,) = self.addresses([record_id], [flip])
        if address is None:
            raise Unusable("not cached", "it could not be read when the cache was built")
        reason = self.reader.reject(address)
        if reason is not None:
            kind, _, detail = reason.partition(": ")
            raise Unusable(kind, detail)

    def read(self, record_ids: Sequence[int], flips: Sequence[bool]) -> dict[str, Tensor]:
        """Return features of records of one bucket. Shapes: (B, ...) of each. Raises as Reader.read."""
        found = self.addresses(record_ids, flips)
        addresses = [address for address in found if address is not None]
        if len(addresses) < len(found):
            without = [str(number) for number, address in zip(record_ids, found, strict=True) if address is None]
            raise ValueError(f"records {', '.join(without)} have no address; `check` says so before they are read")
        return self.reader.read(addresses)


@dataclass(frozen=True)
class CachedPictures:
    """What encoders made of pictures."""

    encoders: tuple[Cached, ...]

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

    encoder: Cached

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
        found = self.encoder.addresses(record_ids, flips)
        rows = [row for row, address in enumerate(found) if address is not None]
        if not rows:
            return None
        (masks,) = self.encoder.reader.read([address for address in found if address is not None]).values()
        whole = torch.ones((len(found), *masks.shape[1:]), dtype=torch.float32)
        whole[rows] = masks.float() / 255
        return whole


@dataclass(frozen=True)
class CachedText:
    """One encoder of captions whose features are cached. addresses: of a batch of tokenised captions; picklable."""

    reader: Reader
    addresses: Callable[[Mapping[str, Tensor]], list[bytes]]


@dataclass(frozen=True)
class CachedCaptions:
    """What encoders made of captions."""

    encoders: tuple[CachedText, ...]

    def read(self, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what encoders made of tokenised captions. Shapes: (B, ...) of each feature.

        Raises: TrainingFault where an entry is missing or damaged.
        """
        features: dict[str, Tensor] = {}
        for encoder in self.encoders:
            features |= encoder.reader.read(encoder.addresses(tokens))
        return features


@dataclass(frozen=True)
class FeatureStore:
    """What of a run's features is cached; None: made anew for every use."""

    pictures: Pictures | CachedPictures | None = None
    captions: Captions | CachedCaptions | None = None
    masks: CachedMasks | None = None


NOTHING_CACHED = FeatureStore()
