"""What makes training cheaper or faster to converge, put into a model and its inputs: nothing of it is exported."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Fault, Parts
from difftrain.models.parts import vision
from difftrain.models.parts.materialise import fill
from difftrain.models.parts.stand_in import StandIn
from difftrain.models.sd3 import repa, routing
from difftrain.models.sd3.flops import Projector, Spared, flops_per_sample
from difftrain.models.sd3.text import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.contracts import Batch, Bucket, Inputs
    from difftrain.models.sd3.architecture import Architecture


def faults(cfg: TrainConfig, architecture: Architecture) -> list[Fault]:
    """Find blocks that are not there, and what an image encoder's folder lacks."""
    depth = architecture.num_layers
    found = [*routing.faults(cfg, depth), *repa.faults(cfg, depth)]
    return found if cfg.repa.encoder is None else [*found, *vision.VisionFolder.at(cfg.repa.encoder).faults()]


def of_root(cfg: TrainConfig, architecture: Architecture, *, meta: bool) -> dict[str, Any]:
    """Return what the root is made with, beside its transformer."""
    found: dict[str, Any] = {"span": routing.span_of(cfg, architecture.num_layers)}
    if cfg.repa.encoder is not None:
        leaving = vision.VisionFolder.at(cfg.repa.encoder).width
        sizes = architecture.transformer
        width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
        module = repa.projector(width, cfg.repa.hidden, leaving)
        if not meta:
            fill(module, repa.weights(module, cfg.training.seed or 0), torch.float32)
        found |= {"projector": module, "align_layer": cfg.repa.layer}
    return found


def add_encoder(cfg: TrainConfig, parts: Parts, *, meta: bool, lazy: Collection[str]) -> None:
    """Put the image encoder among the frozen parts, or what stands in for it until it is woken."""
    if cfg.repa.encoder is None:
        return
    folder, dtype = vision.VisionFolder.at(cfg.repa.encoder), DTYPES[cfg.training.mixed_precision]
    parts.training_only.add(vision.PART)
    if meta or vision.PART in lazy:
        parts.frozen[vision.PART] = StandIn(folder.count(), dtype, lambda: folder.build(dtype))
    else:
        parts.frozen[vision.PART] = folder.build(dtype)

    def wake() -> None:
        parts.frozen[vision.PART] = folder.build(dtype)

    if vision.PART in lazy:
        parts.lazy[vision.PART] = wake


def applied(cfg: TrainConfig, architecture: Architecture, batch: Batch, parts: Parts, inputs: Inputs) -> Inputs:
    """Say in a batch's inputs which tokens stay, what of the target counts then, and what tokens are aligned with."""
    places, span = routing.places_of(cfg, batch), routing.span_of(cfg, architecture.num_layers)
    if repa.is_on(cfg, batch):
        inputs.aims[repa.TERM] = repa.aim(_seen(cfg, architecture, batch, parts), places, cfg.repa.layer, span)
    if places is not None and span is not None:
        inputs.conditions[routing.KEEP] = places
        if span.last is None:
            patch = architecture.transformer["patch_size"]
            inputs.target = routing.patches_at(inputs.target, places, patch)
            inputs.mask = None if inputs.mask is None else routing.patches_at(inputs.mask, places, patch)
    return inputs


def _seen(cfg: TrainConfig, architecture: Architecture, batch: Batch, parts: Parts) -> Tensor:
    """Return the image encoder's tokens, (B, E, h, w): from the cache, or made now."""
    if vision.FEATURE in batch.features:
        return batch.features[vision.FEATURE]
    assert cfg.repa.encoder is not None
    folder = vision.VisionFolder.at(cfg.repa.encoder)
    return vision.tokens_of(folder, parts.frozen[vision.PART], batch.features["pixels"], architecture.size_multiple)


def flops(cfg: TrainConfig, architecture: Architecture, bucket: Bucket) -> float:
    """Count forward and backward of one sample, with what is asked for here."""
    spared = projector = None
    span = routing.span_of(cfg, architecture.num_layers)
    if span is not None:
        (draw,) = routing.draws(cfg, architecture.size_multiple).values()
        spared = Spared(span, *draw.shape(bucket))
    if cfg.repa.encoder is not None:
        leaving = vision.VisionFolder.at(cfg.repa.encoder).width
        projector = Projector(cfg.repa.layer, cfg.repa.hidden, leaving)
    return flops_per_sample(architecture, bucket, cfg.model.t5_max_length, spared, projector)
