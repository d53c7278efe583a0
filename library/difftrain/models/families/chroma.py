"""Chroma1 (Lodestone 2025): Flux's blocks, whose modulations a small network makes of the time and of each one's number.

It reads T5 alone, with its mask, and one token of padding behind the caption: the others are seen by nobody. Its guidance
input is 0 in every release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch
from difftrain.models import passes
from difftrain.models.facts import Agree, Lora, Shift, Text
from difftrain.models.families.flux import Flux, shared_sizes
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

_DOUBLE, _SINGLE, _LAST = 12, 3, 2  # vectors of modulation that a block of each list takes, and the last layer


class Chroma(Flux):
    """What differs from Flux: texts, mask and modulations."""

    name = "chroma"
    modelspec = "chroma"
    texts = (Text("text_encoder", "tokenizer", "t5", 512, masked=True, zeros=False, passes_mask=True),)
    shift = Shift()
    zero = r"^distilled_guidance_layer\.out_proj\.|^proj_out\."
    options = ()
    lora = Lora(Flux.lora.targets)
    agree = (
        Agree("transformer.in_channels", lambda s: 4 * s["vae"]["latent_channels"], "a token is 2x2 latent pixels"),
        Agree("transformer.joint_attention_dim", lambda s: s["text_encoder"]["d_model"], "text_encoder's d_model"),
        Agree("transformer.patch_size", lambda s: 1, "its tokens are packed before they enter"),
        Agree("transformer.attention_head_dim", lambda s: sum(s["transformer"]["axes_dims_rope"]), "axes_dims_rope in all"),
    )  # fmt: skip

    def conditions(self, made: dict[str, Tensor], batch: Batch | None = None) -> dict[str, Tensor]:
        """Return tokens (B, L, J) and which of them are seen, (B, L): a caption's, and one behind it."""
        mask = made["mask_1"]
        return {"tokens": made["hidden_1"], "mask": torch.cat((torch.ones_like(mask[:, :1]), mask[:, :-1]), dim=1)}

    def guided(self, conditions: dict[str, Tensor], guidance: float | None) -> dict[str, Tensor]:
        """Return the conditions as they are: it is told no guidance."""
        return conditions

    def remarks(self) -> list[str]:
        """Return nothing: there is no guidance to remark on."""
        return []

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, D), temb (B, M, D).

        temb: the modulations of all blocks in the order in which they run, then those of the last layer.
        """
        image = net.x_embedder(passes.pack(x_t, self.patch))
        text = net.context_embedder(conditions["tokens"])
        temb = net.distilled_guidance_layer(self._of_each_vector(net.time_text_embed, t))
        size = (x_t.shape[-2] // self.patch, x_t.shape[-1] // self.patch)
        mask = conditions.get("mask")
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(image.shape[:2])), dim=1)
        rope = self.rope(net, (size,), text.shape[1], x_t.device)
        return Tokens(image, text, _in_order(net, temb), size, rope=rope, more={"mask": mask})

    @staticmethod
    def _of_each_vector(embedder: Any, t: Tensor) -> Tensor:
        """Say for each vector of modulation time, guidance and its number: (B, M, 64), sines and cosines."""
        time, guidance = embedder.time_proj(t), embedder.guidance_proj(torch.zeros_like(t))
        numbers = embedder.mod_proj.to(t.device)
        both = torch.cat((time, guidance), dim=1).unsqueeze(1).expand(-1, len(numbers), -1)
        return torch.cat((both, numbers.expand(len(t), -1, -1)), dim=-1)

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block with the foremost modulations, and leave the others: a single one takes text and image together."""
        image, text, mask = tokens.image, tokens.text, tokens.more["mask"]
        assert text is not None
        if hasattr(block, "norm1_context"):
            temb, left = tokens.temb[:, :_DOUBLE], tokens.temb[:, _DOUBLE:]
            text, image = block(image, text, temb, tokens.rope, mask)
        else:
            temb, left = tokens.temb[:, :_SINGLE], tokens.temb[:, _SINGLE:]
            both = block(torch.cat((text, image), dim=1), temb, tokens.rope, mask)
            text, image = both.split((text.shape[1], image.shape[1]), dim=1)
        return replace(tokens, text=text, image=image, temb=left)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, H, W)."""
        return super().leave(net, replace(tokens, temb=tokens.temb[:, -_LAST:]))

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        hidden, channels = shapes["distilled_guidance_layer.in_proj.weight"]
        return shared_sizes(shapes) | {
            "approximator_num_channels": channels,
            "approximator_hidden_dim": hidden,
            "approximator_layers": count(shapes, r"distilled_guidance_layer\.layers\.(\d+)\."),
        }

    # Flux's rows, but those of what makes its modulations
    keys = (
        "\n".join(row for row in Flux.keys.splitlines() if "time_text_embed." not in row and ".linear = " not in row)
        + """
distilled_guidance_layer.in_proj = distilled_guidance_layer.in_proj
distilled_guidance_layer.out_proj = distilled_guidance_layer.out_proj
distilled_guidance_layer.layers.{}.linear_1 = distilled_guidance_layer.layers.{}.in_layer
distilled_guidance_layer.layers.{}.linear_2 = distilled_guidance_layer.layers.{}.out_layer
distilled_guidance_layer.norms.{} = distilled_guidance_layer.norms.{} leaf=scale
"""
    )


def _in_order(net: Any, temb: Tensor) -> Tensor:
    """Lay modulations in the order in which blocks take them. They come as the single blocks', then the image's and the
    text's halves of the joint ones', then those of the last layer. Shapes: (B, M, D) -> (B, M, D).
    """
    singles, doubles = _SINGLE * net.config.num_single_layers, _DOUBLE // 2 * net.config.num_layers
    single, image, text, last = temb.split((singles, doubles, doubles, _LAST), dim=1)
    halves = (half.unflatten(1, (-1, _DOUBLE // 2)) for half in (image, text))
    return torch.cat((torch.cat(tuple(halves), dim=2).flatten(1, 2), single, last), dim=1)
