"""Adapters by hand for tiny models: of every default target, one layer with a rank and an alpha of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from families import Tiny

from difftrain.models.weights.adapter_export import write_adapter
from difftrain.models.weights.adapter_files import AdapterChoice, read_adapter
from difftrain.models.weights.adapter_layouts import AdapterLayouts, LayerKey, LoraPair

RANK, ALPHA = 4, 8.0
OTHER = (2, 3.0)  # rank and alpha of one layer
TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")


def modules_of(tiny: Tiny) -> dict[str, Any]:
    """Map folders to the modules of a tiny model."""
    parts, family = tiny.parts, tiny.family
    return {
        family.folder(part): parts.root.get_submodule(part) if part in family.in_root else parts.frozen[part]
        for part in family.parts
    }


def pairs_of(tiny: Tiny, *, texts: bool = True, seed: int = 3, size: float = 0.125) -> dict[LayerKey, LoraPair]:
    """Draw an adapter of the denoiser's targets, and of CLIP where the family reads it."""
    generator, layouts = torch.Generator().manual_seed(seed), AdapterLayouts(tiny.family)
    targets = {layouts.denoiser: tiny.family.lora.targets}
    if texts:
        kinds = {tiny.family.folder(part): kind for part, kind in tiny.family.parts.items()}
        targets |= {folder: TEXT_TARGETS for folder in layouts.text_folders() if "CLIPText" in kinds[folder]}
    pairs: dict[LayerKey, LoraPair] = {}
    for folder, leaves in targets.items():
        names = [name for name, shape in layouts.shapes(folder).items()
                 if len(shape) == 2 and name.endswith(tuple(f".{leaf}" for leaf in leaves))]  # fmt: skip
        alone = next(name for name in names if name.endswith(("to_out.0", "to_out", "out_proj")))
        for name in names:
            rank, alpha = OTHER if name == alone else (RANK, ALPHA)
            out, into = layouts.shapes(folder)[name]
            a, b = torch.randn(rank, into, generator=generator), torch.randn(out, rank, generator=generator)
            pairs[folder, name] = LoraPair([], size * a, size * b, alpha)
    return pairs


def with_lengths(tiny: Tiny, pairs: dict[LayerKey, LoraPair], seed: int = 4) -> dict[LayerKey, LoraPair]:
    """Make DoRA of an adapter: rows of other lengths than the model's."""
    generator, layouts, made = torch.Generator().manual_seed(seed), AdapterLayouts(tiny.family), {}
    for (folder, name), pair in pairs.items():
        out = layouts.shapes(folder)[name][0]
        made[folder, name] = replace(pair, lengths=0.5 + torch.rand(out, generator=generator))
    return made


def written(tiny: Tiny, pairs: dict[LayerKey, LoraPair], folder: Path, **options: Any) -> Path:
    """Write an adapter in all layouts of its family."""
    options = {"rank": RANK, "alpha": ALPHA, "name": "mine", "targets": tiny.family.lora.targets} | options
    return write_adapter(tiny.family, pairs, folder, **options)


def read_back(tiny: Tiny, path: Path) -> dict[LayerKey, LoraPair]:
    """Read a file."""
    return read_adapter(AdapterChoice(path, 1.0, "--adapter"), tiny.family).pairs


def assert_same(one: dict[LayerKey, LoraPair], other: dict[LayerKey, LoraPair]) -> None:
    """Hold adapters to be equal to the bit."""
    assert one.keys() == other.keys()
    for key, pair in one.items():
        assert pair.a is not None and pair.b is not None
        assert torch.equal(pair.a, other[key].a) and torch.equal(pair.b, other[key].b), key
        assert pair.a.dtype == other[key].a.dtype and float(pair.alpha) == float(other[key].alpha), key
        assert pair.root == other[key].root and (pair.lengths is None) == (other[key].lengths is None)
        assert pair.lengths is None or torch.equal(pair.lengths, other[key].lengths), key
