"""Z-Image: ZImageTransformer2DModel, ZImagePipeline and the original layout.

The network reads lists of captions without padding. Its pipeline counts guidance from 0: pos + scale (pos - neg).
"""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    mask = told.get("mask")
    captions = list(told["tokens"]) if mask is None else [rows[kept] for rows, kept in zip(told["tokens"], mask)]
    out = net(list(x.unsqueeze(2)), (1000 - t) / 1000, captions, return_dict=False)[0]
    return -torch.stack(out).squeeze(2)


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    made, _ = pipe.encode_prompt(list(captions), "cpu", False, max_sequence_length=length)
    lengths = torch.tensor([len(each) for each in made])
    tokens = [torch.nn.functional.pad(each, (0, 0, 0, length - len(each))) for each in made]
    return {"tokens": torch.stack(tokens), "mask": torch.arange(length) < lengths[:, None]}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    made = {"prompt": PROMPT, "guidance_scale": scale - 1}
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


# Z-Image and its Turbo are what diffusers' defaults are
ORACLE = Oracle(
    forward,
    prompts,
    "convert_z_image_transformer_checkpoint_to_diffusers",
    released={"6B": ({}, 521)},
    drawn=Drawn(options),
    text_length=64,
)
