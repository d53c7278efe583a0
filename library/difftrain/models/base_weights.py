"""Weights of the root that are only held, stored in few bits: which layers, how they get theirs, and how they come back.

1. Once it is known what is held (Parts.base), `quantise` makes layers of it hollow: they take codes and scales.
2. `fill` gives each its value, a tensor at a time. Nothing keeps the wide ones: they lie in their source.
3. An export reads them from there (`from_source`), unrounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from difftrain.adapters import plain_name
from difftrain.contracts import ConfigFault, Fault, Parts
from difftrain.device import quantised

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.base import BaseFamily

FIELD = "[model] base_dtype"


def quantise(family: BaseFamily, parts: Parts) -> list[str]:
    """Store layers that are only held as base_dtype says, hollow until they are filled; return what is to be said.

    Raises ConfigFault where nothing is held that could be.
    """
    kind = family.cfg.model.base_dtype
    if kind is None:
        return []
    layers: dict[str, Any] = {}
    for part in family.in_root:
        inside = chosen(family, part, parts.root.get_submodule(part), parts.base, kind)
        layers |= {f"{part}.{name}": layer for name, layer in inside.items()}
    if not layers:
        what = f"is {kind}, and no layer of the {family.denoiser}'s blocks is only held: those are trained"
        raise ConfigFault([Fault(FIELD, what, "leave it out, or let train_only name fewer parameters")])
    dtype = {name: family.storage_dtype(name.partition(".")[0], f"{name.partition('.')[2]}.weight") for name in layers}
    wide = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers.values())
    if kind == "bf16":  # what is kept so anyway stays as it is, in the map of its file
        layers = {name: layer for name, layer in layers.items() if dtype[name] != torch.bfloat16}
    for name, layer in layers.items():
        quantised.hollow([layer], kind, dtype[name])
    stored = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers.values())
    stored += sum(quantised.scale_bytes(layer) for layer in layers.values())
    if not layers:
        return []
    return [f"stored in {kind}, and computed with in the run's precision: {len(layers)} layers that are only held, "
            f"{stored / 1e6:,.1f} MB in place of {wide / 1e6:,.1f}"]  # fmt: skip


def chosen(family: BaseFamily, part: str, module: nn.Module, base: set[str], kind: str) -> dict[str, nn.Module]:
    """Return the layers of a part that are only held and may lose digits: those of blocks, without what keep_wide names.

    Of a network without lists of blocks, as a UNet is, those that look at many numbers.
    """
    lists = tuple(f"{member}." for member in family.blocks) if part == family.denoiser else ()
    fewest = 1 if lists else quantised.FEWEST_INPUTS
    wide = re.compile(family.keep_wide) if family.keep_wide else None
    return {
        name: layer
        for name, layer in module.named_modules()
        if f"{part}.{name}.weight" in base and quantised.fits(layer, kind, fewest=fewest)
        if not lists or name.startswith(lists)
        if wide is None or not wide.search(name)
    }


def from_source(family: BaseFamily, parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that are in few bits as their source has them, in the dtype that they would be held in."""
    for part in family.in_root:
        few_bits = {
            plain_name(f"{name}.weight"): layer.wide_dtype
            for name, layer in parts.root.get_submodule(part).named_modules()
            if isinstance(layer, quantised.QuantisedLayer) and "original" not in layer.__dict__
        }
        if few_bits:
            for name, value in quantised.widened(family.source.weights(part, family.source.build(part))):
                if name in few_bits:
                    yield f"{part}.{name}", value.to(few_bits[name])
