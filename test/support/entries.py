"""A cache of made-up features, filled by hand, for tests of reading."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.format import PackedEntry, pack, reject
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.store.memory import Verified
from difftrain.cache.store.read import Reader
from difftrain.cache.store.segment import SegmentFiles, SegmentWriter
from difftrain.cache.store.storage import stored
from difftrain.contracts import Bucket, Feature

BUCKET = Bucket(32, 48)
FEATURES = {
    "map": Feature(4, factor=8),
    "tokens": Feature(5, length=7, dtype="bfloat16", maskable=True),
    "vector": Feature(9, dtype="float16"),
}


def address(number: int) -> bytes:
    """Return the address of a made-up sample."""
    return hashlib.blake2b(f"sample {number}".encode(), digest_size=16).digest()


def sample(number: int, bucket: Bucket = BUCKET, rows: int = 7) -> dict[str, torch.Tensor]:
    """Return made-up features, always the same for a number."""
    generator = torch.Generator().manual_seed(number)
    made = {
        name: torch.randn(feature.shape(bucket), generator=generator).to(getattr(torch, feature.dtype))
        for name, feature in FEATURES.items()
    }
    made["tokens"][rows:] = 0
    return made


def item(number: int, dtype: str = "", bucket: Bucket = BUCKET, rows: int = 7) -> PackedEntry:
    """Return a made-up entry. dtype: unset stores each feature as it is."""
    some = [
        stored(name, value, dtype or FEATURES[name].dtype, rows if name == "tokens" else None)
        for name, value in sample(number, bucket, rows).items()
    ]
    return PackedEntry(address(number), pack(some, {"name": f"picture {number}.jpg"}))


def refused(number: int) -> PackedEntry:
    """Return an entry that says why nothing could be made of a sample."""
    return reject(address(number), f"picture {number}.jpg", "truncated: 3 of 9 bytes")


def filled(path: Path, items: Iterable[PackedEntry], segment_bytes: int = 1 << 30) -> CacheFolder:
    """Write entries, a commit each, and bring the index up to date."""
    folder = CacheFolder.open(path, create=True)
    writer = SegmentWriter(folder, {"encoder": "made up"}, segment_bytes=segment_bytes)
    for each in items:
        writer.append([each])
    writer.close()
    merge(folder)
    return folder


def reader_of(folder: CacheFolder, *, check: bool = True) -> Reader:
    """Return what reads a cache."""
    metadata = Metadata(folder.database)
    verified = Verified(Verified.reserve(metadata.count), metadata.generation) if check else None
    return Reader(SegmentFiles(folder), metadata, FEATURES, verified, cache=str(folder.path))


def same(found: dict[str, torch.Tensor], samples: list[dict[str, torch.Tensor]]) -> bool:
    """Tell whether a batch is these samples, bit by bit."""
    wanted = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
    return found.keys() == wanted.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in wanted.items()
    )


def read_and_mark(reader: Reader, numbers: list[int], verified: Verified, marks: list[int], answer: Any) -> None:
    """Read entries and mark others, in another process; answer which of 40 are marked, and the sum of the maps."""
    for number in marks:
        verified.add(number)
    total = float(reader.read([address(number) for number in numbers])["map"].sum())
    answer.put(([number for number in range(40) if verified.has(number)], total))
