"""A family's frozen encoders as what can be cached: the VAE's latents, each text encoder's outputs, an image encoder's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from difftrain.contracts import Encoder, Feature, Parts
from difftrain.models import vision
from difftrain.models.stand_in import DTYPES
from difftrain.models.text.encode import encode, features_of, inputs_of
from difftrain.models.text.tokenize import mask_name
from difftrain.models.vae.latents import latents_encoder

if TYPE_CHECKING:
    from difftrain.models.family import ModelFamily


def encoders(family: ModelFamily, parts: Parts) -> dict[str, Encoder]:
    """Describe what may be cached: "latents", every frozen text encoder, and an image encoder to align with."""
    vae = family.vae
    raw = Feature(vae.raw_channels, vae.raw_factor, frames=vae.frames)
    made = {
        "latents": latents_encoder(
            family.cfg, parts, raw, family.storage_dtype("vae"), partial(family.fingerprint, "vae")
        )
    }
    for place, text in enumerate(family.texts, start=1):
        if text.part not in family.in_root:
            made[text.part] = _text_encoder(family, parts, place)
    if family.cfg.repa.encoder is not None:
        folder = vision.VisionFolder.at(family.cfg.repa.encoder)
        made[vision.PART] = vision.encoder(folder, parts.frozen, family.token, family.cfg.training.mixed_precision)
    return made


def _text_encoder(family: ModelFamily, parts: Parts, place: int) -> Encoder:
    """Describe one frozen text encoder; no module is looked at for it."""
    text, cfg = family.texts[place - 1], family.cfg
    dtype = str(DTYPES[cfg.training.mixed_precision]).removeprefix("torch.")
    settings = family.text_settings(place)
    sizes = family.source.complete(text.part)
    features = features_of(family.texts, place, family.lengths[place - 1], sizes, dtype)
    return Encoder(
        source="caption",
        features=features,
        modules=(text.part,),
        settings=settings,
        encode=lambda batch: encode(family.texts, place, parts.frozen[text.part], batch.features),
        fingerprint=partial(family.fingerprint, text.part, settings),
        inputs=inputs_of(family.texts, place),
        masks={name: mask_name(family.texts, place) for name, each in features.items() if each.maskable},
    )
