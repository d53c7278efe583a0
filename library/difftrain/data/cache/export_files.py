"""Files that other programs read: tars as WebDataset has them, and safetensors. Equal samples make equal bytes."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

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
class Part:
    """What one encoder made of a sample. name: the encoder, with the number of the variant from the second one on."""

    name: str
    suffix: str  # of features' names where they stand beside those of other variants
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """What belongs together. facts: all of it that is no tensor, as JSON."""

    key: str
    facts: Mapping[str, Any]
    parts: Sequence[Part]


class Shards(Protocol):
    """Take samples one after another and put them into files of a bounded size."""

    count: int
    bytes: int

    def add(self, sample: Sample) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class Tars:
    """shard-000000.tar with KEY.ENCODER.safetensors and KEY.json of each sample."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.count = self.bytes = 0
        self._folder, self._most = folder, shard_bytes
        self._tar: tarfile.TarFile | None = None
        self._size = 0

    def add(self, sample: Sample) -> None:
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


class Safetensors:
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

    def add(self, sample: Sample) -> None:
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
        place = 0
        for name, value in (pair for width in self._table for pair in self._table[width]):
            numbers = {"dtype": _SAFETENSORS[value.dtype], "shape": list(value.shape)}
            table[name] = {**numbers, "data_offsets": [place, place + value.nbytes]}
            place += value.nbytes
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


LAYOUTS: dict[str, type[Tars] | type[Safetensors]] = {"webdataset": Tars, "safetensors": Safetensors}
