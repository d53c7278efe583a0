"""Sizes of shared encoders from the shapes of a single file, as ComfyUI keeps them: one file a part, no config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
_CLIP_HEAD = 64  # channels of a head in every released CLIP text encoder
# hidden size of a released CLIP text encoder -> its activation and what its texts are filled up with
_CLIP_ACTIVATIONS = {768: "quick_gelu", 1024: "gelu", 1280: "gelu"}


def count(shapes: Shapes, pattern: str) -> int:
    """Return how many blocks there are: one more than the highest number that a pattern captures. Raises KeyError."""
    numbers = [int(match[1]) for key in shapes if (match := re.match(pattern, key))]
    if not numbers:
        raise KeyError(pattern.replace("\\", ""))
    return 1 + max(numbers)


def heads(width: int, usual: int) -> dict[str, int]:
    """Return heads of the width that those of releases have; a narrower network has one."""
    return {"num_attention_heads": max(1, width // usual), "attention_head_dim": min(width, usual)}


def clip(shapes: Shapes) -> dict[str, Any]:
    """Read a CLIP text encoder's sizes off its tensors."""
    prefix = "text_model." if any(key.startswith("text_model.") for key in shapes) else ""
    vocabulary, width = shapes[f"{prefix}embeddings.token_embedding.weight"]
    if width % _CLIP_HEAD:
        raise ValueError(f"width that is a multiple of {_CLIP_HEAD}, the head of every released CLIP: give a folder")
    projection = shapes.get("text_projection.weight", (width, width))[0]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes[f"{prefix}encoder.layers.0.mlp.fc1.weight"][0],
        "projection_dim": projection,
        "num_hidden_layers": count(shapes, rf"{re.escape(prefix)}encoder\.layers\.(\d+)\."),
        "num_attention_heads": max(1, width // _CLIP_HEAD),
        "max_position_embeddings": shapes[f"{prefix}embeddings.position_embedding.weight"][0],
        "hidden_act": _CLIP_ACTIVATIONS.get(width, "quick_gelu"),
        "bos_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1,
    }


def t5(shapes: Shapes) -> dict[str, Any]:
    """Read the sizes of T5's or UMT5's encoder off its tensors."""
    table = "shared.weight" if "shared.weight" in shapes else "encoder.embed_tokens.weight"
    vocabulary, width = shapes[table]
    first = "encoder.block.0.layer.0.SelfAttention"
    buckets, heads = shapes[f"{first}.relative_attention_bias.weight"]
    gated = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight" in shapes
    inner = shapes[f"encoder.block.0.layer.1.DenseReluDense.{'wi_0' if gated else 'wi'}.weight"][0]
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": shapes[f"{first}.q.weight"][0] // heads,
        "d_ff": inner,
        "num_layers": count(shapes, r"encoder\.block\.(\d+)\."),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }


def autoencoder_kl(shapes: Shapes) -> dict[str, Any]:
    """Read an AutoencoderKL's sizes off its original tensors; how its latents are scaled lies in no tensor."""
    levels = count(shapes, r"encoder\.down\.(\d+)\.")
    widths = [shapes[f"encoder.down.{level}.block.0.conv1.weight"][0] for level in range(levels)]
    return {
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "block_out_channels": widths,
        "layers_per_block": count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
        "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in shapes,
    }


BY_CLASS = {
    "diffusers:AutoencoderKL": autoencoder_kl,
    "transformers:CLIPTextModel": clip,
    "transformers:CLIPTextModelWithProjection": clip,
    "transformers:T5EncoderModel": t5,
    "transformers:UMT5EncoderModel": t5,
}


# --- Say what a file of weights looks like, from its keys and shapes, when it is not what was asked for


# first match wins: a pattern that some key matches, and what such a file is
_MARKS = (
    (r"lora_(up|down|A|B)\.|\.lora_(A|B)\.|^lora_|hada_w1|lokr_w1", "a LoRA or another adapter, not a complete model"),
    (r"controlnet|control_model\.|input_hint_block", "a ControlNet"),
    (r"^model\.diffusion_model\.joint_blocks\.|^joint_blocks\.", "SD3"),
    (r"^(model\.diffusion_model\.)?double_blocks\.", "Flux or a relative"),
    (r"^conditioner\.embedders\.1\.model\.", "SDXL"),
    (r"^conditioner\.embedders\.0\.model\.", "the SDXL refiner, which has one text encoder"),
    (r"^cond_stage_model\.model\.transformer\.resblocks\.", "Stable Diffusion 2"),
    (r"^cond_stage_model\.transformer\.", "Stable Diffusion 1"),
    (r"^model\.diffusion_model\.", "a UNet of the original layout without text encoders"),
    (r"^down_blocks\.\d+\.resnets\.", "only a UNet, in the diffusers layout"),
    (r"^(first_stage_model\.)?encoder\.(down|down_blocks)\.", "only a VAE"),
    (r"text_model\.encoder\.layers\.|transformer\.resblocks\.", "only a text encoder"),
)
_UNET_INPUT = "model.diffusion_model.input_blocks.0.0.weight"


def looks_like(shapes: Shapes) -> str:
    """Name the kind of model that these keys and shapes belong to."""
    if not shapes:
        return "an empty file"
    for pattern, name in _MARKS:
        if any(re.search(pattern, key) for key in shapes):
            if shapes.get(_UNET_INPUT, (0, 4))[1] == 9:
                return f"an inpainting model of {name} (9 input channels)"
            return name
    return f"no model known here; its first keys are {', '.join(sorted(shapes)[:3])}"


# width of the text that a UNet's second attention reads -> the model
_TEXT_WIDTHS = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "Stable Diffusion XL"}
_READS_TEXT = re.compile(r"attn2[._](processor[._])?to_[kv].*(lora_A|down)")


def adapter_looks_like(shapes: Shapes) -> str:
    """Name the model that a LoRA is for, by its layers' names and the width of the text; nothing where they do not tell."""
    if any(re.search(r"single_(transformer_)?blocks|double_blocks", key) for key in shapes):
        return "Flux.1"
    if any(re.search(r"joint_blocks|transformer[._]transformer_blocks", key) for key in shapes):
        return "Stable Diffusion 3"
    widths = {shape[1] for key, shape in shapes.items() if len(shape) > 1 and _READS_TEXT.search(key)}
    return next((_TEXT_WIDTHS[width] for width in widths if width in _TEXT_WIDTHS), "")


def differences(expected: Shapes, actual: Shapes, limit: int = 5) -> list[str]:
    """Describe missing, unexpected and differently shaped tensors, the first few of each by name."""
    lines = []
    missing = [key for key in expected if key not in actual]
    unknown = [key for key in actual if key not in expected]
    others_left = [
        f"{key} {actual[key]} instead of {shape}"
        for key, shape in expected.items()
        if key in actual and actual[key] != shape
    ]
    for title, names in (("missing", missing), ("unexpected", unknown), ("of another shape", others_left)):
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            lines.append(f"{len(names)} {title}: {', '.join(names[:limit])}{more}")
    return lines
