"""The pass of SD3's transformer, block by block over diffusers' own modules, with what lies between blocks in hand.

Equal to SD3Transformer2DModel.forward, which hands out nothing but the velocity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.sd3.routing import chosen, returned

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.sd3.routing import Kept


@dataclass(frozen=True)
class Plan:
    """Say what of the pass is to be handed out, beside the velocity, and which picture tokens pass blocks by.

    text: numbers of blocks after which text tokens are, 0 = as they enter the first one. taps: those after which
    picture tokens are, as many as there are then. Blocks are counted from 1.
    """

    text: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()
    kept: Kept | None = None


@dataclass
class Outputs:
    """What a pass makes. Shapes: velocity (B, C, H, W); text (B, L, D) and picture tokens (B, N, D) by block.

    Where K tokens were kept for good the velocity is of their patches, one below another: (B, C, K p, p).
    """

    velocity: Tensor
    text_after: dict[int, Tensor] = field(default_factory=dict)
    picture_after: dict[int, Tensor] = field(default_factory=dict)


_NOTHING = Plan()


def run(
    transformer: Any, x_t: Tensor, timestep: Tensor, tokens: Tensor, pooled: Tensor, *, plan: Plan = _NOTHING
) -> Outputs:
    """Predict the velocity. Shapes: x_t (B, C, H, W), timestep (B,) in 0..1000, tokens (B, L, J), pooled (B, P)."""
    height, width = x_t.shape[-2:]
    picture = transformer.pos_embed(x_t).contiguous()
    time = transformer.time_text_embed(timestep, pooled)
    text = transformer.context_embedder(tokens)
    text_after = {0: text} if 0 in plan.text else {}
    picture_after, kept, waiting = {}, plan.kept, picture
    for number, block in enumerate(transformer.transformer_blocks, 1):
        if kept is not None and number == kept.span.first:
            waiting, picture = picture, chosen(picture, kept.places)
        text, picture = through(transformer, block, picture, text, time)
        if kept is not None and number == kept.span.last:
            picture = returned(waiting, kept.places, picture)
        if number in plan.text:
            text_after[number] = text
        if number in plan.taps:
            picture_after[number] = picture
    if kept is not None and kept.span.last is None:
        width = transformer.config.patch_size
        height = picture.shape[1] * width
    return Outputs(leave(transformer, picture, time, height, width), text_after, picture_after)


def through(
    transformer: Any, block: Any, picture: Tensor, text: Tensor, time: Tensor
) -> tuple[Any, Tensor]:  # text is None after a block that ends with the picture
    """Run one block, keeping its activations or computing them again; return text and picture tokens."""
    if torch.is_grad_enabled() and transformer.gradient_checkpointing:
        return transformer._gradient_checkpointing_func(block, picture, text, time)
    return block(hidden_states=picture, encoder_hidden_states=text, temb=time)


def leave(transformer: Any, picture: Tensor, time: Tensor, height: int, width: int) -> Tensor:
    """Turn picture tokens (B, N, D), all of them, into the velocity (B, C, H, W)."""
    patches = transformer.proj_out(transformer.norm_out(picture, time))
    p = transformer.config.patch_size
    patches = patches.unflatten(1, (height // p, width // p)).unflatten(-1, (p, p, -1))
    return patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
