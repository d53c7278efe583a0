"""AuraFlow: AuraFlowTransformer2DModel, AuraFlowPipeline and the original layout."""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    return net(hidden_states=x, encoder_hidden_states=told["tokens"], timestep=t / 1000, return_dict=False)[0]


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    return {"tokens": pipe.encode_prompt(captions, None, False, device="cpu", max_sequence_length=length)[0]}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    made = {"prompt": PROMPT, "guidance_scale": scale, "max_sequence_length": 32}
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


# version 0.1 is what diffusers' defaults are; 0.3 has positions for 1536 px
ORACLE = Oracle(
    forward,
    prompts,
    "convert_auraflow_transformer_checkpoint_to_diffusers",
    released={"0.1": ({}, 331), "0.3": ({"pos_embed_max_size": 9216}, 331)},
    drawn=Drawn(options, t5_length=32),
)
