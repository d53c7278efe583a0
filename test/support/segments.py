"""Made-up entries of the feature cache, and what a cache holds, for tests."""

import hashlib
from pathlib import Path

import numpy as np

from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.format import PackedEntry, StoredFeature, crc32c, pack
from difftrain.cache.store.index import Metadata
from difftrain.cache.store.segment import SegmentWriter

HEADER = {"encoder": "latents", "fingerprint": "f" * 32, "features": {"latents": "float32"}, "storage": "float32"}


def address(number: int) -> bytes:
    """Return the address of a made-up entry."""
    return hashlib.blake2b(f"entry {number}".encode(), digest_size=16).digest()


def item(number: int, size: int | None = None) -> PackedEntry:
    """Return a made-up entry: always the same for a number."""
    size = 100 + 37 * number % 2000 if size is None else size
    data = np.frombuffer(np.random.Generator(np.random.Philox(key=number)).bytes(size), np.uint8)
    return PackedEntry(
        address(number), pack([StoredFeature("latents", "uint8", (size,), size, data)], {"name": f"{number}.jpg"})
    )


def payload(number: int, size: int | None = None) -> bytes:
    """Return what is stored of a made-up entry."""
    return b"".join(bytes(piece) for piece in item(number, size).pieces)


def write(folder: CacheFolder, numbers, batch=4, segment_bytes=1 << 30, seal=True) -> SegmentWriter:
    """Write entries as one launch would."""
    writer = SegmentWriter(folder, HEADER, segment_bytes=segment_bytes)
    numbers = list(numbers)
    for start in range(0, len(numbers), batch):
        writer.append([item(number) for number in numbers[start : start + batch]])
    if seal:
        writer.close()
    return writer


def entries(database: Path) -> dict[bytes, tuple]:
    """Return (segment, offset, length, crc, kind) of all entries by address, read from the database itself."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)) as db:
        names = dict(db.execute("SELECT id, name FROM segments"))
        rows = db.execute("SELECT address, segment, offset, length, crc, kind FROM entries").fetchall()
    return {row[0]: (names[row[1]], *row[2:]) for row in rows}


def check(folder: CacheFolder, numbers, database: Path | None = None) -> None:
    """Check that exactly these entries are there, whole, found one by one, and counted right."""
    metadata = Metadata(database or folder.database)
    numbers = sorted(set(numbers))
    assert metadata.count == len(numbers)
    found = [metadata.lookup(address(number)) for number in numbers]
    for number, row in zip(numbers, found):
        assert row is not None, number
        with folder.open_file(row.segment, BIN) as file:
            file.seek(row.offset)
            content = file.read(row.length)
        assert row.offset % 64 == 0 and content == payload(number) and crc32c(content) == row.crc
    assert sorted(row.number for row in found) == list(range(len(numbers))), "each number once, without gaps"
    infos = {info.name: info for info in metadata.segments()}
    for name, info in infos.items():
        mine = [row for row in found if row.segment == name]
        assert (info.entries, info.bytes) == (len(mine), sum(row.length for row in mine))
        assert all(row.offset + row.length <= info.end for row in mine)
