"""One file that holds all parts of a model in their original layout: its sizes, what is wrong with it, and its parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.facts import OneFile
from difftrain.models.weights.files import WeightFile
from difftrain.models.weights.fingerprints import Stamp, stamp
from difftrain.models.weights.keys import Rule
from difftrain.models.weights.part_files import PartFiles, Shapes
from difftrain.models.weights.recognise import differences, looks_like
from difftrain.models.weights.stored_part import opened

if TYPE_CHECKING:
    from torch import Tensor, nn

SIZES = "difftrain.architecture"  # where a file of ours says its sizes: in its header, in a .ckpt as a tensor of bytes


class SingleFile:
    """A file of safetensors or of torch, opened once. flag: what it was given by. facts: what such a file is like."""

    def __init__(self, path: Path, flag: str, facts: OneFile, *, mmap: bool = True) -> None:
        self.path, self.flag, self.facts, self.mmap = path, flag, facts, mmap

    @cached_property
    def opened(self) -> tuple[Stamp, WeightFile]:
        """Open it, with what it was then. Raises ConfigFault."""
        return stamp(self.path), opened(self.path, self.flag, mmap=self.mmap)

    @property
    def header(self) -> dict[str, str]:
        """Return its metadata; a .ckpt has none."""
        return self.opened[1].metadata

    @cached_property
    def marks(self) -> frozenset[str]:
        """Name all that is in it, what no part reads too."""
        return frozenset(self.opened[1].shapes())

    @cached_property
    def shapes(self) -> Shapes:
        """Give the shapes of its weights, and of what readers expect beside them."""
        ignored = re.compile(self.facts.ignored)
        return {key: shape for key, shape in self.opened[1].shapes().items() if not ignored.match(key)}

    def get(self, key: str) -> Tensor:
        """Give a tensor by its key."""
        return self.opened[1].get(key)

    def sizes(self) -> dict[str, Any] | None:
        """Return the sizes that it says; None where it is a release's. Raises ConfigFault."""
        text = self.header.get(SIZES)
        if text is None and SIZES in self.marks:
            text = bytes(self.get(SIZES).tolist()).decode()
        try:
            content = None if text is None else json.loads(text)
        except ValueError:
            content = ()
        if content is not None and not isinstance(content, dict):
            raise ConfigFault([Fault(self.flag, f"{self.path}: its {SIZES} is not JSON")])
        return content

    def faults(self, parts: Mapping[str, tuple[PartInFile, nn.Module]]) -> list[Fault]:
        """Compare keys and shapes with those of the parts that are to come from it, all at once."""
        wanted = {
            reader.prefix + key: shape
            for reader, module in parts.values()
            for key, shape in reader.key_map(module).stored.items()
        }
        others = tuple(prefix for part, prefix in self.facts.prefixes.items() if part not in parts)
        found = {
            key: shape
            for key, shape in self.shapes.items()
            if key not in self.facts.beside and not (others and key.startswith(others))
        }
        lines = differences(wanted, found)
        if not lines:
            return []
        what = f"{self.path} looks like {looks_like(self.shapes)}; tensors {'; '.join(lines)}"
        return [Fault(self.flag, what, self.facts.layout)]


class PartInFile(PartFiles):
    """One part of such a file."""

    def __init__(
        self, whole: SingleFile, part: str, kind: str, *, rule: Callable[[nn.Module], Rule] | None = None
    ) -> None:
        super().__init__(whole.path, kind, whole.flag, mmap=whole.mmap, rule=rule)
        self.single_file, self.part, self.prefix = whole, part, whole.facts.prefixes[part]

    @cached_property
    def _opened(self) -> list[tuple[Stamp, WeightFile]]:
        return [self.single_file.opened]

    def paths(self) -> list[Path]:
        """List the file, whether or not it is still there: it was opened at the start."""
        return [self.path]

    @cached_property
    def _located(self) -> dict[str, tuple[WeightFile, str]]:
        file = self.single_file.opened[1]
        beside = self.single_file.facts.beside
        inside = [key for key in self.single_file.shapes if key.startswith(self.prefix) and key not in beside]
        return {key.removeprefix(self.prefix): (file, key) for key in inside}

    def faults(self, module: nn.Module) -> list[Fault]:
        """Compare names and shapes with those of a module."""
        return self.single_file.faults({self.part: (self, module)})
