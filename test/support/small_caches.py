"""Caches of a few small entries, for tests of what is done with caches; nothing here needs torch."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

from difftrain.cache.store import journals, references
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.format import PackedEntry, StoredFeature, pack, reject
from difftrain.cache.store.index import merge
from difftrain.cache.store.segment import SegmentWriter
from difftrain.cache.tools.verify import verify

HEADER = {"encoder": "latents", "fingerprint": "f", "features": {"moments": "uint8"}, "storage": "fp32"}


def address(number: int) -> bytes:
    """Return the address of an entry."""
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def item(number: int) -> PackedEntry:
    """Return an entry whose content and length depend on its number."""
    data = np.frombuffer(hashlib.shake_128(b"%d" % number).digest(100 + 7 * number), np.uint8)
    features = [StoredFeature("moments", "uint8", (len(data),), len(data), data)]
    return PackedEntry(address(number), pack(features, {"name": f"picture {number}"}))


def write(folder: CacheFolder, numbers: Iterable[int], *, seal: bool = True) -> SegmentWriter:
    """Write entries into a segment of their own."""
    writer = SegmentWriter(folder, HEADER)
    writer.append([item(number) for number in numbers])
    if seal:
        writer.close()
    return writer


def want(folder: CacheFolder, name: str, numbers: Iterable[int], *, whole: bool = True) -> None:
    """Write down that a configuration wants entries."""
    rows = np.zeros(len(numbers := list(numbers)), references.REFERENCE_ROW)
    rows["key"] = rows["address"] = [address(number) for number in numbers]
    references.write(folder, name, {"of": name}, {"latents": rows})
    if whole:
        references.mark_complete(folder, name)


def make(path: Path, segments: int = 3, entries: int = 6) -> CacheFolder:
    """Make a cache that one configuration, "all", wants all of."""
    folder = CacheFolder.open(path, create=True)
    for number in range(segments):
        write(folder, range(number * entries, (number + 1) * entries))
    merge(folder)
    want(folder, "all", range(segments * entries))
    return folder


def interrupted(path: Path, numbers: Iterable[int]) -> None:
    """Leave what a build leaves that is killed after a commit."""
    code = (
        "import os, sys; from small_caches import *; "
        f"write(CacheFolder.open(sys.argv[1], create=True), {list(numbers)}, seal=False); os._exit(0)"
    )
    at = [str(Path(__file__).parents[2] / "library"), str(Path(__file__).parent)]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {at}; {code}", str(path)], check=True)


def add_reject(folder: CacheFolder, number: int) -> None:
    """Write the entry of a picture that could not be decoded."""
    writer = SegmentWriter(folder, HEADER)
    writer.append([reject(address(number), f"picture {number}", "truncated")])
    writer.close()


def served(folder: CacheFolder) -> dict[bytes, bytes]:
    """Return the payloads that metadata.db names and files hold, by address, unchecked."""
    found = {}
    named = "SELECT address, name, offset, length FROM entries JOIN segments ON id = segment"
    with closing(journals.connect(folder.database)) as db:
        for each, segment, offset, length in db.execute(named):
            if folder.exists(segment, BIN):
                with folder.open_file(segment, BIN) as file:
                    file.seek(offset)
                    found[bytes(each)] = file.read(length)
    return found


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip one bit of a file; a place below 0 counts from its end."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


# of partly_wanted: most of the first segment, some of the next two, none of the last
WANTED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 20}


def partly_wanted(path: Path) -> CacheFolder:
    """Make a cache of which two uses want some entries."""
    folder = make(path, segments=4, entries=10)
    references.remove(folder, "all")
    want(folder, "a", range(9))
    want(folder, "b", [10, 11, 20])
    return folder


def assert_whole(folder: CacheFolder, numbers: set[int], originals: dict[bytes, bytes]) -> None:
    """Compare what is served of some entries with what was written, after a look at everything."""
    report = verify(folder)
    assert not report.damages, [str(damage) for damage in report.damages]
    merge(folder)
    found = served(folder)
    for number in numbers:
        assert found[address(number)] == originals[address(number)]
