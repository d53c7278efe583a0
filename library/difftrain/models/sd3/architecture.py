"""The sizes of a Stable Diffusion 3 model: read, checked, built without weights."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.contracts.family import DrawSpec, Feature, FeatureSpec
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
# constructor arguments of the text encoders, and what their classes take where nothing is said
_CLIP = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "projection_dim": 512, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0, "initializer_range": 0.02, "initializer_factor": 1.0, "bos_token_id": 49406,
    "eos_token_id": 49407, "pad_token_id": 1,
}  # fmt: skip
_T5 = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0, "feed_forward_proj": "relu", "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
_CLIP_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
_T5_NEEDED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
_NEEDED = {
    "transformer": (
        "sample_size", "patch_size", "in_channels", "out_channels", "num_layers", "attention_head_dim",
        "num_attention_heads", "joint_attention_dim", "caption_projection_dim", "pooled_projection_dim",
        "pos_embed_max_size",
    ),
    "vae": ("latent_channels", "layers_per_block", "scaling_factor", "block_out_channels"),
    "text_encoder_1": _CLIP_NEEDED,
    "text_encoder_2": _CLIP_NEEDED,
    "text_encoder_3": _T5_NEEDED,
}  # fmt: skip
# Of an encoder: what decides, beside its weights, what it makes of the same input; and what does not.
_CLIP_DECISIVE = (*_CLIP_NEEDED, "max_position_embeddings", "hidden_act", "layer_norm_eps", "eos_token_id")
_DECISIVE = {
    "vae": (
        "in_channels", "down_block_types", "block_out_channels", "layers_per_block", "act_fn", "latent_channels",
        "norm_num_groups", "use_quant_conv", "mid_block_add_attention",
    ),
    "text_encoder_1": _CLIP_DECISIVE,
    "text_encoder_2": _CLIP_DECISIVE,
    "text_encoder_3": (
        *_T5_NEEDED, "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
        "feed_forward_proj",
    ),
}  # fmt: skip
_IMMATERIAL = frozenset((
    "sample_size", "force_upcast", "scaling_factor", "shift_factor", "latents_mean", "latents_std", "out_channels",
    "up_block_types", "use_post_quant_conv", "initializer_range", "initializer_factor", "attention_dropout",
    "dropout_rate", "bos_token_id", "pad_token_id", "eos_token_id",
))  # fmt: skip


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
        """Return what decides, weights aside, what an encoder makes, whether it is written down or its class's default.

        What is given and not known here counts too.
        """
        given, defaults = getattr(self, part), _defaults(part)
        found = {key: given.get(key, defaults.get(key)) for key in _DECISIVE[part]}
        found |= {key: value for key, value in given.items() if key not in _IMMATERIAL}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}

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
        return self.text_encoder_1.get("max_position_embeddings", _CLIP["max_position_embeddings"])

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

        try:
            with torch.device("meta"):
                return _construct(part, getattr(self, part), text_branch=self.text_branch)
        except (TypeError, ValueError, IndexError, ZeroDivisionError, RuntimeError, AttributeError) as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise ConfigFault([Fault(f"the sizes of {part}", f"make no model: {reason}")]) from error


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


def known_keys(part: str) -> set[str]:
    """Name the constructor arguments that a part's sizes may give."""
    if part in TEXT_PARTS:
        return set(_defaults(part))
    from diffusers import AutoencoderKL, SD3Transformer2DModel

    model = SD3Transformer2DModel if part == "transformer" else AutoencoderKL
    return set(inspect.signature(model.__init__).parameters) - {"self"}


def _defaults(part: str) -> dict[str, Any]:
    """Return what a part's class takes where its sizes say nothing; no encoder is imported for it."""
    if part in TEXT_PARTS:
        return _T5 if part == "text_encoder_3" else _CLIP
    from diffusers import AutoencoderKL

    return {key: each.default for key, each in inspect.signature(AutoencoderKL.__init__).parameters.items()}


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
        faults += [Fault(place, f"unknown key {k!r}") for k in sorted(set(section) - known_keys(part))]
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
