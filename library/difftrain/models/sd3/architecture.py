"""The sizes of a Stable Diffusion 3 model: read, checked, built without weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.contracts.family import DrawSpec, Feature, FeatureSpec
from difftrain.models.parts import counts, encoder_sizes
from difftrain.models.parts.encoder_sizes import CLIP, ENCODERS, possible, told
from difftrain.models.parts.sizes_file import read_sizes
from difftrain.models.sd3.sizes_fit import mismatches

FLAVORS = ("light", "medium", "tiny", "demo")
PARTS = ("transformer", "vae", "text_encoder_1", "text_encoder_2", "text_encoder_3")
TEXT_PARTS = PARTS[2:]
LIGHT_LAYERS = 15
# section of a file of sizes, and folder of diffusers -> part
SECTIONS = {
    "transformer": "transformer",
    "vae": "vae",
    "text_encoder": "text_encoder_1",
    "text_encoder_2": "text_encoder_2",
    "text_encoder_3": "text_encoder_3",
}
INITS = ("adaln_zero", "fan_in")
_NEEDED = {
    "transformer": (
        "sample_size", "patch_size", "in_channels", "out_channels", "num_layers", "attention_head_dim",
        "num_attention_heads", "joint_attention_dim", "caption_projection_dim", "pooled_projection_dim",
        "pos_embed_max_size",
    ),
    **{part: kind.needed for part, kind in ENCODERS.items()},
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """Hold the constructor arguments of every part, as diffusers and transformers name them.

    init: how random transformers begin (see sources.py). text_branch: the last block has its text branch too, which
    diffusers leaves out: reconstructing the text needs it.
    """

    name: str
    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_encoder_1: dict[str, Any]
    text_encoder_2: dict[str, Any]
    text_encoder_3: dict[str, Any]
    init: str = "adaln_zero"
    text_branch: bool = False

    @classmethod
    def from_dict(cls, content: dict[str, Any], where: str) -> Architecture:
        """Check and hold an architecture. Raises ConfigFault with every fault found."""
        faults = _faults(content, where)
        if faults:
            raise ConfigFault(faults)
        parts = {part: dict(content[key]) for key, part in SECTIONS.items()}
        init, branch = content.get("init", "adaln_zero"), content.get("text_branch", False)
        return cls(name=str(content.get("name", "custom")), **parts, init=init, text_branch=branch)

    def to_dict(self) -> dict[str, Any]:
        """Return what --init_from_config=FILE.json takes."""
        head = {"family": "sd3", "name": self.name, "init": self.init, "text_branch": self.text_branch}
        return head | {key: getattr(self, part) for key, part in SECTIONS.items()}

    def told(self, part: str) -> dict[str, Any]:
        """Return what decides, weights aside, what an encoder makes."""
        return told(part, getattr(self, part))

    def count(self, part: str) -> int:
        """Count the parameters of an encoder. Raises ConfigFault for impossible sizes."""
        sizes = getattr(self, part)
        with possible(part):
            return (
                counts.vae(sizes)
                if part == "vae"
                else counts.t5(sizes)
                if part == "text_encoder_3"
                else counts.clip(sizes)
            )

    @property
    def num_layers(self) -> int:
        return self.transformer["num_layers"]

    @property
    def width(self) -> int:
        """Channels of a token within the transformer."""
        return self.transformer["num_attention_heads"] * self.transformer["attention_head_dim"]

    @property
    def clip_length(self) -> int:
        """Tokens of a sequence of CLIP's, as many as its encoders have positions."""
        return self.text_encoder_1.get("max_position_embeddings", CLIP.defaults["max_position_embeddings"])

    @property
    def vae_factor(self) -> int:
        return 2 ** (len(self.vae["block_out_channels"]) - 1)

    @property
    def size_multiple(self) -> int:
        """Pixels that both sides of a picture must be a multiple of: the VAE's factor times the patch."""
        return self.vae_factor * self.transformer["patch_size"]

    @property
    def largest_side(self) -> int:
        """Pixels of the longest side that there are positions for."""
        return self.size_multiple * self.transformer["pos_embed_max_size"]

    @property
    def features(self) -> FeatureSpec:
        """Give the latents, and the draws that hang on them; the family adds its times."""
        channels, factor = self.vae["latent_channels"], self.vae_factor
        latent = DrawSpec("normal", channels=channels, factor=factor)
        return FeatureSpec(
            features={"latents": Feature(channels, factor)},
            draws={"noise": latent, "moments": latent},
            size_multiple=self.size_multiple,
        )

    def build(self, part: str) -> Any:
        """Build one part on the meta device: names and shapes, no memory. Raises ConfigFault for impossible sizes."""
        import torch

        with possible(part), torch.device("meta"):
            return _construct(part, getattr(self, part), text_branch=self.text_branch)


def _construct(part: str, config: dict[str, Any], *, text_branch: bool) -> Any:
    from difftrain.device import mends

    mends.apply("diffusers")
    if part == "transformer":
        return _transformer(config, text_branch=text_branch)
    if part == "vae":
        from diffusers import AutoencoderKL

        return AutoencoderKL(**config)
    if part == "text_encoder_3":
        from transformers import T5Config, T5EncoderModel

        return T5EncoderModel(T5Config(**config))
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(CLIPTextConfig(**config))


def _transformer(config: dict[str, Any], *, text_branch: bool) -> Any:
    from diffusers import SD3Transformer2DModel
    from diffusers.models.attention import JointTransformerBlock

    model: Any = SD3Transformer2DModel(**config)
    if text_branch:
        last = len(model.transformer_blocks) - 1
        model.transformer_blocks[last] = JointTransformerBlock(
            dim=model.inner_dim,
            num_attention_heads=config["num_attention_heads"],
            attention_head_dim=config["attention_head_dim"],
            context_pre_only=False,
            qk_norm=config.get("qk_norm"),
            use_dual_attention=last in config.get("dual_attention_layers", ()),
        )
    return model


def of_depth(architecture: Architecture, num_layers: int) -> Architecture:
    """Return the same sizes with another number of joint blocks."""
    dual = tuple(i for i in architecture.transformer.get("dual_attention_layers") or () if i < num_layers)
    transformer = architecture.transformer | {"num_layers": num_layers}
    if "dual_attention_layers" in transformer:
        transformer["dual_attention_layers"] = dual
    return replace(architecture, transformer=transformer)


def named(name: str) -> Architecture:
    """Return a shipped size."""
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return Architecture.from_dict(json.loads(text), f"{name}.json")


def read_architecture(choice: str, where: str = "--init_from_config") -> Architecture:
    """Resolve light, medium, tiny or the path of a JSON file. Raises ConfigFault."""
    if choice in FLAVORS:
        return named(choice)
    return Architecture.from_dict(read_sizes(choice, where, FLAVORS, SECTIONS), choice)


def known_keys(part: str, given: Iterable[str]) -> set[str]:
    """Name the constructor arguments that a part's sizes may give."""
    if part != "transformer":
        return encoder_sizes.known_keys(part, given)
    from diffusers import SD3Transformer2DModel

    return encoder_sizes.arguments(SD3Transformer2DModel)


def _faults(content: dict[str, Any], where: str) -> list[Fault]:
    missing = [key for key in SECTIONS if not isinstance(content.get(key), dict)]
    unknown = sorted(set(content) - set(SECTIONS) - {"family", "name", "init", "text_branch"})
    faults = [Fault(where, f"has no section {key!r}") for key in missing]
    faults += [Fault(where, f"unknown section {key!r}", f"known: {', '.join(SECTIONS)}") for key in unknown]
    if content.get("init", INITS[0]) not in INITS:
        faults.append(Fault(f"{where} init", f"is {content['init']!r}", f"one of: {', '.join(INITS)}"))
    for key, part in SECTIONS.items():
        if key in missing:
            continue
        section, place = content[key], f"{where} [{key}]"
        faults += [Fault(place, f"unknown key {k!r}") for k in sorted(set(section) - known_keys(part, section))]
        faults += [Fault(place, f"{k!r} is missing") for k in _NEEDED[part] if section.get(k) is None]
        faults += [
            Fault(f"{place} {k}", f"is {section[k]!r}, must be a positive whole number")
            for k in _NEEDED[part]
            if section.get(k) is not None and k not in ("scaling_factor", "block_out_channels")
            if type(section[k]) is not int or section[k] < 1
        ]
    if not faults:
        faults += mismatches({part: content[key] for key, part in SECTIONS.items()}, where)
    return faults
