"""The tensors of a checkpoint: files of complete ones and of flat pieces, written by a rank and read by any number of ranks.

1. A rank writes its tensors by name (write_safetensors); what no rank has all of is in pieces, which the header places.
2. Ranks read what they want of each, whichever files have it, on whichever disks (CheckpointReader).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Extent, Fault

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.distributed.ranks import Ranks

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors, one after the other by way of the host; wide ones first, so that each is aligned in the file."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(as_bytes(tensors[name].detach().cpu().contiguous()).data)


def as_bytes(tensor: Tensor) -> np.ndarray:
    """See a tensor of the host as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


PIECES = "pieces"  # in a file's metadata: name -> [shape of the whole tensor, offset of the piece's first element]


def pieces_metadata(pieces: Mapping[str, Extent]) -> dict[str, str]:
    """Return what a header says of the pieces in its file; nothing where every tensor is whole."""
    return (
        {PIECES: json.dumps({name: [list(shape), offset] for name, (shape, offset) in sorted(pieces.items())})}
        if pieces
        else {}
    )


Shape = tuple[int, ...]


class FlatRange(NamedTuple):
    """Consecutive elements of a tensor: the number of the first, and the shape that they have by themselves."""

    begin: int
    shape: Shape

    @property
    def end(self) -> int:
        """Return the number of the element behind the last."""
        return self.begin + math.prod(self.shape)


class _Piece(NamedTuple):
    """Elements of a tensor that lie in one file, flat where they are not all."""

    file: str
    range: FlatRange


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
        here = sorted(path.name for path in folder.glob(f"{kind}-*.safetensors"))
        everywhere = ranks.gather(here)
        is_shared = all(listing == everywhere[0] for listing in everywhere)
        holders: dict[str, int] = {}
        for rank, names in enumerate(everywhere):
            for name in names:
                holders.setdefault(name, rank)
        heads = {name: _head(folder / name) for name in here if is_shared or holders[name] == ranks.rank}
        if not is_shared:
            heads = {name: head for answer in ranks.gather(heads) for name, head in answer.items()}
        self._files = {name: _File(*heads[name], None if is_shared else holders[name]) for name in sorted(heads)}
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
            self._pieces.setdefault(key, []).append(_Piece(name, FlatRange(begin, stored)))

    def _check(self, key: str, pieces: list[_Piece]) -> None:
        """Let pieces follow one another, none twice and none missing. Raises ConfigFault."""
        pieces.sort(key=lambda piece: piece.range.begin)
        reached = 0
        for file, extent in pieces:
            if extent.begin < reached:
                what = f"{self._folder / file} repeats {key}, which another file has"
                raise ConfigFault([Fault(option("save.resume"), what)])
            if extent.begin > reached:
                break
            reached = extent.end
        if reached != math.prod(self.shapes[key]):
            what = f"{self._folder} lacks elements of {key} from {reached} on: a file is missing"
            raise ConfigFault([Fault(option("save.resume"), what)])

    @property
    def metadata(self) -> list[dict[str, str]]:
        """Return the metadata of every file."""
        return [file.metadata for file in self._files.values()]

    def tensors(self, needed: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted tensors, on the CPU; copy them, they may be views of the file. To be iterated to the end."""
        return self.ranges(lambda name, shape: FlatRange(0, shape) if needed(name) else None)

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
                    overlaps = want is not None and _overlap(piece.range, want)
                    if self._files[piece.file].holder is not None:
                        tensor = self._receive(piece, key, stored)
                    elif overlaps:
                        tensor = stored(piece, key)
                    if want is not None and overlaps:
                        parts.append(_part(tensor, piece.range, want))
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


def _overlap(piece: FlatRange, want: FlatRange) -> bool:
    # a tensor without elements has a piece without elements, and is read all the same
    return max(piece.begin, want.begin) < min(piece.end, want.end) or want == piece


def _part(tensor: Tensor, piece: FlatRange, want: FlatRange) -> Tensor:
    """Return the wanted elements of a piece, flat."""
    begin, end = max(piece.begin, want.begin), min(piece.end, want.end)
    return tensor.reshape(-1)[begin - piece.begin : end - piece.begin]


def _head(path: Path) -> tuple[dict[str, str], dict[str, tuple[Shape, str]]]:
    with safe_open(path, framework="pt") as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
        entries = {key: (tuple(part.get_shape()), str(part.get_dtype())) for key, part in slices.items()}
        return dict(opened.metadata() or {}), entries
