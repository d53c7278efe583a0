"""What makes training cheaper or faster to converge, put into a model and its inputs: nothing of it is exported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Fault, Parts
from difftrain.models import passes, repa, routing, vision
from difftrain.models.placeholder import DTYPES, MetaPlaceholder, fill

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.contracts import Batch, Inputs
    from difftrain.models.description import Description


def faults(family: Description, net: nn.Module) -> list[Fault]:
    """Find blocks that are not there, and what an image encoder's folder lacks."""
    cfg, depth = family.cfg, sum(1 for _ in passes.blocks_of(family, net))
    problems = [*routing.faults(cfg, depth), *repa.faults(cfg, depth)]
    return problems if cfg.repa.encoder is None else [*problems, *vision.VisionFolder.at(cfg.repa.encoder).faults()]


def of_root(family: Description, net: nn.Module, *, meta: bool) -> dict[str, Any]:
    """Return what the root is made with, beside its denoiser."""
    cfg, depth = family.cfg, sum(1 for _ in passes.blocks_of(family, net))
    options: dict[str, Any] = {"span": routing.span_of(cfg, depth)}
    if cfg.repa.encoder is not None:
        leaving = vision.VisionFolder.at(cfg.repa.encoder).width
        module = repa.projector(_width(net), cfg.repa.hidden, leaving)
        if not meta:
            fill(module, repa.weights(module, cfg.training.seed or 0), torch.float32)
        options |= {"projector": module, "align_layer": cfg.repa.layer}
    return options


def _width(net: Any) -> int:
    """Return the channels of a token within a transformer."""
    return int(net.config.num_attention_heads * net.config.attention_head_dim)


def add_encoder(cfg: TrainConfig, parts: Parts, *, meta: bool, deferred: Collection[str]) -> None:
    """Put the image encoder among the frozen parts, or its placeholder until it is loaded."""
    if cfg.repa.encoder is None:
        return
    folder, dtype = vision.VisionFolder.at(cfg.repa.encoder), DTYPES[cfg.training.mixed_precision]
    parts.training_only.add(vision.PART)
    if meta or vision.PART in deferred:
        parts.frozen[vision.PART] = MetaPlaceholder(folder.count(), dtype, lambda: folder.build(dtype))
    else:
        parts.frozen[vision.PART] = folder.build(dtype)

    def load() -> None:
        parts.frozen[vision.PART] = folder.build(dtype)

    if vision.PART in deferred:
        parts.deferred[vision.PART] = load


def applied(family: Description, batch: Batch, parts: Parts, inputs: Inputs) -> Inputs:
    """Say in a batch's inputs which tokens stay, what of the target counts then, and what tokens are aligned with."""
    cfg = family.cfg
    places, span = routing.places_of(cfg, batch), getattr(parts.root, "span", None)
    if repa.is_on(cfg, batch):
        inputs.aux_targets[repa.TERM] = repa.target_tokens(_seen(family, batch, parts), places, cfg.repa.layer, span)
    if places is not None and span is not None:
        inputs.conditions[routing.KEEP] = places
        if span.last is None:
            inputs.target = routing.patches_at(inputs.target, places, family.patch)
            inputs.mask = None if inputs.mask is None else routing.patches_at(inputs.mask, places, family.patch)
    return inputs


def _seen(family: Description, batch: Batch, parts: Parts) -> Tensor:
    """Return the image encoder's tokens, (B, E, h, w): from the cache, or made now."""
    if vision.FEATURE in batch.features:
        return batch.features[vision.FEATURE]
    assert family.cfg.repa.encoder is not None
    folder = vision.VisionFolder.at(family.cfg.repa.encoder)
    return vision.tokens_of(folder, parts.frozen[vision.PART], batch.features["pixels"], family.token)


def aligns(inputs: Inputs) -> bool:
    """Tell whether a batch's tokens are aligned with an image encoder's."""
    return repa.TERM in inputs.aux_targets


def with_alignment(
    cfg: TrainConfig, sums: Mapping[str, Tensor], projected: Tensor, inputs: Inputs
) -> dict[str, Tensor]:
    """Add the term of the alignment to the others."""
    return repa.with_term(sums, projected, inputs, cfg.repa.weight)
