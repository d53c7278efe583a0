"""One rank's part of a checkpoint: copied into memory of its own, then written as safetensors while training may go on."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from difftrain.contracts import Extent, TensorFile

if TYPE_CHECKING:
    from torch import Tensor


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
            file.write(_bytes(tensors[name].detach().cpu().contiguous()).data)


def _copy(buffer: Tensor, tensor: Tensor) -> None:
    """Copy to the host. What lies there goes in one memcpy: torch shares it out over threads that wait for one another,
    no sooner done where one fills the memory's bandwidth, and two and a half times later where the cores are busy.
    """
    if tensor.device.type == "cpu" and type(tensor) is torch.Tensor and tensor.is_contiguous():
        np.copyto(_bytes(buffer), _bytes(tensor))
    else:
        buffer.copy_(tensor)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


class HostBuffers:
    """CPU copies of tensors, in memory that is taken once and used again by the next snapshot.

    Not pinned: torch rounds pinned memory up to powers of two, up to twice the size of the whole state.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._reserves = False

    @torch.no_grad()
    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy tensors by name; the copies hold until the next call with the same names."""
        copies = {}
        for name, tensor in tensors:
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            if not self._reserves:
                _copy(buffer, tensor.detach())
            copies[name] = buffer
        return copies

    @contextmanager
    def reserving(self) -> Iterator[None]:
        """Take the memory of copies that are asked for inside, and copy nothing."""
        self._reserves = True
        try:
            yield
        finally:
            self._reserves = False

    def touch(self) -> None:
        """Write to all memory once: a system hands it out at the first write, for a third of a second a GiB and more."""
        for buffer in list(self._buffers.values()):
            buffer.zero_()


ENGINE_FILE = "engine.json"
WEIGHTS, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True)
class NativeSnapshot:
    """What this rank writes. Its memory is used again by the engine's next snapshot; `current` tells."""

    files: list[TensorFile]
    engine: dict[str, Any] | None  # on rank 0
    current: Callable[[], bool]

    def write(self, directory: Path) -> list[Path]:
        """Write this rank's files and return them."""
        if not self.current():
            raise RuntimeError("this snapshot's memory belongs to a newer one: write before taking the next")
        written = []
        for file in self.files:
            written.append(directory / file.name)
            write_safetensors(written[-1], file.tensors, file.metadata)
        if self.engine is not None:
            written.append(directory / ENGINE_FILE)
            written[-1].write_text(json.dumps(self.engine, indent=1), encoding="utf-8")
        if not self.current():
            raise RuntimeError("the next snapshot was taken while this one was being written")
        return written


def shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Split named sizes into `count` shares of about the same sum; the same on every rank."""
    shares_by_rank: list[list[str]] = [[] for _ in range(count)]
    filled = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = filled.index(min(filled))
        shares_by_rank[rank].append(name)
        filled[rank] += sizes[name]
    return shares_by_rank


# --- Tensors that no rank holds whole: a file has flat pieces of them, and says in its header which


PIECES = "pieces"  # in a file's metadata: name -> [shape of the whole tensor, offset of the piece's first element]


def pieces_metadata(pieces: Mapping[str, Extent]) -> dict[str, str]:
    """Return what a header says of the pieces in its file; nothing where every tensor is whole."""
    return (
        {PIECES: json.dumps({name: [list(shape), offset] for name, (shape, offset) in sorted(pieces.items())})}
        if pieces
        else {}
    )
