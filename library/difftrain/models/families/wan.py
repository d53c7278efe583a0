"""Wan 2.1 (Alibaba 2025, arXiv:2503.20314): a transformer over clips that reads T5's states across; a picture is a clip of one frame.

Text to video. The table also names what image to video (wan_i2v.py) has beside: the picture's embedding, its keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.facts import Agree, Lora, Shift, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count, heads

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = 128  # channels of a head in every release


class Wan(ModelFamily):
    """The facts of a Wan model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "wan"
    modelspec = "wan-2.1-t2v"
    texts = (Text("text_encoder", "tokenizer", "t5", 512, masked=True, mends=True),)
    blocks = ("blocks",)
    shift = Shift(3.0, walks=False)  # of 480p; 720p is drawn with 5
    sequence = ("attn1",)
    zero = r"^proj_out\."
    leaving = r"norm_out\b|proj_out\b|scale_shift_table$"
    lora = Lora(("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"))
    agree: tuple[Agree, ...] = (
        Agree("transformer.in_channels", lambda s: s["vae"]["z_dim"], "the VAE's z_dim"),
        Agree("transformer.out_channels", lambda s: s["vae"]["z_dim"], "the VAE's z_dim"),
        Agree("transformer.text_dim", lambda s: s["text_encoder"]["d_model"], "text_encoder's d_model"),
        Agree("transformer.patch_size", lambda s: [1, 2, 2], "a token is 2x2 latent pixels of one frame"),
    )

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, F, H, W), t (B,) or (B, F) in 0..1000 -> image (B, N, D), text (B, L, D), temb
        (B, [N,] 6, D).
        """
        image = net.patch_embedding(self.entering(x_t, conditions))
        size = tuple(image.shape[2:])
        image = image.flatten(2).transpose(1, 2).contiguous()
        count = None
        if t.ndim == 2:  # every token has the time of its frame
            t, count = t.repeat_interleave(size[1] * size[2], dim=1).flatten(), image.shape[1]
        contexts = self.contexts(conditions)
        time, modulation, text, seen = net.condition_embedder(t, *contexts, timestep_seq_len=count)
        text = text if seen is None else torch.cat((seen, text), dim=1)
        rope = self.rope(net, x_t, size, x_t.device)
        return Tokens(image, text, modulation.unflatten(-1, (6, -1)), size, rope=rope, more={"time": time})

    def entering(self, x_t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Return what is made tokens of."""
        return x_t

    def contexts(self, conditions: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return what blocks attend to."""
        return (conditions["tokens"],)

    def rope(self, net: Any, x_t: Tensor, size: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Return the rotary tables of the clip's tokens, real-valued."""
        return self.rotary(size, device, lambda: net.rope(x_t))

    def timed(self, tokens: Tokens) -> bool:
        """Tell whether every token has a time of its own."""
        return tokens.temb.ndim == 4

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block; text stays as it entered."""
        return replace(tokens, image=block(tokens.image, tokens.text, tokens.temb, tokens.rope))

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, F, H, W)."""
        time = tokens.more["time"] if tokens.more["time"].ndim == 3 else tokens.more["time"].unsqueeze(1)
        shift, scale = (part.squeeze(2) for part in (net.scale_shift_table + time.unsqueeze(2)).chunk(2, dim=2))
        image = (net.norm_out(tokens.image.float()) * (1 + scale) + shift).type_as(tokens.image)
        patches = net.proj_out(image).unflatten(2, (*net.config.patch_size, -1)).unflatten(1, tokens.size)
        return (
            patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        )  # (B, C, F, p, h, p, ...)

    def largest_side(self) -> int:
        """Return the longest side in pixels that there are positions for."""
        return int(self.token * self.source.complete(self.denoiser)["rope_max_seq_len"])

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export: it draws clips unless it is told one frame."""
        return '"a red cat", num_frames=1, output_type="pil"'

    @classmethod
    def infer(cls, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        if "img_emb.proj.0.weight" in shapes:
            raise KeyError("a transformer that is shown no image")
        return cls.sizes_of(shapes)

    @staticmethod
    def sizes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the sizes that every Wan has. Raises KeyError."""
        width, channels, *patch = shapes["patch_embedding.weight"]
        return {
            "patch_size": patch,
            **heads(width, _HEAD),
            "in_channels": channels,
            "out_channels": shapes["head.head.weight"][0] // (patch[0] * patch[1] * patch[2]),
            "text_dim": shapes["text_embedding.0.weight"][1],
            "freq_dim": shapes["time_embedding.0.weight"][1],
            "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
            "num_layers": count(shapes, r"blocks\.(\d+)\."),
        }

    keys = """
patch_embedding = patch_embedding
condition_embedder.time_embedder.linear_1 = time_embedding.0
condition_embedder.time_embedder.linear_2 = time_embedding.2
condition_embedder.text_embedder.linear_1 = text_embedding.0
condition_embedder.text_embedder.linear_2 = text_embedding.2
condition_embedder.time_proj = time_projection.1
condition_embedder.image_embedder.pos_embed = img_emb.emb_pos
condition_embedder.image_embedder.norm1 = img_emb.proj.0
condition_embedder.image_embedder.ff.net.0.proj = img_emb.proj.1
condition_embedder.image_embedder.ff.net.2 = img_emb.proj.3
condition_embedder.image_embedder.norm2 = img_emb.proj.4
scale_shift_table = head.modulation
proj_out = head.head
blocks.{}.attn1.to_q = blocks.{}.self_attn.q
blocks.{}.attn1.to_k = blocks.{}.self_attn.k
blocks.{}.attn1.to_v = blocks.{}.self_attn.v
blocks.{}.attn1.to_out.0 = blocks.{}.self_attn.o
blocks.{}.attn1.norm_q = blocks.{}.self_attn.norm_q
blocks.{}.attn1.norm_k = blocks.{}.self_attn.norm_k
blocks.{}.attn2.to_q = blocks.{}.cross_attn.q
blocks.{}.attn2.to_k = blocks.{}.cross_attn.k
blocks.{}.attn2.to_v = blocks.{}.cross_attn.v
blocks.{}.attn2.to_out.0 = blocks.{}.cross_attn.o
blocks.{}.attn2.norm_q = blocks.{}.cross_attn.norm_q
blocks.{}.attn2.norm_k = blocks.{}.cross_attn.norm_k
blocks.{}.attn2.add_k_proj = blocks.{}.cross_attn.k_img
blocks.{}.attn2.add_v_proj = blocks.{}.cross_attn.v_img
blocks.{}.attn2.norm_added_k = blocks.{}.cross_attn.norm_k_img
blocks.{}.norm2 = blocks.{}.norm3
blocks.{}.ffn.net.0.proj = blocks.{}.ffn.0
blocks.{}.ffn.net.2 = blocks.{}.ffn.2
blocks.{}.scale_shift_table = blocks.{}.modulation
"""
