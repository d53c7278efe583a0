"""How features lie in bytes: entries of one stride, cut into parts that are encoded and written as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from difftrain.contracts import Bucket, Feature

if TYPE_CHECKING:
    from torch import Tensor

PART_BYTES = 64 << 20  # what is lost by a kill, and held in memory until it is written
PART_ENTRIES = 256  # of small features: enough parts to share out over the ranks


class Entry:
    """The bytes of one sample in a bucket: variant after variant, in each of them feature after feature.

    variants: 1, or 2 for a picture as it is and mirrored.
    """

    def __init__(self, features: Mapping[str, Feature], bucket: Bucket, variants: int = 1) -> None:
        self.shapes = {name: each.shape(bucket) for name, each in features.items()}
        self.dtypes: dict[str, torch.dtype] = {name: getattr(torch, each.dtype) for name, each in features.items()}
        self.sizes = {name: math.prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items()}
        self.variants = variants
        self.variant_bytes = sum(self.sizes.values())
        self.stride = variants * self.variant_bytes

    def empty(self, count: int) -> tuple[dict[str, Tensor], list[np.ndarray]]:
        """Return features of `count` samples to be filled, and their bytes: an array (count, bytes) of each."""
        made = {name: torch.empty((count, *shape), dtype=self.dtypes[name]) for name, shape in self.shapes.items()}
        return made, [_bytes_of(each) for each in made.values()]

    def put(self, out: np.ndarray, rows: Sequence[int], variant: int, made: Mapping[str, Tensor]) -> None:
        """Write what an encoder made into rows of a part. Shapes: out (entries, stride) uint8, made (len(rows), ...)."""
        start = variant * self.variant_bytes
        for name, size in self.sizes.items():
            value = made[name].detach().cpu()
            if value.shape[1:] != self.shapes[name] or value.dtype != self.dtypes[name]:
                said, wanted = (tuple(value.shape[1:]), value.dtype), (self.shapes[name], self.dtypes[name])
                raise TypeError(f"the encoder made {name} of {said}, and announced {wanted}")
            out[list(rows), start : start + size] = _bytes_of(value)
            start += size


def _bytes_of(value: Tensor) -> np.ndarray:
    return value.contiguous().view(len(value), -1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class Part:
    """Entries first to first + count - 1 of a layout, all of one bucket and so of one stride."""

    number: int
    bucket: Bucket
    first: int
    count: int
    stride: int

    @property
    def bytes(self) -> int:
        """Return the size of its entries."""
        return self.count * self.stride


class Layout:
    """All entries of an encoder, numbered through the buckets, and their parts. The same on any number of ranks."""

    def __init__(self, features: Mapping[str, Feature], runs: Iterable[tuple[Bucket, int]], variants: int = 1) -> None:
        """Lay out. runs: each bucket, and how many entries it has."""
        self.entries: dict[Bucket, Entry] = {}
        self.parts: list[Part] = []
        self.count = 0
        for bucket, count in runs:
            entry = self.entries[bucket] = Entry(features, bucket, variants)
            most = max(1, min(PART_ENTRIES, PART_BYTES // entry.stride))
            for start in range(0, count, most):
                size = min(most, count - start)
                self.parts.append(Part(len(self.parts), bucket, self.count + start, size, entry.stride))
            self.count += count
        self._firsts = np.array([part.first for part in self.parts], dtype=np.int64)

    @property
    def bytes(self) -> int:
        """Return the size of all entries."""
        return sum(part.bytes for part in self.parts)

    def part_of(self, slot: int) -> Part:
        """Return the part that holds an entry."""
        return self.parts[int(np.searchsorted(self._firsts, slot, side="right")) - 1]
