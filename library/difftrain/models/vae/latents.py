"""A VAE's latents as what can be cached: the posterior's moments, its mean, or one sample of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from difftrain.contracts import PIXELS, Batch, Encoder, Feature, Parts
from difftrain.diffusion.draws import normal
from difftrain.models.vae.posterior import posterior

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig

MOMENTS = "moments"  # mean and standard deviation of the posterior, one after the other: (2 C, h, w) fp32
LATENTS = "latents"  # one latent a picture, not scaled: (C, h, w) fp32
SAMPLE_SEED = 0  # of latents that are drawn once: by the picture alone, for every run


def raw_latents(cfg: TrainConfig, batch: Batch, parts: Parts) -> Tensor:
    """Return latents as the VAE makes them, (B, C, h, w) fp32: from the cache, or encoded.

    Of a posterior each use draws its own, by the draw "moments"; with latents_as "mean" its mean is taken.
    """
    features = batch.features
    if LATENTS in features:
        return features[LATENTS]
    mean, std = features[MOMENTS].chunk(2, dim=1) if MOMENTS in features else _posterior(cfg, batch, parts)
    return mean if cfg.cache.latents_as == "mean" else mean + std * batch.draws[MOMENTS]


def _posterior(cfg: TrainConfig, batch: Batch, parts: Parts) -> tuple[Tensor, Tensor]:
    model = cfg.model
    return posterior(
        parts.frozen["vae"], batch.features["pixels"], fp32=model.vae_fp32, batch_size=model.vae_batch_size
    )


def latents_encoder(
    cfg: TrainConfig, parts: Parts, latents: Feature, dtype: torch.dtype, fingerprint: Callable[[str], str]
) -> Encoder:
    """Describe the VAE. latents: of one picture. dtype: of its weights. fingerprint: of what settings make of it."""
    how = cfg.cache.latents_as
    name, channels = (MOMENTS, 2 * latents.channels) if how == "moments" else (LATENTS, latents.channels)
    settings = f"{how} of the posterior in {dtype}"
    if how == "sample":
        settings += f", drawn with seed {SAMPLE_SEED}"

    @torch.no_grad()
    def encode(batch: Batch) -> dict[str, Tensor]:
        mean, std = _posterior(cfg, batch, parts)
        if how == "moments":
            return {name: torch.cat((mean, std), dim=1)}
        return {name: mean if how == "mean" else mean + std * _noise(batch.keys, mean)}

    return Encoder(
        source=PIXELS,
        features={name: replace(latents, channels=channels)},
        modules=("vae",),
        settings=settings,
        encode=encode,
        fingerprint=lambda: fingerprint(settings),
    )


def _noise(keys: tuple[bytes, ...], like: Tensor) -> Tensor:
    """Draw normals of the shape of `like`, each sample's by its key."""
    assert len(keys) == len(like), f"{len(keys)} keys for {len(like)} samples"
    drawn = np.stack([normal(SAMPLE_SEED, key, 0, MOMENTS, like.shape[1:]) for key in keys])
    return torch.from_numpy(drawn).to(like.device)
