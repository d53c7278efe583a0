"""SD3: SD3Transformer2DModel, StableDiffusion3Pipeline and its single files."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Conditions, Drawn, Oracle, ldm, ldm_clip, of_prefix


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    return net(
        hidden_states=x,
        encoder_hidden_states=told["tokens"],
        pooled_projections=told["pooled"],
        timestep=t,
        return_dict=False,
    )[0]


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """From the conditions on: transformers' T5 tokenizer reads a tiny vocabulary in another way."""
    given = {"prompt_embeds": ours["tokens"], "pooled_prompt_embeds": ours["pooled"], "guidance_scale": scale}
    if negative is None:
        return given
    return given | {
        "negative_prompt_embeds": negative["tokens"], "negative_pooled_prompt_embeds": negative["pooled"],
    }  # fmt: skip


# with small tables of positions: those of a release take seconds, and a size says nothing of names
SMALL = {"sample_size": 16, "pos_embed_max_size": 8, "joint_attention_dim": 4096, "pooled_projection_dim": 2048}
MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "out_channels": 16, **SMALL}
NORMED = {"qk_norm": "rms_norm"}
ORACLE = Oracle(
    forward,
    converter="convert_sd3_transformer_checkpoint_to_diffusers",
    released={
        "medium": (MEDIUM, 683),
        "medium35": ({**MEDIUM, **NORMED, "dual_attention_layers": tuple(range(13))}, 909),
        "large35": (
            {**MEDIUM, **NORMED, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432},
            1227,
        ),
    },
    whole={
        "transformer": of_prefix("convert_sd3_transformer_checkpoint_to_diffusers"),
        "vae": ldm("convert_ldm_vae_checkpoint"),
        "text_encoder_1": ldm_clip,
        "text_encoder_2": ldm_clip,
        "text_encoder_3": of_prefix("convert_sd3_t5_checkpoint_to_diffusers"),
    },
    drawn=Drawn(options, kinds=({}, {"flow": {"flux_shift": True}})),
)
