"""One rank's part of a checkpoint: copied into memory of its own, then written as safetensors while training may go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from difftrain.checkpoint.compatibility import ENGINE_FILE
from difftrain.checkpoint.tensor_files import as_bytes, write_safetensors
from difftrain.contracts import TensorFile

if TYPE_CHECKING:
    from torch import Tensor


def _copy(buffer: Tensor, tensor: Tensor) -> None:
    """Copy to the host. What lies there goes in one memcpy: torch shares it out over threads that wait for one another,
    no sooner done where one fills the memory's bandwidth, and two and a half times later where the cores are busy.
    """
    if tensor.device.type == "cpu" and type(tensor) is torch.Tensor and tensor.is_contiguous():
        np.copyto(as_bytes(buffer), as_bytes(tensor))
    else:
        buffer.copy_(tensor)


class HostBuffers:
    """CPU copies of tensors, in memory that is taken once and used again by the next snapshot.

    Not pinned: torch rounds pinned memory up to powers of two, up to twice the size of the whole state.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._reserves = False

    @torch.no_grad()
    def copy(self, tensors: Iterable[tuple[str, Tensor]], kind: str = "") -> dict[str, Tensor]:
        """Copy tensors by name; the copies hold until the next call with the same names of that kind."""
        copies = {}
        for name, tensor in tensors:
            buffer = self._buffers.get((kind, name))
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._buffers[kind, name] = torch.empty(tensor.shape, dtype=tensor.dtype)
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
