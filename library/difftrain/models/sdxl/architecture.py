"""The sizes of an SDXL model: read, checked, built without weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.contracts.family import DrawSpec, Feature, FeatureSpec
from difftrain.models.parts import counts, encoder_sizes
from difftrain.models.parts.encoder_sizes import ENCODERS, possible, told
from difftrain.models.parts.sizes_file import read_sizes

FLAVORS = ("base", "tiny", "demo")
PARTS = ("unet", "vae", "text_encoder_1", "text_encoder_2")
_KEYS = {"unet": "unet", "vae": "vae", "text_encoder": "text_encoder_1", "text_encoder_2": "text_encoder_2"}
_NEEDED = {
    "unet": (
        "in_channels", "out_channels", "block_out_channels", "down_block_types", "up_block_types", "layers_per_block",
        "transformer_layers_per_block", "attention_head_dim", "cross_attention_dim", "addition_embed_type",
        "addition_time_embed_dim", "projection_class_embeddings_input_dim",
    ),
    **{part: kind.needed for part, kind in ENCODERS.items()},
}  # fmt: skip
NUM_TIMESTEPS = 1000


@dataclass(frozen=True)
class Architecture:
    """Hold the constructor arguments of every part, as diffusers and transformers name them."""

    name: str
    unet: dict[str, Any]
    vae: dict[str, Any]
    text_encoder_1: dict[str, Any]
    text_encoder_2: dict[str, Any]

    @classmethod
    def from_dict(cls, content: dict[str, Any], where: str) -> Architecture:
        """Check and hold an architecture. Raises ConfigFault with every fault found."""
        faults = _faults(content, where)
        if faults:
            raise ConfigFault(faults)
        return cls(name=str(content.get("name", "custom")), **{part: dict(content[key]) for key, part in _KEYS.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return what --init_from_config=FILE.json takes."""
        return {"family": "sdxl", "name": self.name} | {key: getattr(self, part) for key, part in _KEYS.items()}

    @property
    def is_base(self) -> bool:
        """Tell whether these are SDXL base's sizes, which every reader of single files knows by heart."""
        base, ours = named("base").to_dict(), self.to_dict()
        loose = ("sample_size", "force_upcast", "bos_token_id", "eos_token_id", "pad_token_id")
        return all(
            ours[section].get(key) == value
            for section in _KEYS
            for key, value in base[section].items()
            if key not in loose
        )

    def told(self, part: str) -> dict[str, Any]:
        """Return what decides, weights aside, what an encoder makes."""
        return told(part, getattr(self, part))

    def count(self, part: str) -> int:
        """Count the parameters of an encoder. Raises ConfigFault for impossible sizes."""
        sizes = getattr(self, part)
        with possible(part):
            return counts.vae(sizes) if part == "vae" else counts.clip(sizes, projected=part == "text_encoder_2")

    @property
    def vae_factor(self) -> int:
        return 2 ** (len(self.vae["block_out_channels"]) - 1)

    @property
    def size_multiple(self) -> int:
        """Pixels that both sides of a picture must be a multiple of: the VAE's factor times the UNet's."""
        return self.vae_factor * 2 ** (len(self.unet["block_out_channels"]) - 1)

    @property
    def features(self) -> FeatureSpec:
        channels, factor = self.vae["latent_channels"], self.vae_factor
        latent = DrawSpec("normal", channels=channels, factor=factor)
        return FeatureSpec(
            features={"latents": Feature(channels, factor)},
            draws={"noise": latent, "moments": latent, "timestep": DrawSpec("integer", high=NUM_TIMESTEPS)},
            size_multiple=self.size_multiple,
        )

    def build(self, part: str) -> Any:
        """Build one part on the meta device: names and shapes, no memory. Raises ConfigFault for impossible sizes."""
        import torch

        with possible(part), torch.device("meta"):
            return _construct(part, getattr(self, part))


def _construct(part: str, config: dict[str, Any]) -> Any:
    from difftrain.device import mends

    mends.apply("diffusers")
    if part == "unet":
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(**config)
    if part == "vae":
        from diffusers import AutoencoderKL

        return AutoencoderKL(**config)
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    model = CLIPTextModel if part == "text_encoder_1" else CLIPTextModelWithProjection
    return model(CLIPTextConfig(**config))


def named(name: str) -> Architecture:
    """Return a shipped size."""
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return Architecture.from_dict(json.loads(text), f"{name}.json")


def read_architecture(choice: str, where: str = "--init_from_config") -> Architecture:
    """Resolve base, tiny, demo or the path of a JSON file. Raises ConfigFault."""
    if choice in FLAVORS:
        return named(choice)
    return Architecture.from_dict(read_sizes(choice, where, FLAVORS, _KEYS), choice)


def _faults(content: dict[str, Any], where: str) -> list[Fault]:
    missing = [key for key in _KEYS if not isinstance(content.get(key), dict)]
    unknown = sorted(set(content) - set(_KEYS) - {"family", "name"})
    faults = [Fault(where, f"has no section {key!r}") for key in missing]
    faults += [Fault(where, f"unknown section {key!r}", f"known: {', '.join(_KEYS)}") for key in unknown]
    if missing:
        return faults
    for key, part in _KEYS.items():
        section = content[key]
        faults += [
            Fault(f"{where} [{key}]", f"unknown key {k!r}") for k in sorted(set(section) - known_keys(part, section))
        ]
        faults += [Fault(f"{where} [{key}]", f"{k!r} is missing") for k in _NEEDED[part] if section.get(k) is None]
    if not faults and content["vae"].get("latents_mean") is not None:
        faults.append(
            Fault(f"{where} [vae]", "latents_mean is not SDXL's: its latents are scaled by scaling_factor alone")
        )
    return faults or _mismatches(content, where)


def known_keys(part: str, given: Iterable[str]) -> set[str]:
    """Name the constructor arguments that a part's sizes may give."""
    if part != "unet":
        return encoder_sizes.known_keys(part, given)
    from diffusers import UNet2DConditionModel

    return encoder_sizes.arguments(UNet2DConditionModel)


def _mismatches(content: dict[str, Any], where: str) -> list[Fault]:
    """Say where two parts do not fit together."""
    unet, vae, first, second = (content[key] for key in _KEYS)
    widths = first["hidden_size"] + second["hidden_size"]
    added = 6 * unet["addition_time_embed_dim"] + second["projection_dim"]
    pairs = [
        ("[unet] cross_attention_dim", unet["cross_attention_dim"], widths, "the text encoders' widths together"),
        ("[unet] projection_class_embeddings_input_dim", unet["projection_class_embeddings_input_dim"], added,
         "6 x addition_time_embed_dim + text_encoder_2's projection_dim"),
        ("[unet] in_channels", unet["in_channels"], vae["latent_channels"], "the VAE's latent_channels"),
        ("[unet] out_channels", unet["out_channels"], vae["latent_channels"], "the VAE's latent_channels"),
    ]  # fmt: skip
    return [
        Fault(f"{where} {key}", f"is {value}, must be {right}", why)
        for key, value, right, why in pairs
        if value != right
    ]
