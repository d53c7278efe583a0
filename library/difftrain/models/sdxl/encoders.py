"""SDXL's frozen encoders as what can be cached: the VAE's latents, and each text encoder's outputs."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

from difftrain.contracts import Batch, Encoder, Feature, Parts
from difftrain.models.parts.fingerprints import hashed
from difftrain.models.parts.latents import latents_encoder
from difftrain.models.parts.stand_in import DTYPES, in_8_bits
from difftrain.models.sdxl.load import clip_skip_of, storage_dtype
from difftrain.models.sdxl.text import encode_first, encode_second
from difftrain.models.sdxl.tokens import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.models.parts.clip_vocabulary import ClipVocabulary
    from difftrain.models.sdxl.sources import Source

OUTPUTS = {"text_encoder_1": ("hidden_1",), "text_encoder_2": ("hidden_2", "pooled")}
VERSION = 1  # raise it where equal weights, settings and inputs come to be encoded otherwise


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

    No module is looked at for it. source: of the weights. pair, num_chunks: what makes the ids of a caption.
    """
    ids = f"tokens {_digest(pair)} in {num_chunks}"
    latents, dtype = source.architecture.features.features["latents"], storage_dtype(cfg, "vae", {})

    def of_vae(settings: str) -> str:
        return _fingerprint(settings, "vae", source)

    found = {"latents": latents_encoder(cfg, parts, latents, dtype, of_vae)}
    for part in OUTPUTS:
        if part in parts.frozen:
            found[part] = _text(cfg, part, parts, source, ids, CHUNK * num_chunks + 2)
    return found


def _text(cfg: TrainConfig, part: str, parts: Parts, source: Source, ids: str, length: int) -> Encoder:
    """Describe a text encoder; under autocast its outputs are in autocast's precision, in which it is kept too."""
    dtype = str(DTYPES[cfg.training.mixed_precision]).removeprefix("torch.")
    size = getattr(source.architecture, part)
    hidden, *pooled = OUTPUTS[part]
    features = {hidden: Feature(size["hidden_size"], length=length, dtype=dtype)}
    features |= {name: Feature(size["projection_dim"], dtype=dtype) for name in pooled}
    bits = " in 8 bits" if in_8_bits(cfg, part) else ""
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
        fingerprint=lambda: _fingerprint(settings, part, source),
        inputs=_inputs(part),
    )


def _fingerprint(settings: str, part: str, source: Source) -> str:
    """Hash what a part is asked to make, its sizes, and its weights where they are stored."""
    sizes = sorted(source.architecture.told(part).items())
    return hashed(VERSION, settings, part, sizes, source.fingerprint(part))


def _digest(pair: tuple[ClipVocabulary, ClipVocabulary]) -> str:
    """Hash what decides the ids of a caption."""
    tables = json.dumps([[each.ids, each.merges, each.pad] for each in pair], sort_keys=True)
    return hashlib.blake2b(tables.encode(), digest_size=16).hexdigest()
