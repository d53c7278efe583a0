"""Chroma1: ChromaTransformer2DModel, ChromaPipeline and the original layout.

Its pipelines hand on a mask of floats, which attention adds to the scores in place of masking (diffusers issue 12116), and
the one that draws on a picture asks for a guidance input that no Chroma has (pipeline_chroma_inpainting.py of 0.42, line
1060): both are put right where they draw.
"""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle

from difftrain.models import passes


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    from diffusers import ChromaPipeline

    (count, _, height, width), tokens, mask = x.shape, told["tokens"], told.get("mask")
    ids = ChromaPipeline._prepare_latent_image_ids(count, height // 2, width // 2, x.device, x.dtype)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(count, height // 2 * (width // 2))], dim=1)
    out = net(
        hidden_states=ChromaPipeline._pack_latents(x, *x.shape),
        timestep=t / 1000,
        encoder_hidden_states=tokens,
        txt_ids=torch.zeros(tokens.shape[1], 3),
        img_ids=ids,
        attention_mask=mask,
        return_dict=False,
    )[0]
    return ChromaPipeline._unpack_latents(out, 8 * height, 8 * width, 8)


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    made = pipe.encode_prompt(captions, None, "cpu", do_classifier_free_guidance=False, max_sequence_length=length)
    return {"tokens": made[0], "mask": made[2].bool()}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    made = {"prompt": PROMPT, "guidance_scale": scale, "max_sequence_length": 32}
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


def mended(pipe: Any) -> Any:
    upstream = pipe._prepare_attention_mask

    def of_bools(**arguments: Any) -> Any:
        mask = upstream(**arguments)
        return None if mask is None else mask.bool()

    pipe._prepare_attention_mask = of_bools
    pipe.transformer.register_to_config(guidance_embeds=False)
    return pipe


# Chroma1 is what diffusers' defaults are
ORACLE = Oracle(
    forward,
    prompts,
    "convert_chroma_transformer_checkpoint_to_diffusers",
    released={"1": ({}, 1023)},
    drawn=Drawn(
        options,
        lambda x: passes.pack(x, 2),
        lambda x, size_hw: passes.unpack(x, 2, (size_hw[0] // 16, size_hw[1] // 16)),
        t5_length=32,
        edits=("ChromaImg2ImgPipeline", "ChromaInpaintPipeline"),
        mended=mended,
    ),
)
