"""The files that hold one part of a model: found by their usual names, opened, and what of them is no weight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.weights.files import UnreadableWeights, WeightFile, open_weights

MODEL_STEMS, TEXT_STEMS = ("diffusion_pytorch_model",), ("model", "pytorch_model")


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
