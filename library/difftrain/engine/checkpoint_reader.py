"""Tensors of a checkpoint by name, whole or a range of each, whichever files hold them in whatever pieces, on whichever disks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.engine.snapshot import DTYPES, PIECES

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.distributed.ranks import Ranks

Shape = tuple[int, ...]


class FlatRange(NamedTuple):
    """Consecutive elements of a tensor: the number of the first, and the shape that they have by themselves."""

    begin: int
    shape: Shape

    @property
    def end(self) -> int:
        """Return the number of the element behind the last."""
        return self.begin + math.prod(self.shape)


def complete(name: str, shape: Shape) -> FlatRange:
    """Want all of every tensor."""
    return FlatRange(0, shape)


class _Piece(NamedTuple):
    """Elements of a tensor that lie in one file: from `begin` on, flat where they are not all."""

    file: str
    begin: int
    stored: Shape

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.stored)


class _File(NamedTuple):
    """What a file says of itself. holder: the lowest rank that can read it; None: every rank can."""

    metadata: dict[str, str]
    entries: dict[str, tuple[Shape, str]]
    holder: int | None


class CheckpointReader:
    """Read the files KIND-*.safetensors of a checkpoint. Every rank makes one and every rank iterates."""

    def __init__(self, folder: Path, kind: str, ranks: Ranks) -> None:
        self._folder = folder
        self._ranks = ranks
        here = {path.name for path in folder.glob(f"{kind}-*.safetensors")}
        everywhere = ranks.gather(sorted(here))
        if all(listing == everywhere[0] for listing in everywhere):
            self._files = {name: _File(*_head(folder / name), None) for name in sorted(here)}
        else:
            self._files = self._from_holders(everywhere)
        self.shapes: dict[str, Shape] = {}  # of whole tensors
        self._pieces: dict[str, list[_Piece]] = {}
        for name, file in self._files.items():
            self._note(name, file)
        for key, pieces in self._pieces.items():
            self._check(key, pieces)

    def _note(self, name: str, file: _File) -> None:
        """Learn what a file holds of which tensor."""
        cut = json.loads(file.metadata.get(PIECES, "{}"))
        for key, (stored, _) in file.entries.items():
            shape, begin = cut.get(key, (stored, 0))
            if self.shapes.setdefault(key, tuple(shape)) != tuple(shape):
                what = (
                    f"{self._folder / name} has {key} in the shape {list(shape)}, another file {list(self.shapes[key])}"
                )
                raise ConfigFault([Fault(option("save.resume"), what)])
            self._pieces.setdefault(key, []).append(_Piece(name, begin, stored))

    def _check(self, key: str, pieces: list[_Piece]) -> None:
        """Let pieces follow one another, none twice and none missing. Raises ConfigFault."""
        pieces.sort(key=lambda piece: piece.begin)
        reached = 0
        for piece in pieces:
            if piece.begin < reached:
                what = f"{self._folder / piece.file} repeats {key}, which another file has"
                raise ConfigFault([Fault(option("save.resume"), what)])
            if piece.begin > reached:
                break
            reached = piece.end
        if reached != math.prod(self.shapes[key]):
            what = f"{self._folder} lacks elements of {key} from {reached} on: a file is missing"
            raise ConfigFault([Fault(option("save.resume"), what)])

    def _from_holders(self, everywhere: list[list[str]]) -> dict[str, _File]:
        holders: dict[str, int] = {}
        for rank, names in enumerate(everywhere):
            for name in names:
                holders.setdefault(name, rank)
        own = {name: _head(self._folder / name) for name, rank in holders.items() if rank == self._ranks.rank}
        heads: dict[str, tuple[dict, dict]] = {}
        for answer in self._ranks.gather(own):
            heads |= answer
        return {name: _File(*heads[name], holders[name]) for name in sorted(holders)}

    @property
    def metadata(self) -> list[dict[str, str]]:
        """Return the metadata of every file."""
        return [file.metadata for file in self._files.values()]

    def tensors(self, needed: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted tensors, on the CPU; copy them, they may be views of the file. To be iterated to the end."""
        return self.ranges(lambda name, shape: complete(name, shape) if needed(name) else None)

    def ranges(self, wanted: Callable[[str, Shape], FlatRange | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield of every tensor the range that this rank wants of it, as `tensors` does. None: nothing.

        Only what is wanted is read, and one tensor at a time is in memory, also where machines have disks of their own.
        """
        with ExitStack() as stack:
            opened: dict[str, Any] = {}

            def stored(piece: _Piece, key: str) -> Tensor:
                # a view of the mapped file: of what is cut out of it, only that is read
                if piece.file not in opened:
                    opened[piece.file] = stack.enter_context(safe_open(self._folder / piece.file, framework="pt"))
                return opened[piece.file].get_tensor(key)

            for key in self._order():
                want = wanted(key, self.shapes[key])
                parts = []
                for piece in self._pieces[key]:
                    if self._files[piece.file].holder is not None:
                        part = _part(self._receive(piece, key, stored), piece, want)
                    elif _overlap(piece, want):
                        part = _part(stored(piece, key), piece, want)
                    else:
                        part = None
                    if part is not None:
                        parts.append(part)
                if want is not None:
                    yield key, self._joined(parts, key, want)

    def _order(self) -> Iterator[str]:
        """Yield names file by file, so that each is read from its start to its end."""
        seen: set[str] = set()
        for file in self._files.values():
            yield from sorted(file.entries.keys() - seen)
            seen |= file.entries.keys()

    def _joined(self, parts: list[Tensor], key: str, want: FlatRange) -> Tensor:
        if not parts:
            dtype = self._files[self._pieces[key][0].file].entries[key][1]
            return torch.empty(want.shape, dtype=DTYPES[dtype])
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(want.shape)

    def _receive(self, piece: _Piece, key: str, stored: Callable[[_Piece, str], Tensor]) -> Tensor:
        """Let the holder send a piece to all: machines with disks of their own."""
        file = self._files[piece.file]
        shape, dtype = file.entries[key]
        own = file.holder == self._ranks.rank
        tensor = stored(piece, key).clone() if own else torch.empty(shape, dtype=DTYPES[dtype])
        if tensor.numel():  # as bytes: gloo does not know every dtype
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=file.holder, group=self._ranks.control)
        return tensor


def _overlap(piece: _Piece, want: FlatRange | None) -> bool:
    # a tensor without elements has a piece without elements, and is read all the same
    return want is not None and (max(piece.begin, want.begin) < min(piece.end, want.end) or want == (0, piece.stored))


def _part(tensor: Tensor, piece: _Piece, want: FlatRange | None) -> Tensor | None:
    """Return the wanted elements of a piece, flat; None where there are none."""
    if want is None or not _overlap(piece, want):
        return None
    begin, end = max(piece.begin, want.begin), min(piece.end, want.end)
    return tensor.reshape(-1)[begin - piece.begin : end - piece.begin]


def _head(path: Path) -> tuple[dict[str, str], dict[str, tuple[Shape, str]]]:
    with safe_open(path, framework="pt") as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
        entries = {key: (tuple(part.get_shape()), str(part.get_dtype())) for key, part in slices.items()}
        return dict(opened.metadata() or {}), entries
