"""What an export writes: which entries belong together, and files that other programs read."""

from __future__ import annotations

import heapq
import io
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from difftrain.cache.store import journals, references
from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.index import EntryRow, Metadata
from difftrain.cache.store.references import Reference
from difftrain.config.schema.names import did_you_mean
from difftrain.contracts import ConfigFault, Fault

EMPTY_CAPTION_KEY = bytes(16).hex()  # the key of the empty caption, which belongs to no record
_CHUNK = 1 << 16


class SampleEntry(NamedTuple):
    """One entry of a sample."""

    encoder: str
    variant: int
    address: bytes
    row: EntryRow | None


class SampleEntries(NamedTuple):
    """The entries of one sample. key: its name in the export."""

    key: str
    entries: list[SampleEntry]


def choose_reference(folder: CacheFolder, use: str | None, *, dated: bool) -> tuple[Reference | None, str]:
    """Return the use to export, None where none was built to its end, and what is to be said of it. Raises ConfigFault.

    dated: the folder tells which one was used last; a copy of it does not.
    """
    known = references.all_references(folder)
    complete = sorted(
        (reference for reference in known if reference.complete),
        key=lambda reference: (reference.used_at, reference.id),
    )
    if use is not None:
        reference = next((reference for reference in known if reference.id == use), None)
        if reference is None:
            remedy = did_you_mean(use, [reference.id for reference in known]) or "`difftrain cache info` lists them"
            raise ConfigFault([Fault("--use", f"{use!r} is not a configuration of this cache", remedy)])
        if not reference.complete:
            what = f"{use!r} is incomplete: its build did not finish"
            raise ConfigFault([Fault("--use", what, "build it first, or leave this out to export what was built")])
        return reference, ""

    # none is named: the one that was used last
    if not complete:
        return (
            None,
            "no configuration was built completely, so every entry is a sample of its own, named by its address",
        )
    if len(complete) > 1 and not dated:
        what = f"is missing: {len(complete)} configurations were built, {', '.join(reference.id for reference in complete[:20])}"
        raise ConfigFault([Fault("--use", what, "name one of them")])
    note = f"of {len(complete)} configurations, the most recently used one is exported: --use={complete[-1].id}"
    return complete[-1], note if len(complete) > 1 else ""


def encoders_of(metadata: Metadata, use: Reference | None, requested: Sequence[str] | None) -> list[str]:
    """Return the encoders to export, all that there are unless asked for."""
    names = sorted(use.encoders if use else {str(info.header.get("encoder")) for info in metadata.segments()})
    for name in requested or ():
        if name not in names:
            remedy = did_you_mean(name, names) or f"there are {', '.join(names) or 'none'}"
            raise ConfigFault([Fault("--encoders", f"{name!r} has no entries in this cache", remedy)])
    return [name for name in names if not requested or name in requested]


def by_record(metadata: Metadata, use: Reference, encoders: Sequence[str]) -> Iterator[SampleEntries]:
    """Yield every record with all its variants of all encoders, by key."""
    streams = [_by_key(use.rows(encoder), encoder) for encoder in encoders]
    for key, group in groupby(heapq.merge(*streams, key=lambda entry: entry[0]), key=lambda entry: entry[0]):
        samples: list[list[SampleEntry]] = []
        seen: Counter[tuple[str, int]] = Counter()  # one name may be in several data sets
        for _, encoder, variant, address in group:
            variants = seen[encoder, variant]
            seen[encoder, variant] += 1
            while len(samples) <= variants:
                samples.append([])
            samples[variants].append(SampleEntry(encoder, variant, address, metadata.lookup(address)))
        for number, entries in enumerate(samples):
            yield SampleEntries(key.hex() + (f"-{number}" if number else ""), sorted(entries))


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


def by_address(metadata: Metadata, encoders: Sequence[str]) -> Iterator[SampleEntries]:
    """Yield every entry, as they lie."""
    encoder_of = {info.name: str(info.header.get("encoder")) for info in metadata.segments()}
    query = (
        "SELECT address, number, name, offset, length, crc, kind FROM entries JOIN segments ON segments.id = segment "
        "ORDER BY name, offset"
    )
    with closing(journals.connect(metadata.path)) as db:
        for address, *row in db.execute(query):
            encoder = encoder_of[row[1]]
            if encoder in encoders:
                yield SampleEntries(address.hex(), [SampleEntry(encoder, 0, address, EntryRow(*row))])


_BLOCK = 512  # of a tar
_SAFETENSORS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
_COPIED = 1 << 22


@dataclass(frozen=True)
class ExportPart:
    """What one encoder made of a sample. name: the encoder, with the number of the variant from the second one on."""

    name: str
    suffix: str  # of features' names where they stand beside those of other variants
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class ExportSample:
    """What belongs together. facts: all of it that is no tensor, as JSON."""

    key: str
    facts: Mapping[str, Any]
    parts: Sequence[ExportPart]


class ShardWriter(Protocol):
    """Take samples one after another and put them into files of a bounded size."""

    count: int
    bytes: int

    def add(self, sample: ExportSample) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class TarShards:
    """shard-000000.tar with KEY.ENCODER.safetensors and KEY.json of each sample."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.count = self.bytes = 0
        self._folder, self._most = folder, shard_bytes
        self._tar: tarfile.TarFile | None = None
        self._size = 0

    def add(self, sample: ExportSample) -> None:
        """Write a sample, all of it into one tar. Raises OSError."""
        members = {f"{part.name}.safetensors": safetensors.torch.save(dict(part.tensors)) for part in sample.parts}
        members["json"] = json.dumps(sample.facts, ensure_ascii=False, sort_keys=True).encode()
        size = sum(_BLOCK + -(-len(content) // _BLOCK) * _BLOCK for content in members.values())
        if self._tar is not None and self._size + size > self._most:
            self.close()
        if self._tar is None:
            path = self._folder / f"shard-{self.count:06d}.tar"
            self._tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
            self.count += 1
        for extension, content in sorted(members.items()):
            info = tarfile.TarInfo(f"{sample.key}.{extension}")
            info.size = len(content)
            self._tar.addfile(info, io.BytesIO(content))
        self._size += size
        self.bytes += sum(map(len, members.values()))

    def close(self) -> None:
        """Finish the tar that is open. Raises OSError."""
        if self._tar is not None:
            self._tar.close()
        self._tar, self._size = None, 0

    def abandon(self) -> None:
        """Let go of the tar that is open: nothing of it will be used."""
        with suppress(OSError):
            self.close()


class SafetensorsShards:
    """shard-000000.safetensors with tensors KEY/FEATURE, and beside it a .jsonl with a line a sample.

    A file begins with a table of all of its tensors, so these are laid aside until it is full; those of wide numbers come
    first, so that each begins where its numbers may.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.count = self.bytes = 0
        self._folder, self._most = folder, shard_bytes
        self._size = 0
        self._table: dict[int, list[tuple[str, Tensor]]] = {
            4: [],
            2: [],
            1: [],
        }  # by bytes of a number; tensors on meta
        self._aside: dict[int, IO[bytes]] = {}
        self._lines: list[str] = []

    def add(self, sample: ExportSample) -> None:
        """Lay a sample aside, and write the file where it is full. Raises OSError."""
        tensors = {
            f"{sample.key}/{name}{part.suffix}": value for part in sample.parts for name, value in part.tensors.items()
        }
        size = sum(value.nbytes for value in tensors.values())
        if self._lines and self._size + size > self._most:
            self.close()
        for name, value in sorted(tensors.items()):
            width = value.element_size()
            if width not in self._aside:
                self._aside[width] = self._path(f"width-{width}").open("w+b")
            self._aside[width].write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
            self._table[width].append((name, value.to("meta")))
        self._lines.append(json.dumps(sample.facts, ensure_ascii=False, sort_keys=True))
        self._size += size
        self.bytes += size

    def close(self) -> None:
        """Write what was laid aside. Raises OSError."""
        if not self._lines:
            return
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        size = 0
        for name, value in (pair for width in self._table for pair in self._table[width]):
            numbers = {"dtype": _SAFETENSORS[value.dtype], "shape": list(value.shape)}
            table[name] = {**numbers, "data_offsets": [size, size + value.nbytes]}
            size += value.nbytes
        words = json.dumps(table).encode()
        words = words.ljust(-(-len(words) // 8) * 8)
        with self._path("safetensors").open("wb") as file:
            file.write(len(words).to_bytes(8, "little") + words)
            for width in self._table:
                if width in self._aside:
                    self._aside[width].seek(0)
                    shutil.copyfileobj(self._aside[width], file, _COPIED)
        self._path("jsonl").write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8")
        self.abandon()
        self.count += 1

    def abandon(self) -> None:
        """Forget what was laid aside."""
        for width, file in self._aside.items():
            with suppress(OSError):
                file.close()
            self._path(f"width-{width}").unlink(missing_ok=True)
            self._table[width] = []
        self._aside, self._lines, self._size = {}, [], 0

    def _path(self, suffix: str) -> Path:
        return self._folder / f"shard-{self.count:06d}.{suffix}"


LAYOUTS: dict[str, type[TarShards] | type[SafetensorsShards]] = {
    "webdataset": TarShards,
    "safetensors": SafetensorsShards,
}
