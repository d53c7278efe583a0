"""Batches of any family as a feature cache would serve them, and roots filled in place: for tests and benchmarks of steps.

Nothing is decoded, tokenised or encoded for them, so no encoder is built and no vocabulary is read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from difftrain.contracts import Batch, Bucket, Draw, control_name
from difftrain.data.samples import host_draws
from difftrain.models import shown_frames
from difftrain.models.registry import FAMILIES
from difftrain.models.text.tokenize import mask_name
from difftrain.models.vae.latents import LATENTS, MOMENTS

if TYPE_CHECKING:
    from difftrain.models.family import ModelFamily

_DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}


def tiny_bucket(name: str, side: int = 64) -> Bucket:
    """Return a bucket that every family's tiny size takes; of families of clips alone five frames."""
    row = FAMILIES[name]
    unit = math.lcm(32, row.multiple)
    frames = 5 if not any("image" in task.rpartition("-")[2] for task in row.tasks) else 1
    return Bucket(max(unit, side // unit * unit), max(unit, side // unit * unit), frames)


def cached_batch(family: ModelFamily, bucket: Bucket, size: int, *, seed: int = 0) -> Batch:
    """Make a batch of what frozen encoders would have made, of unit spread, and of training's own host draws.

    Shapes: those of a cache, in its dtypes; the same for a seed. Raises ValueError where a text encoder is trained, which
    reads token ids.
    """
    if len(family.in_root) > 1:
        raise ValueError(f"{', '.join(family.in_root[1:])}: trained encoders read token ids, which no cache holds")
    drawn = torch.Generator().manual_seed(seed)

    # --- latents: a posterior's mean and a small deviation, or one sample
    raw = family.features.features["latents"].shape(bucket)
    mean = torch.randn(size, *raw, generator=drawn)
    if family.cfg.cache.latents_as == "moments":
        features = {MOMENTS: torch.cat((mean, torch.full_like(mean, 0.1)), dim=1)}
    else:
        features = {LATENTS: mean}
    for number in range(family.num_control):
        shown = family.control_feature.shape(bucket)
        features[f"{control_name(number)}_{LATENTS}"] = torch.randn(size, *shown, generator=drawn)

    if family.row.shown_frames:
        for name, feature in shown_frames.features(family).items():
            made = torch.randn(size, *feature.shape(bucket), generator=drawn)
            features[name] = made.to(getattr(torch, feature.dtype))

    # --- what text encoders make, the captions filling all tokens; sizes of the picture
    for position in range(1, len(family.texts) + 1):
        dtype = _DTYPES[family.cfg.training.mixed_precision]
        for name, feature in family.text_features(position, dtype).items():
            shape, kind = (size, *feature.shape(bucket)), getattr(torch, feature.dtype)
            made = torch.randn(shape, generator=drawn) if kind.is_floating_point else torch.ones(shape)
            features[name] = made.to(kind)
            if feature.maskable:
                features[mask_name(family.texts, position)] = torch.ones(shape[:2], dtype=torch.uint8)
    features |= family.size_features((bucket.height, bucket.width), size)

    uses = [Draw(number, b"%d of %d" % (number, seed), 0) for number in range(size)]
    draws = {name: host_draws(name, spec, bucket, uses, seed) for name, spec in family.features.draws.items()}
    ids = torch.arange(size)
    return Batch(
        bucket=bucket,
        record_id=ids,
        occurrence=torch.zeros_like(ids),
        features=features,
        draws=draws,
        counts={"samples": float(size)},
        keys=tuple(use.key for use in uses),
        step=0,
    )


@torch.no_grad()
def fill_in_place(root: nn.Module, device: torch.device, seed: int = 0) -> None:
    """Give a hollow root fp32 weights on a device, in seconds whatever its size; tables that are real are moved.

    Norms begin as ones and zeros, other vectors as N(0, 0.02^2), all else as N(0, 1 / (3 fan_in)). The bits hang on the device, so runs that are
    to be laid over one another take Parts.fill_root instead.
    """
    generator = torch.Generator(device).manual_seed(seed)
    norms = {id(module) for module in root.modules() if "Norm" in type(module).__name__}
    for module in root.modules():
        for name, param in list(module._parameters.items()):
            if param is None:
                continue
            value: Any = torch.empty(param.shape, device=device)
            if id(module) in norms or param.ndim == 1:
                value.normal_(0.0, 0.02, generator=generator) if id(module) not in norms else value.fill_(
                    name == "weight"
                )
            else:
                value.normal_(0.0, (3 * math.prod(param.shape[1:])) ** -0.5, generator=generator)
            module._parameters[name] = nn.Parameter(value, requires_grad=param.requires_grad)
        for name, table in list(module._buffers.items()):
            if table is not None:
                module._buffers[name] = table.to(device)
