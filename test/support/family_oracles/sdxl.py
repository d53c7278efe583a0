"""SDXL: UNet2DConditionModel, StableDiffusionXLPipeline and its single files."""

from __future__ import annotations

from typing import Any

import torch
from family_oracles.sd1 import options
from oracle import Conditions, Drawn, Oracle, ldm, ldm_clip, open_clip


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    return net(
        sample=x,
        timestep=t,
        encoder_hidden_states=torch.cat([told["hidden_1"], told["hidden_2"]], dim=-1),
        added_cond_kwargs={"text_embeds": told["pooled"], "time_ids": told["time_ids"]},
        return_dict=False,
    )[0]


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    hidden, _, pooled, _ = pipe.encode_prompt(captions, device="cpu", do_classifier_free_guidance=False)
    widths = [pipe.text_encoder.config.hidden_size, pipe.text_encoder_2.config.hidden_size]
    return {**dict(zip(("hidden_1", "hidden_2"), hidden.split(widths, dim=-1), strict=True)), "pooled": pooled}


def size_conditions(pipe: Any, features: Conditions) -> Conditions:
    named = [features[name].tolist() for name in ("original_size", "crop_top_left", "target_size")]
    width = pipe.text_encoder_2.config.projection_dim
    rows = [pipe._get_add_time_ids(*map(tuple, each), torch.float32, width) for each in zip(*named, strict=True)]
    return {"time_ids": torch.cat(rows)}


ORACLE = Oracle(
    forward,
    prompts,
    whole={
        "unet": ldm("convert_ldm_unet_checkpoint"),
        "vae": ldm("convert_ldm_vae_checkpoint"),
        "text_encoder_1": ldm_clip,
        "text_encoder_2": open_clip,
    },
    sizes=size_conditions,
    drawn=Drawn(
        options, kinds=({}, {"model": {"prediction_type": "v_prediction"}, "noise": {"zero_terminal_snr": True}})
    ),
)
