"""A tiny SDXL and a batch for it, for tests of models, sampling and exports."""

from __future__ import annotations

from typing import Any

import torch
from vocabularies import transformers_tokenizer

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Bucket, Parts
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.weights.source import WeightSource


def config(sections: dict[str, Any] | None = None, **model: Any) -> TrainConfig:
    """Return a configuration of the tiny size, with fields of [model] by keyword and other sections as tables."""
    if "pretrained" not in model:
        model = {"init_from_config": "tiny"} | model
    return TrainConfig(model=model, **{"training": {"seed": 1}, **(sections or {})})


def source(size: str = "tiny") -> WeightSource:
    """Return the random weights of a shipped size, and its sizes."""
    return SDXLFamily(config(init_from_config=size)).source


def sizes(size: str = "tiny") -> dict[str, Any]:
    """Return a shipped size as a file of sizes has it."""
    return SDXLFamily(config(init_from_config=size)).architecture()


def text_of(root: Any, conditions: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states of both encoders side by side, and what is pooled; trained encoders run."""
    made = root.text(conditions)
    return torch.cat([made["hidden_1"], made["hidden_2"]], dim=-1), made["pooled"]


def loaded(cfg: TrainConfig) -> tuple[SDXLFamily, Parts]:
    """Make a family and load it."""
    family = SDXLFamily(cfg)
    return family, family.load()


def pipeline_over(family: SDXLFamily, parts: Parts) -> Any:
    """Return diffusers' pipeline over the very modules of parts."""
    from diffusers import StableDiffusionXLPipeline

    held = {**dict(parts.root.named_children()), **parts.frozen}
    pipeline = StableDiffusionXLPipeline(
        vae=held["vae"],
        text_encoder=held["text_encoder_1"],
        text_encoder_2=held["text_encoder_2"],
        tokenizer=transformers_tokenizer(family.vocabularies[0]),
        tokenizer_2=transformers_tokenizer(family.vocabularies[1]),
        unet=held["unet"],
        scheduler=family.scheduler(),
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def batch_of(
    family: SDXLFamily, parts: Parts, captions: list[str], height: int = 64, width: int = 64, seed: int = 0
) -> Batch:
    """Make a batch of noise pictures with these captions and unequal size conditions."""
    generator = torch.Generator().manual_seed(seed)
    bucket, count = Bucket(height, width), len(captions)
    features = {"pixels": torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)}
    sizes = torch.randint(0, 500, (3, count, 2), generator=generator)
    features |= dict(zip(("original_size", "crop_top_left", "target_size"), sizes))
    features |= family.tokenizer(parts)(captions)
    draws = {}
    for name, draw in family.features.draws.items():
        if draw.kind == "integer":
            draws[name] = torch.randint(0, draw.high, (count,), generator=generator)
        else:
            draws[name] = torch.randn((count, *draw.shape(bucket)), generator=generator)
    ids = torch.arange(count)
    return Batch(bucket, ids, torch.zeros_like(ids), features, draws)
