"""SDXL's frozen encoders as what can be cached: the VAE's latents, and each text encoder's outputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from difftrain.contracts import Batch, Encoder, Feature, Parts
from difftrain.diffusion.draws import normal
from difftrain.models.parts.fingerprints import hashed
from difftrain.models.parts.vae import posterior
from difftrain.models.sdxl.load import DTYPES, clip_skip_of, storage_dtype
from difftrain.models.sdxl.text import encode_first, encode_second
from difftrain.models.sdxl.tokens import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.models.parts.clip_vocabulary import ClipVocabulary
    from difftrain.models.sdxl.sources import Source

MOMENTS = "moments"  # mean and standard deviation of the posterior, one after the other: (2 C, h, w) fp32
LATENTS = "latents"  # one latent a picture, not scaled: (C, h, w) fp32
OUTPUTS = {"text_encoder_1": ("hidden_1",), "text_encoder_2": ("hidden_2", "pooled")}
VERSION = 1  # raise it where equal weights, settings and inputs come to be encoded otherwise
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


@torch.no_grad()
def words(cfg: TrainConfig, batch: Batch, parts: Parts) -> dict[str, Tensor]:
    """Return what each frozen text encoder makes of the captions, from the cache or encoded, and the ids for the others."""
    features = batch.features
    found: dict[str, Tensor] = {}
    for part, outputs in OUTPUTS.items():
        if outputs[0] in features:
            found |= {name: features[name] for name in outputs}
        elif part in parts.frozen:
            found |= _outputs(cfg, part, batch, parts)
        else:
            found |= {name: features[name] for name in _inputs(part) if name in features}
    return found


def _inputs(part: str) -> tuple[str, str]:
    number = part[-1]
    return f"input_ids_{number}", f"token_weights_{number}"


def _outputs(cfg: TrainConfig, part: str, batch: Batch, parts: Parts) -> dict[str, Tensor]:
    """Encode captions by one frozen text encoder."""
    ids, weights = (batch.features.get(name) for name in _inputs(part))
    encoder, skip = parts.frozen[part], clip_skip_of(cfg)
    assert ids is not None, f"{part} is to encode captions that are not there"
    if part == "text_encoder_1":
        return {"hidden_1": encode_first(encoder, ids, weights, skip)}
    hidden, pooled = encode_second(encoder, ids, weights, skip)
    return {"hidden_2": hidden, "pooled": pooled}


def encoders(
    cfg: TrainConfig,
    parts: Parts,
    source: Source,
    pair: tuple[ClipVocabulary, ClipVocabulary],
    num_chunks: int,
) -> dict[str, Encoder]:
    """Describe what may be cached of a configuration: "latents", and each text encoder that is frozen.

    source: of the weights. pair, num_chunks: what makes the ids of a caption.
    """
    ids = f"tokens {_digest(pair)} in {num_chunks}"
    found = {"latents": _latents(cfg, parts, source)}
    for part in OUTPUTS:
        if part in parts.frozen:
            found[part] = _text(cfg, part, parts, source, ids, CHUNK * num_chunks + 2)
    return found


def _latents(cfg: TrainConfig, parts: Parts, source: Source) -> Encoder:
    latents, how = source.architecture.features.features["latents"], cfg.cache.latents_as
    name, channels = (MOMENTS, 2 * latents.channels) if how == "moments" else (LATENTS, latents.channels)
    settings = f"{how} of the posterior in {storage_dtype(cfg, 'vae', {})}"
    if how == "sample":
        settings += f", drawn with seed {SAMPLE_SEED}"

    @torch.no_grad()
    def encode(batch: Batch) -> dict[str, Tensor]:
        mean, std = _posterior(cfg, batch, parts)
        if how == "moments":
            return {name: torch.cat((mean, std), dim=1)}
        return {name: mean if how == "mean" else mean + std * _noise(batch.keys, mean)}

    return Encoder(
        source="pixels",
        features={name: Feature(channels, latents.factor)},
        modules=("vae",),
        settings=settings,
        encode=encode,
        fingerprint=_fingerprint(settings, "vae", parts, source),
    )


def _noise(keys: tuple[bytes, ...], like: Tensor) -> Tensor:
    """Draw normals of the shape of `like`, each sample's by its key."""
    assert len(keys) == len(like), f"{len(keys)} keys for {len(like)} samples"
    drawn = np.stack([normal(SAMPLE_SEED, key, 0, MOMENTS, like.shape[1:]) for key in keys])
    return torch.from_numpy(drawn).to(like.device)


def _text(cfg: TrainConfig, part: str, parts: Parts, source: Source, ids: str, length: int) -> Encoder:
    """Describe a text encoder; under autocast its outputs are in autocast's precision, in which it is kept too."""
    dtype = str(DTYPES[cfg.training.mixed_precision]).removeprefix("torch.")
    size: Any = parts.frozen[part].config
    hidden, *pooled = OUTPUTS[part]
    features = {hidden: Feature(size.hidden_size, length=length, dtype=dtype)}
    features |= {name: Feature(size.projection_dim, dtype=dtype) for name in pooled}
    bits = " in 8 bits" if cfg.model.fp8_frozen == "all" else ""
    settings = f"clip_skip {clip_skip_of(cfg)}, precision {cfg.training.mixed_precision}{bits}, {ids}"

    @torch.no_grad()
    def encode(batch: Batch) -> dict[str, Tensor]:
        return _outputs(cfg, part, batch, parts)

    return Encoder(
        source="caption",
        features=features,
        modules=(part,),
        settings=settings,
        encode=encode,
        fingerprint=_fingerprint(settings, part, parts, source),
        inputs=_inputs(part),
    )


def _fingerprint(settings: str, part: str, parts: Parts, source: Source) -> Callable[[], str]:
    """Return what hashes a part: what it is asked to make, its sizes, and its weights where they are stored."""
    sizes = sorted(source.architecture.told(part).items())
    return lambda: hashed(VERSION, settings, part, sizes, source.fingerprint(part, parts.frozen[part]))


def _digest(pair: tuple[ClipVocabulary, ClipVocabulary]) -> str:
    """Hash what decides the ids of a caption."""
    tables = json.dumps([[each.ids, each.merges, each.pad] for each in pair], sort_keys=True)
    return hashlib.blake2b(tables.encode(), digest_size=16).hexdigest()
