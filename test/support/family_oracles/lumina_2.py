"""Lumina Image 2.0: Lumina2Transformer2DModel, Lumina2Pipeline and the original layout."""

from __future__ import annotations

from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    """Have diffusers lay its sequences out as if one more caption of the batch were of full length, as training does.

    It makes them as long as the longest of a batch, which the host has to know. Sums over longer rows have another order.
    """
    tokens = told["tokens"]
    mask = told.get("mask", torch.ones(tokens.shape[:2], dtype=torch.bool))
    embed = net.rope_embedder.forward

    def padded(x: torch.Tensor, mask: torch.Tensor) -> tuple[Any, ...]:
        image, of_text, of_image, rope, lengths, sums = embed(x, mask)
        longest = tokens.shape[1] + image.shape[1]
        rope = torch.nn.functional.pad(rope, (0, 0, 0, longest - rope.shape[1]))
        return image, of_text, of_image, rope, lengths, [*sums, longest, 0]

    net.rope_embedder.forward = padded
    try:
        out = net(x, 1 - t / 1000, tokens, mask, return_dict=False)[0]
    finally:
        del net.rope_embedder.forward
    return -out


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    """No text is what the pipeline takes for no negative prompt; what stands behind a mask nobody reads, so ours is zeros."""
    tokens, masks = [], []
    for caption in captions:
        made = pipe.encode_prompt([caption], True, [caption], device="cpu", max_sequence_length=length)
        own, mask = made[:2] if caption else made[2:]
        tokens.append(own[0] * mask[0].unsqueeze(-1))
        masks.append(mask[0].bool())
    return {"tokens": torch.stack(tokens), "mask": torch.stack(masks)}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    made = {"prompt": PROMPT, "guidance_scale": scale}
    return made if negative is None else made | {"negative_prompt": [NEGATIVE]}


ORACLE = Oracle(
    forward,
    prompts,
    "convert_lumina2_to_diffusers",
    released={"2.0": ({"cap_feat_dim": 2304}, 459)},
    drawn=Drawn(options),
)
