"""One rank's part of a checkpoint: copied into memory of its own, then written while training may go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.engine.tensors import write_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ENGINE_FILE = "engine.json"
WEIGHTS, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True)
class TensorFile:
    """Tensors and texts that make one file."""

    name: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


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
    found: list[list[str]] = [[] for _ in range(count)]
    filled = [0] * count
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        place = filled.index(min(filled))
        found[place].append(name)
        filled[place] += sizes[name]
    return found
