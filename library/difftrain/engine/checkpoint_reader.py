"""Tensors of a checkpoint by name, whichever file they are in and whichever machine's disk that file is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.engine.snapshot import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.distributed.ranks import Ranks


class _File(NamedTuple):
    """What a file holds, without its content. holder: the lowest rank that can read it; None: every rank can."""

    metadata: dict[str, str]
    entries: dict[str, tuple[tuple[int, ...], str]]
    holder: int | None


class CheckpointReader:
    """Read the files KIND-*.safetensors of a checkpoint. Every rank makes one and every rank iterates."""

    def __init__(self, folder: Path, kind: str, ranks: Ranks) -> None:
        self._folder = folder
        self._ranks = ranks
        here = {path.name for path in folder.glob(f"{kind}-*.safetensors")}
        everywhere = ranks.gather(sorted(here))
        if all(each == everywhere[0] for each in everywhere):
            self._files = {name: _File(*_head(folder / name), None) for name in sorted(here)}
        else:
            self._files = self._from_holders(everywhere)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, file in self._files.items():
            twice = self.shapes.keys() & file.entries.keys()
            if twice:
                raise ConfigFault(
                    [Fault(option("save.resume"), f"{folder / name} repeats {min(twice)}, which another file has")]
                )
            self.shapes |= {key: shape for key, (shape, _) in file.entries.items()}

    def _from_holders(self, everywhere: list[list[str]]) -> dict[str, _File]:
        holders: dict[str, int] = {}
        for rank, names in enumerate(everywhere):
            for name in names:
                holders.setdefault(name, rank)
        mine = {name: _head(self._folder / name) for name, rank in holders.items() if rank == self._ranks.rank}
        heads: dict[str, tuple[dict, dict]] = {}
        for told in self._ranks.gather(mine):
            heads |= told
        return {name: _File(*heads[name], holders[name]) for name in sorted(holders)}

    @property
    def metadata(self) -> list[dict[str, str]]:
        """Return the metadata of every file."""
        return [file.metadata for file in self._files.values()]

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted tensors, on the CPU; copy them, they may be views of the file. To be iterated to the end."""
        for name, file in self._files.items():
            if file.holder is None:
                yield from self._read(name, filter(wanted, sorted(file.entries)))
            else:
                yield from self._receive(name, file, wanted)

    def _read(self, name: str, keys: Iterator[str]) -> Iterator[tuple[str, Tensor]]:
        with safe_open(self._folder / name, framework="pt") as opened:
            for key in keys:
                yield key, opened.get_tensor(key)

    def _receive(self, name: str, file: _File, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Let the holder send each tensor to all: machines with disks of their own."""
        keys = sorted(file.entries)
        own = self._read(name, iter(keys)) if file.holder == self._ranks.rank else None
        for key in keys:
            shape, dtype = file.entries[key]
            if own is not None:
                tensor = next(own)[1].clone()
            else:
                tensor = torch.empty(shape, dtype=DTYPES[dtype])
            if tensor.numel():  # as bytes: gloo does not know every dtype
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=file.holder, group=self._ranks.control)
            if wanted(key):
                yield key, tensor


def _head(path: Path) -> tuple[dict[str, str], dict[str, tuple[tuple[int, ...], str]]]:
    with safe_open(path, framework="pt") as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
        entries = {key: (tuple(each.get_shape()), str(each.get_dtype())) for key, each in slices.items()}
        return dict(opened.metadata() or {}), entries
