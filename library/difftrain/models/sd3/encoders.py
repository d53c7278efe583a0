"""SD3's frozen encoders as what can be cached: the VAE's latents, and each text encoder's outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from difftrain.contracts import Batch, Encoder, Feature, Parts
from difftrain.models.parts import vision
from difftrain.models.parts.clip_tokens import ClipTokenize
from difftrain.models.parts.fingerprints import hashed
from difftrain.models.parts.latents import latents_encoder
from difftrain.models.parts.stand_in import in_8_bits
from difftrain.models.sd3 import text
from difftrain.models.sd3.load import storage_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.models.sd3.sources import Source
    from difftrain.models.sd3.tokens import Vocabularies

VERSION = 1  # raise it where equal weights, settings and inputs come to be encoded otherwise


def words(batch: Batch, parts: Parts) -> dict[str, Tensor]:
    """Return what the text encoders make of the captions, each from the cache or encoded."""
    found: dict[str, Tensor] = {}
    for part, outputs in text.OUTPUTS.items():
        if outputs[0] in batch.features:
            found |= {name: batch.features[name] for name in outputs}
        else:
            found |= text.encode(part, parts.frozen[part], batch.features)
    return found


def encoders(cfg: TrainConfig, parts: Parts, source: Source, three: Vocabularies) -> dict[str, Encoder]:
    """Describe what may be cached: "latents", the text encoders by name, and the image encoder that is aligned with.

    No module is looked at for it.
    """
    latents, dtype = source.architecture.features.features["latents"], storage_dtype(cfg, "vae")
    found = {"latents": latents_encoder(cfg, parts, latents, dtype, lambda told: _fingerprint(told, "vae", source))}
    for part in text.OUTPUTS:
        found[part] = _text(cfg, part, parts, source, three)
    if cfg.repa.encoder is not None:
        folder, token = vision.VisionFolder.at(cfg.repa.encoder), source.architecture.size_multiple
        found[vision.PART] = vision.encoder(folder, parts.frozen, token, cfg.training.mixed_precision)
    return found


def _text(cfg: TrainConfig, part: str, parts: Parts, source: Source, three: Vocabularies) -> Encoder:
    bits = " in 8 bits" if in_8_bits(cfg, part) else ""
    settings = f"precision {cfg.training.mixed_precision}{bits}, {_tokens(cfg, part, three)}"
    masked = part == "text_encoder_3" and cfg.model.t5_attention_mask

    def encode(batch: Batch) -> dict[str, Tensor]:
        return text.encode(part, parts.frozen[part], batch.features)

    return Encoder(
        source="caption",
        features=_features(cfg, part, source),
        modules=(part,),
        settings=settings,
        encode=encode,
        fingerprint=lambda: _fingerprint(settings, part, source),
        inputs=text.inputs_of(part),
        masks={"hidden_3": text.T5_MASK} if masked else {},
    )


def _features(cfg: TrainConfig, part: str, source: Source) -> dict[str, Feature]:
    size, dtype = getattr(source.architecture, part), text.feature_dtype(cfg)
    if part == "text_encoder_3":
        model = cfg.model
        hidden = Feature(size["d_model"], length=model.t5_max_length, dtype=dtype, maskable=model.t5_attention_mask)
        return {"hidden_3": hidden}
    states, pooled = text.OUTPUTS[part]
    return {
        states: Feature(size["hidden_size"], length=source.architecture.clip_length, dtype=dtype),
        pooled: Feature(size["projection_dim"], dtype=dtype),
    }


def _tokens(cfg: TrainConfig, part: str, three: Vocabularies) -> str:
    """Tell what decides the ids of a caption."""
    if part != "text_encoder_3":
        return f"tokens {ClipTokenize((three.first, three.second)).identity}"
    mask = "read with their mask" if cfg.model.t5_attention_mask else "read with the padding"
    return f"tokens {three.third.digest} up to {cfg.model.t5_max_length}, {mask}"


def _fingerprint(settings: str, part: str, source: Source) -> str:
    """Hash what a part is asked to make, its sizes, and its weights where they are stored."""
    sizes = sorted(source.architecture.told(part).items())
    return hashed(VERSION, settings, part, sizes, source.fingerprint(part))
