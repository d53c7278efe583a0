"""Lumina Image 2.0 (Alpha-VLLM 2025, arXiv:2503.21758): text and image refined apart, then one stream of both.

A text token stands at its number on the first axis of positions; all of the image at the caption's end, in rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from difftrain.models.facts import Agree, Bound, Shift, Sizes, Text
from difftrain.models.one_stream import OneStreamFamily
from difftrain.models.passes import Tokens, grid, laid, pack_channels_last, unpack_channels_last

if TYPE_CHECKING:
    from torch import Tensor

# before a caption; neither a negative prompt nor a caption that was dropped has it
TEMPLATE = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based on "
    "textual prompts or user prompts. <Prompt Start> {}"
)
_LENGTH = 256


def _head(s: Sizes) -> int:
    return int(s["transformer"]["hidden_size"] // s["transformer"]["num_attention_heads"])


class Lumina2(OneStreamFamily):
    """The facts of a Lumina Image 2.0 model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "lumina_2"
    modelspec = "lumina-2"
    texts = (
        Text("text_encoder", "tokenizer", "llm", _LENGTH, hidden=-2, template=TEMPLATE, bare="{}", masked=True, passes_mask=True),
    )  # fmt: skip
    shift = Shift(6.0)
    agree = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.cap_feat_dim", lambda s: s["text_encoder"]["hidden_size"], "text_encoder's hidden_size"),
        Agree("transformer.patch_size", lambda s: 2, "a token is 2x2 latent pixels"),
        Bound(
            "transformer.axes_dim_rope",
            lambda s: f"is {axes}, in all {sum(axes)}" if sum(axes := s["transformer"]["axes_dim_rope"]) != _head(s) else "",
            "hidden_size / num_attention_heads in all",
        ),
        Bound(
            "transformer.axes_lens",
            lambda s: f"is {most}" if (most := s["transformer"]["axes_lens"])[0] <= _LENGTH else "",
            f"the first is more than the {_LENGTH} tokens of a caption",
        ),
    )  # fmt: skip

    # ------------------------------------------------------------------ the pass

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, D), temb (B, D)."""
        temb, text = net.time_caption_embed(x_t, 1.0 - t / 1000.0, conditions["tokens"])
        size = (x_t.shape[-2] // self.patch, x_t.shape[-1] // self.patch)
        image = net.x_embedder(pack_channels_last(x_t, self.patch))
        return Tokens(image, text, temb, size, more=self._places(net, self.caption_mask(text, conditions), size))

    def _places(self, net: Any, mask: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        """Lay out captions and images, and say what refines them. Shapes: mask (B, L)."""
        lengths = (mask.shape[1], size[0] * size[1])

        def cells() -> Tensor:
            return torch.cat((F.pad(torch.arange(lengths[0]).unsqueeze(-1), (0, 2)), grid(*size)))

        moved = F.pad(mask.sum(dim=1, keepdim=True).expand(-1, lengths[1]), (lengths[0], 0))
        is_token = F.pad(mask, (0, lengths[1]), value=True)
        more, (text, image) = self.lay_out(
            net, is_token, self.cells((size, lengths), cells, mask.device), moved, lengths
        )
        return {**more, "mask": mask, "text": text, "image": image}

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block: of those that refine text or image alone, or of those over both."""
        assert tokens.text is not None
        more = tokens.more
        if not block.modulation:
            return replace(tokens, text=block(tokens.text, more["mask"], more["text"].unbind(0)))
        if tokens.member == "noise_refiner":
            return replace(tokens, image=block(tokens.image, None, more["image"].unbind(0), tokens.temb))
        text, image = self.over_all(block, (tokens.text, tokens.image), more, tokens.temb)
        return replace(tokens, text=text, image=image)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, H, W): the network says x0 - e, channels lie fastest in a token."""
        assert tokens.text is not None
        both = torch.cat((tokens.text, tokens.image), dim=1)
        both = net.norm_out(laid(both, tokens.more["order"]), tokens.temb)
        patches = laid(both, tokens.more["back"])[:, -tokens.image.shape[1] :]
        return -unpack_channels_last(patches, self.patch, tokens.size)

    def with_guidance(self, without: Tensor, with_text: Tensor, scale: float) -> Tensor:
        """Guide, and keep the length of every row of what is predicted with text, as the pipeline does."""
        guided = super().with_guidance(without, with_text, scale)
        return guided * (with_text.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    # ------------------------------------------------------------------ the original layout

    def largest_side(self) -> int:
        """Return the longest side in pixels that there are positions for."""
        return int(self.token * min(self.source.complete(self.denoiser)["axes_lens"][1:]))

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        made = OneStreamFamily.sizes(shapes, "x_embedder.weight", "layers.0.attention.q_norm.weight")
        shapes["layers.0.adaLN_modulation.1.weight"]  # one layer further than in what else has these names
        width, head = made["hidden_size"], made["hidden_size"] // made["num_attention_heads"]
        return {
            **made,
            "num_kv_heads": (shapes["layers.0.attention.qkv.weight"][0] - width) // 2 // head,
            "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        }

    keys = """
x_embedder = x_embedder
time_caption_embed.timestep_embedder.linear_1 = t_embedder.mlp.0
time_caption_embed.timestep_embedder.linear_2 = t_embedder.mlp.2
time_caption_embed.caption_embedder.0 = cap_embedder.0
time_caption_embed.caption_embedder.1 = cap_embedder.1
norm_out.linear_1 = final_layer.adaLN_modulation.1
norm_out.linear_2 = final_layer.linear
""" + "".join(
        line.replace("@", member)
        for member in ("context_refiner", "noise_refiner", "layers")
        for line in (
            "@.{}.attn.to_q + @.{}.attn.to_k + @.{}.attn.to_v = @.{}.attention.qkv\n",
            "@.{}.attn.to_out.0 = @.{}.attention.out\n",
            "@.{}.attn.norm_q = @.{}.attention.q_norm\n@.{}.attn.norm_k = @.{}.attention.k_norm\n",
            "@.{}.feed_forward.linear_1 = @.{}.feed_forward.w1\n",
            "@.{}.feed_forward.linear_2 = @.{}.feed_forward.w2\n",
            "@.{}.feed_forward.linear_3 = @.{}.feed_forward.w3\n",
            "@.{}.norm1 = @.{}.attention_norm1\n" if member == "context_refiner" else "@.{}.norm1.norm = @.{}.attention_norm1\n",
            "@.{}.norm1.linear = @.{}.adaLN_modulation.1\n",
            "@.{}.norm2 = @.{}.attention_norm2\n",
            "@.{}.ffn_norm1 = @.{}.ffn_norm1\n@.{}.ffn_norm2 = @.{}.ffn_norm2\n",
        )
    )  # fmt: skip
