"""Sizes of the encoders that families share, as their classes take them: no class is imported to know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClassSizes:
    """One class: its constructor's arguments with what it takes where nothing is said, and what has to be said.

    decisive: what decides, beside its weights, what it makes of the same input.
    """

    defaults: Mapping[str, Any]
    needed: tuple[str, ...]
    decisive: tuple[str, ...]


_CLIP_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
_T5_NEEDED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
CLIP = ClassSizes(
    {
        "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "projection_dim": 512,
        "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5, "attention_dropout": 0.0, "initializer_range": 0.02, "initializer_factor": 1.0,
        "bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 1,
    },
    _CLIP_NEEDED,
    (*_CLIP_NEEDED, "max_position_embeddings", "hidden_act", "layer_norm_eps", "eos_token_id"),
)  # fmt: skip
T5 = ClassSizes(
    {
        "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0, "feed_forward_proj": "relu", "pad_token_id": 0,
        "eos_token_id": 1,
    },
    _T5_NEEDED,
    (
        *_T5_NEEDED, "relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon",
        "feed_forward_proj",
    ),
)  # fmt: skip
VAE = ClassSizes(
    {
        "in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",),
        "up_block_types": ("UpDecoderBlock2D",), "block_out_channels": (64,), "layers_per_block": 1, "act_fn": "silu",
        "latent_channels": 4, "norm_num_groups": 32, "sample_size": 32, "scaling_factor": 0.18215,
        "shift_factor": None, "latents_mean": None, "latents_std": None, "force_upcast": True, "use_quant_conv": True,
        "use_post_quant_conv": True, "mid_block_add_attention": True,
    },
    ("block_out_channels", "latent_channels", "layers_per_block", "scaling_factor"),
    (
        "in_channels", "down_block_types", "block_out_channels", "layers_per_block", "act_fn", "latent_channels",
        "norm_num_groups", "use_quant_conv", "mid_block_add_attention",
    ),
)  # fmt: skip
BY_CLASS = {
    "diffusers:AutoencoderKL": VAE,
    "transformers:CLIPTextModel": CLIP,
    "transformers:CLIPTextModelWithProjection": CLIP,
    "transformers:T5EncoderModel": T5,
}
_ABOUT_THE_FILE = frozenset(("architectures", "torch_dtype", "dtype", "transformers_version", "model_type"))
# of what is needed, what is no positive whole number
NO_COUNTS = ("scaling_factor", "block_out_channels", "down_block_types", "up_block_types", "addition_embed_type")
_IMMATERIAL = frozenset((
    "sample_size", "force_upcast", "scaling_factor", "shift_factor", "latents_mean", "latents_std", "out_channels",
    "up_block_types", "use_post_quant_conv", "initializer_range", "initializer_factor", "attention_dropout",
    "dropout_rate", "bos_token_id", "pad_token_id", "eos_token_id",
))  # fmt: skip


def complete(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of a class's arguments: those given, and what it takes where nothing is said."""
    if kind in BY_CLASS:
        return {**BY_CLASS[kind].defaults, **given}
    from difftrain.models import build

    return {**build.defaults(kind), **given}


def accepted(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a config.json its class takes; of language models all that is no note about the file."""
    if kind.startswith("transformers:CLIPText") and isinstance(content.get("text_config"), Mapping):
        content = {**content["text_config"], **{key: content[key] for key in ("projection_dim",) if key in content}}
    if (
        kind in BY_CLASS and not any(key for key in content if key not in BY_CLASS[kind].defaults and key[:1] != "_")
    ) or (kind in BY_CLASS and kind.startswith("transformers:")):
        known = frozenset(BY_CLASS[kind].defaults)
    elif kind.startswith("transformers:"):
        return {key: value for key, value in content.items() if key[:1] != "_" and key not in _ABOUT_THE_FILE}
    else:
        from difftrain.models import build

        known = build.arguments(kind)
    return {key: value for key, value in content.items() if key in known}


def decisive(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides, weights aside, what an encoder makes: written down, or its class's default."""
    known = BY_CLASS.get(kind)
    made = {key: given.get(key, known.defaults[key]) for key in known.decisive} if known else {}
    made |= {key: value for key, value in given.items() if key not in _IMMATERIAL}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in made.items()}


def needed(kind: str) -> tuple[str, ...]:
    """Name the sizes of a shared encoder that have to be said."""
    return BY_CLASS[kind].needed if kind in BY_CLASS else ()
