"""Tiny models and image encoders for tests of what makes training cheaper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from difftrain.config.schema.sections import ModelSection, TrainConfig, TrainingSection
from difftrain.contracts import Batch, Bucket, Draw, Parts
from difftrain.data.samples import host_draws
from difftrain.models.families.sd3.family import SD3Family

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
KINDS = ("dinov2", "clip_vision_model", "siglip_vision_model", "vit")


def config(**sections: Any) -> TrainConfig:
    """Return a configuration of the tiny model, random from a seed."""
    model = sections.pop("model", ModelSection(family="sd3", init_from_config="tiny"))
    training = sections.pop("training", TrainingSection(seed=3))
    return TrainConfig(model=model, training=training, **sections)


def vision_folder(path: Path, kind: str, **sizes: Any) -> Path:
    """Write a random image encoder as transformers does, the same bits every time."""
    import transformers

    names = {
        "dinov2": ("Dinov2Config", "Dinov2Model"),
        "clip_vision_model": ("CLIPVisionConfig", "CLIPVisionModel"),
        "siglip_vision_model": ("SiglipVisionConfig", "SiglipVisionModel"),
        "vit": ("ViTConfig", "ViTModel"),
    }[kind]
    sizes = SIZES | ({} if kind == "dinov2" else {"intermediate_size": 24}) | sizes
    model = getattr(transformers, names[1])(getattr(transformers, names[0])(**sizes))
    draw = torch.Generator().manual_seed(5)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(path)
    scaling = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    (path / "preprocessor_config.json").write_text(json.dumps(scaling))
    return path


def batch_of(
    family: SD3Family, parts: Parts, bucket: Bucket, samples: int = 1, step: int | None = 0, *, trains: bool = True
) -> Batch:
    """Make a batch as the loader does, of drawn pixels; without what only training draws where trains is false."""
    draws = [Draw(number, b"key %d" % number, 0) for number in range(samples)]
    wanted = {name: spec for name, spec in family.features.draws.items() if trains or not spec.trains}
    pixels = torch.randint(
        256, (samples, 3, bucket.height, bucket.width), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    tokens = family.tokenizer(parts)([f"a red circle {number}" for number in range(samples)])
    return Batch(
        bucket=bucket,
        record_id=torch.arange(samples),
        occurrence=torch.zeros(samples, dtype=torch.int64),
        features={"pixels": pixels, **tokens},
        draws={name: host_draws(name, spec, bucket, draws, 3) for name, spec in wanted.items()},
        counts={"samples": float(samples)},
        keys=tuple(draw.key for draw in draws),
        step=step,
    )


def cut(whole: Batch, rank: int, size: int, first: int = 0, last: int | None = None) -> Batch:
    """Return a rank's samples of a global batch, or of the samples from first to last."""
    mine = list(range(len(whole.keys))[first:last][rank::size])
    return Batch(
        bucket=whole.bucket,
        record_id=whole.record_id[mine],
        occurrence=whole.occurrence[mine],
        features={name: value[mine] for name, value in whole.features.items()},
        draws={name: value[mine] for name, value in whole.draws.items()},
        counts={"samples": float(len(mine))},
        keys=tuple(whole.keys[each] for each in mine),
        step=whole.step,
    )
