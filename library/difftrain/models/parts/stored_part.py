"""One part of a model in the files that hold it: found, compared with what is wanted, read, and told from others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.parts.places import Place
from difftrain.models.parts.recognise import differences, looks_like
from difftrain.models.parts.weight_files import UnreadableWeights, WeightFile, open_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

MODEL_STEMS, TEXT_STEMS = ("diffusion_pytorch_model",), ("model", "pytorch_model")


class StoredPart:
    """Some files that hold one part, and the key of every tensor in them."""

    def __init__(self, path: Path, flag: str, mmap: bool) -> None:
        self.path, self.flag, self._mmap = path, flag, mmap

    def paths(self) -> list[Path]:
        raise NotImplementedError

    def _files(self) -> list[WeightFile]:
        return [opened(path, self.flag, mmap=self._mmap) for path in self.paths()]

    def _places(self, module: nn.Module, keys: set[str]) -> dict[str, Place]:
        raise NotImplementedError

    def _located(self) -> dict[str, WeightFile]:
        return {key: file for file in self._files() for key in file.shapes()}

    def _is_extra(self, key: str) -> bool:
        return is_extra(key)

    def faults(self, module: nn.Module) -> list[Fault]:
        found = {key: shape for file in self._files() for key, shape in file.shapes().items()}
        found = {key: shape for key, shape in found.items() if not self._is_extra(key)}
        tensors = module.state_dict()
        wanted = {p.key: p.stored_shape(tensors[n].shape) for n, p in self._places(module, set(found)).items()}
        lines = differences(wanted, found)
        text = f"{self.path} looks like {looks_like(found)}; tensors {'; '.join(lines)}"
        return [Fault(self.flag, text, "weights and config.json must belong together")] if lines else []

    def weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        located = self._located()
        for name, place in self._places(module, set(located)).items():
            yield name, place.restored(located[place.key].get(place.key))


def opened(path: Path, flag: str, *, mmap: bool = True) -> WeightFile:
    """Open a file of weights. Raises ConfigFault that names the flag."""
    try:
        return open_weights(path, mmap=mmap)
    except UnreadableWeights as error:
        raise ConfigFault([Fault(flag, f"{path} {error}")]) from None


def is_extra(key: str) -> bool:
    """Tell buffers and training helpers that old files carry beside the weights."""
    return key.endswith("embeddings.position_ids") or key.startswith(("loss.", "model_ema."))


def find_weights(folder: Path, stems: Sequence[str], flag: str) -> list[Path]:
    """List the files with a part's weights: whole or in shards, fp16 variants where nothing else is there.

    Raises ConfigFault that names what was looked for.
    """
    kinds = [(stem, variant, end) for variant in ("", ".fp16") for end in (".safetensors", ".bin") for stem in stems]
    for stem, variant, end in kinds:
        whole = folder / f"{stem}{variant}{end}"
        if whole.is_file():
            return [whole]
        # diffusers and transformers put a variant behind "index"
        for index in (whole.with_name(f"{whole.name}.index.json"), folder / f"{stem}{end}.index{variant}.json"):
            if index.is_file():
                return _shards(index, flag)
    names = ", ".join("".join(kind) for kind in kinds)
    raise ConfigFault([Fault(flag, f"{folder} has no weights", f"looked for {names} and their .index.json")])


def _shards(index: Path, flag: str) -> list[Path]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ConfigFault([Fault(flag, f"{index} names no files of weights", "fetch the folder again")])
    return [index.parent / name for name in sorted(set(places.values()))]


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing where there is none, or no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
