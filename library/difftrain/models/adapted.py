"""The adapters of a run, from the root's tensors to files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.adapters import ADAPTER, KINDS, adapted_layers, is_adapter, ranks_of
from difftrain.models.weights.folder_export import new_folder
from difftrain.models.weights.writers import safetensors_writer

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.contracts import Parts
    from difftrain.models.description import Description
    from difftrain.models.root import DenoiserRoot

PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_adapter(
    family: Description, weights: Iterable[tuple[str, Tensor]], parts: Parts, path: Path, *, dtype: torch.dtype | None,
    metadata: Mapping[str, str],
) -> Path:  # fmt: skip
    """Write the adapter of a run as a folder, whole or absent, and return it. weights: the root's, by plain name."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for full, value in weights:
        part, _, name = full.partition(".")
        if is_adapter(name):
            tensors.setdefault(part, {})[name] = value
    with new_folder(path) as aside:
        for part, named in tensors.items():
            layers = list(adapted_layers(parts.root.get_submodule(part)))
            folder = aside if part == family.denoiser else aside / family.folder(part)
            folder.mkdir(exist_ok=True)
            _write_peft(family, named, layers, folder, dtype, metadata)
    return path


def _write_peft(
    family: Description, tensors: Mapping[str, Tensor], layers: list[str], folder: Path, dtype: torch.dtype | None,
    metadata: Mapping[str, str],
) -> None:  # fmt: skip
    """Write what peft's own `save_pretrained` writes of one network."""
    section = family.cfg.adapter
    named = {f"base_model.model.{name.replace(f'.{ADAPTER}', '')}": value for name, value in tensors.items()}
    shapes = {name: (dtype or value.dtype, tuple(value.shape)) for name, value in named.items()}
    with safetensors_writer(folder / PEFT_FILE, shapes, {"format": "pt", **metadata}) as writer:
        for name, value in named.items():
            writer.write(name, value)
    config: dict[str, Any] = KINDS[section.type or ""].config(section, ranks_of(section, layers)).to_dict()
    config |= {"target_modules": sorted(layers), "inference_mode": True}
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    (folder / PEFT_CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


def adapter_notes(family: Description, root: DenoiserRoot) -> list[str]:
    """Say which adapters are trained."""
    section, notes = family.cfg.adapter, []
    title = KINDS[section.type or "lora"].title
    for part in family.in_root:
        module = root.get_submodule(part)
        if layers := adapted_layers(module):
            count = sum(param.numel() for name, param in module.named_parameters() if is_adapter(name))
            rank = f" of rank {section.rank}" if section.type != "ia3" else ""
            notes.append(f"{title}{rank} in {len(layers)} layers of the {part}: {count:,} weights are trained")
    return notes
