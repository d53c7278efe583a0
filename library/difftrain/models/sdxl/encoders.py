"""SDXL's frozen encoders as what can be cached: the VAE's posterior, and the text encoders' outputs."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch, Encoder, Feature, Parts
from difftrain.models.parts.vae import posterior
from difftrain.models.sdxl.load import DTYPES, clip_skip_of
from difftrain.models.sdxl.text import encode_first, encode_second
from difftrain.models.sdxl.tokens import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.models.parts.clip_vocabulary import ClipVocabulary

MOMENTS = "moments"  # mean and standard deviation of the posterior, one after the other: (2 C, h, w) fp32
OUTPUTS = {"text_encoder_1": ("hidden_1",), "text_encoder_2": ("hidden_2", "pooled")}


def moments(cfg: TrainConfig, batch: Batch, parts: Parts) -> Tensor:
    """Return mean and standard deviation of the VAE's posterior, (B, 2 C, h, w) fp32: from the cache, or encoded."""
    if MOMENTS in batch.features:
        return batch.features[MOMENTS]
    pixels = batch.features["pixels"]
    model = cfg.model
    return torch.cat(
        posterior(parts.frozen["vae"], pixels, fp32=model.vae_fp32, batch_size=model.vae_batch_size), dim=1
    )


@torch.no_grad()
def words(cfg: TrainConfig, batch: Batch, parts: Parts) -> dict[str, Tensor]:
    """Return what each frozen text encoder makes of the captions, from the cache or encoded, and the ids for the others."""
    features, skip = batch.features, clip_skip_of(cfg)
    found: dict[str, Tensor] = {}
    for i, (part, outputs) in enumerate(OUTPUTS.items(), start=1):
        if outputs[0] in features:
            found |= {name: features[name] for name in outputs}
            continue
        ids, weights = features[f"input_ids_{i}"], features.get(f"token_weights_{i}")
        encoder = parts.frozen.get(part)
        if encoder is None:
            found[f"input_ids_{i}"] = ids
            if weights is not None:
                found[f"token_weights_{i}"] = weights
        elif i == 1:
            found["hidden_1"] = encode_first(encoder, ids, weights, skip)
        else:
            found["hidden_2"], found["pooled"] = encode_second(encoder, ids, weights, skip)
    return found


def encoders(
    cfg: TrainConfig, parts: Parts, latents: Feature, pair: tuple[ClipVocabulary, ClipVocabulary], num_chunks: int
) -> dict[str, Encoder]:
    """Describe what may be cached of a configuration: "latents", and "text" where a text encoder is frozen.

    latents: the shape of one latent. pair, num_chunks: what makes the ids of a caption.
    """
    found = {
        "latents": Encoder(
            source="pixels",
            features={MOMENTS: Feature(2 * latents.channels, latents.factor)},
            modules=("vae",),
            settings=f"posterior, fp32 {cfg.model.vae_fp32}",
            encode=lambda batch: {MOMENTS: moments(cfg, batch, parts)},
        )
    }
    frozen = tuple(part for part in OUTPUTS if part in parts.frozen)
    if frozen:
        features = _text_features(cfg, parts, frozen, CHUNK * num_chunks + 2)
        ids = f"tokens {_digest(pair)} in {num_chunks}"
        found["text"] = Encoder(
            source="caption",
            features=features,
            modules=frozen,
            settings=f"clip_skip {clip_skip_of(cfg)}, precision {cfg.training.mixed_precision}, {ids}",
            encode=lambda batch: {name: each for name, each in words(cfg, batch, parts).items() if name in features},
        )
    return found


def _text_features(cfg: TrainConfig, parts: Parts, frozen: tuple[str, ...], length: int) -> dict[str, Feature]:
    """Say how large the outputs are; under autocast they are in its precision, in which the encoders are kept too."""
    dtype = str(DTYPES[cfg.training.mixed_precision]).removeprefix("torch.")
    found: dict[str, Feature] = {}
    for part in frozen:
        size: Any = parts.frozen[part].config
        hidden, *pooled = OUTPUTS[part]
        found[hidden] = Feature(size.hidden_size, length=length, dtype=dtype)
        found |= {name: Feature(size.projection_dim, dtype=dtype) for name in pooled}
    return found


def _digest(pair: tuple[ClipVocabulary, ClipVocabulary]) -> str:
    """Hash what decides the ids of a caption."""
    tables = json.dumps([[each.ids, each.merges, each.pad] for each in pair], sort_keys=True)
    return hashlib.blake2b(tables.encode(), digest_size=16).hexdigest()
