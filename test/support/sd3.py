"""A tiny SD3 and a batch for it, for tests of models, sampling and exports."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from vocabularies import transformers_tokenizer

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Bucket, Draw, Parts
from difftrain.data.samples import host_draws
from difftrain.models.families.sd3.family import SD3Family

T5_LENGTH = 16
PARTS = ("transformer", "vae", "text_encoder_1", "text_encoder_2", "text_encoder_3")
FOLDERS = {part: part.removesuffix("_1") for part in PARTS}


def sizes_of(name: str) -> dict[str, Any]:
    """Return a shipped size: a section for each part, by its folder."""
    file = resources.files("difftrain.models").joinpath("sizes_shipped", f"sd3.{name}.json")
    return json.loads(file.read_text("utf-8"))


def of_sizes(content: dict[str, Any], path: Path, **model: Any) -> SD3Family:
    """Make a family of random weights of these sizes, with a file of them in a folder."""
    file = path / "sizes.json"
    file.write_text(json.dumps(content))
    return SD3Family(config(init_from_config=str(file), **model))


def config(sections: dict[str, Any] | None = None, **model: Any) -> TrainConfig:
    """Return a configuration of the tiny size, with fields of [model] by keyword and other sections as tables."""
    if "pretrained" not in model:
        model = {"init_from_config": "tiny"} | model
    model = {"family": "sd3", "t5_max_length": T5_LENGTH} | model
    return TrainConfig.model_validate({"model": model, "training": {"seed": 1}, **(sections or {})})


def loaded(cfg: TrainConfig) -> tuple[SD3Family, Parts]:
    """Make a family and load it."""
    family = SD3Family(cfg)
    return family, family.load()


def pipeline_over(family: SD3Family, parts: Parts) -> Any:
    """Return diffusers' pipeline over the very modules of parts."""
    from diffusers import StableDiffusion3Pipeline

    made = {"transformer": parts.root.get_submodule("transformer"), "vae": parts.frozen["vae"]}
    for place, (text, vocabulary) in enumerate(zip(family.texts, family.vocabularies, strict=True), start=1):
        number = "" if place == 1 else f"_{place}"
        made[f"text_encoder{number}"] = parts.frozen[text.part]
        made[f"tokenizer{number}"] = transformers_tokenizer(vocabulary)
    return StableDiffusion3Pipeline(scheduler=family.scheduler(), **made)


def batch_of(
    family: SD3Family,
    parts: Parts,
    captions: list[str],
    height: int = 64,
    width: int = 64,
    *,
    seed: int = 0,
    trains: bool = True,
) -> Batch:
    """Make a batch of noise pictures with these captions, and the draws that a loader makes for them."""
    generator = torch.Generator().manual_seed(seed)
    bucket, count = Bucket(height, width), len(captions)
    features = {"pixels": torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)}
    features |= family.tokenizer(parts)(captions)
    uses = [Draw(i, i.to_bytes(16, "little"), 0) for i in range(count)]
    draws = {
        name: host_draws(name, spec, bucket, uses, seed)
        for name, spec in family.features.draws.items()
        if trains or not spec.trains
    }
    ids = torch.arange(count)
    return Batch(bucket, ids, torch.zeros_like(ids), features, draws, keys=tuple(use.key for use in uses))
