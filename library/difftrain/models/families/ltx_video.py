"""LTX-Video (Lightricks 2024, arXiv:2501.00103): a transformer over strongly compressed clips that reads T5's states across.

A token is one latent pixel of one latent frame; a picture is a clip of one frame. Each token may have a time of its own,
which is how a clip goes on from a given first frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.facts import Agree, FamilyOption, Lora, Shift, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count, heads

if TYPE_CHECKING:
    from torch import Tensor

_WIDE = 4096  # of the release of 13 billion, whose heads have 128 channels; those of others have 64


class LtxVideo(ModelFamily):
    """The facts of an LTX-Video model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "ltx_video"
    modelspec = "ltx-video"
    # T5 reads without its mask, which the transformer is given
    texts = (
        Text("text_encoder", "tokenizer", "t5", 128, masked=True, reads_mask=False, zeros=False, passes_mask=True),
    )
    blocks = ("transformer_blocks",)
    patch = 1
    shift = Shift(dynamic=(1024, 4096, 0.95, 2.05), terminal=0.1)
    sequence = ("attn1",)
    zero = r"^proj_out\."
    leaving = r"norm_out\b|proj_out\b|scale_shift_table$"
    options = (FamilyOption("model.first_frame_conditioning_p", "how often a clip's first frame is given, not learnt"),)
    lora = Lora(("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"))
    agree = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.caption_channels", lambda s: s["text_encoder"]["d_model"], "text_encoder's d_model"),
        Agree(
            "transformer.cross_attention_dim",
            lambda s: s["transformer"]["num_attention_heads"] * s["transformer"]["attention_head_dim"],
            "the transformer's own width",
        ),
        Agree("transformer.patch_size", lambda s: 1, "a token is one latent pixel"),
        Agree("transformer.patch_size_t", lambda s: 1, "a token is one latent pixel of one frame"),
    )

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, F, H, W), t (B,) or (B, F) in 0..1000 -> image (B, N, D), text (B, L, D), temb
        (B, 1 or N, 6 D).
        """
        size = tuple(x_t.shape[2:])
        image = net.proj_in(x_t.flatten(2).transpose(1, 2))
        if t.ndim == 2:  # every token has the time of its frame
            t = t.repeat_interleave(size[1] * size[2], dim=1)
        temb, time = net.time_embed(t.flatten(), batch_size=len(image), hidden_dtype=image.dtype)
        temb, time = (made.view(len(image), -1, made.shape[-1]) for made in (temb, time))
        text, mask = net.caption_projection(conditions["tokens"]), conditions.get("mask")
        more = {"time": time, "mask": None if mask is None else mask[:, None]}
        return Tokens(image, text, temb, size, rope=self.rope(net, size, x_t.device), more=more)

    def rope(self, net: Any, size: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Return the rotary tables of a clip's tokens."""
        scale = (self.vae.frames / float(self.cfg.data.framerate or 25), self.vae.factor, self.vae.factor)
        return self.rotary(size, device, lambda: net.rope(torch.empty(1, 1), *size, rope_interpolation_scale=scale))

    def timed(self, tokens: Tokens) -> bool:
        """Tell whether every token has a time of its own."""
        return tokens.temb.shape[1] > 1

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block; text stays as it entered."""
        image = block(
            tokens.image, tokens.text, tokens.temb, image_rotary_emb=tokens.rope, encoder_attention_mask=tokens.more["mask"]
        )  # fmt: skip
        return replace(tokens, image=image)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, F, H, W)."""
        shift, scale = (net.scale_shift_table[None, None] + tokens.more["time"][:, :, None]).unbind(2)
        made = net.proj_out(net.norm_out(tokens.image) * (1 + scale) + shift)
        return made.transpose(1, 2).unflatten(2, tokens.size)

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export: it draws clips unless it is told one frame."""
        return '"a red cat", num_frames=1, output_type="pil"'

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        width, channels = shapes["patchify_proj.weight"]
        return {
            "in_channels": channels,
            "out_channels": shapes["proj_out.weight"][0],
            **heads(width, 128 if width >= _WIDE else 64),
            "cross_attention_dim": shapes["transformer_blocks.0.attn2.to_k.weight"][1],
            "num_layers": count(shapes, r"transformer_blocks\.(\d+)\."),
            "caption_channels": shapes["caption_projection.linear_1.weight"][1],
        }

    keys = """
proj_in = patchify_proj
time_embed.emb.timestep_embedder.linear_1 = adaln_single.emb.timestep_embedder.linear_1
time_embed.emb.timestep_embedder.linear_2 = adaln_single.emb.timestep_embedder.linear_2
time_embed.linear = adaln_single.linear
caption_projection.linear_1 = caption_projection.linear_1
caption_projection.linear_2 = caption_projection.linear_2
scale_shift_table = scale_shift_table
proj_out = proj_out
transformer_blocks.{}.scale_shift_table = transformer_blocks.{}.scale_shift_table
transformer_blocks.{}.ff.net.0.proj = transformer_blocks.{}.ff.net.0.proj
transformer_blocks.{}.ff.net.2 = transformer_blocks.{}.ff.net.2
""" + "\n".join(
        f"transformer_blocks.{{}}.{attn}.{ours} = transformer_blocks.{{}}.{attn}.{theirs}"
        for attn in ("attn1", "attn2")
        for ours, theirs in (
            ("to_q", "to_q"), ("to_k", "to_k"), ("to_v", "to_v"), ("to_out.0", "to_out.0"), ("norm_q", "q_norm"),
            ("norm_k", "k_norm"),
        )
    )  # fmt: skip
