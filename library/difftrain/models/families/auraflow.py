"""AuraFlow (fal 2024): four joint blocks, then single ones over text and image together, that learn a rectified flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models import passes
from difftrain.models.facts import Agree, Lora, Shift, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count, heads

if TYPE_CHECKING:
    from torch import Tensor

_HEAD = 256  # channels of a head in every release


class AuraFlow(ModelFamily):
    """The facts of an AuraFlow model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "auraflow"
    modelspec = "auraflow"
    texts = (Text("text_encoder", "tokenizer", "t5", 256, masked=True),)
    blocks = ("joint_transformer_blocks", "single_transformer_blocks")
    shift = Shift(1.73, walks=False)
    counts = ("pos_embed_max_size",)
    zero = r"(norm1|norm1_context|norm_out)\.linear\.|^proj_out\."
    vae_scales = MappingProxyType({"scaling_factor": 0.13025, "norm_num_groups": 32})
    lora = Lora(
        ("to_q", "to_k", "to_v", "to_out.0", "linear_1", "linear_2", "out_projection"), "transformer.", original=False
    )
    agree = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.joint_attention_dim", lambda s: s["text_encoder"]["d_model"], "text_encoder's d_model"),
        Agree("transformer.patch_size", lambda s: 2, "a token is 2x2 latent pixels"),
    )

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, 8 + L, D), temb (B, D)."""
        image = net.pos_embed(x_t)
        temb = net.time_step_proj(net.time_step_embed(t / 1000.0))
        text = net.context_embedder(conditions["tokens"])
        registers = net.register_tokens.to(text.dtype).repeat(len(text), 1, 1)
        size = (x_t.shape[-2] // self.patch, x_t.shape[-1] // self.patch)
        return Tokens(image, torch.cat((registers, text), dim=1), temb, size)

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block: a joint one takes text and image apart, a single one takes them one behind the other."""
        assert tokens.text is not None
        if hasattr(block, "norm1_context"):
            text, image = block(tokens.image, tokens.text, tokens.temb)
        else:
            both = block(torch.cat((tokens.text, tokens.image), dim=1), tokens.temb)
            text, image = both.split((tokens.text.shape[1], tokens.image.shape[1]), dim=1)
        return replace(tokens, text=text, image=image)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, H, W)."""
        patches = net.proj_out(net.norm_out(tokens.image, tokens.temb))
        return passes.unpack_channels_last(patches, self.patch, tokens.size)

    def largest_side(self) -> int:
        """Return the longest side in pixels that there are positions for."""
        return int(self.token * int(self.source.complete(self.denoiser)["pos_embed_max_size"] ** 0.5))

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        width, entering = shapes["init_x_linear.weight"]
        return {
            "patch_size": 2,
            "in_channels": entering // 4,
            "out_channels": shapes["final_linear.weight"][0] // 4,
            "num_mmdit_layers": count(shapes, r"double_layers\.(\d+)\."),
            "num_single_dit_layers": count(shapes, r"single_layers\.(\d+)\."),
            **heads(width, _HEAD),
            "joint_attention_dim": shapes["cond_seq_linear.weight"][1],
            "caption_projection_dim": width,
            "pos_embed_max_size": shapes["positional_encoding"][1],
        }

    keys = """
register_tokens = register_tokens
pos_embed.pos_embed = positional_encoding
pos_embed.proj = init_x_linear
context_embedder = cond_seq_linear
time_step_proj.linear_1 = t_embedder.mlp.0
time_step_proj.linear_2 = t_embedder.mlp.2
norm_out.linear = modF.1 halves
proj_out = final_linear
joint_transformer_blocks.{}.norm1.linear = double_layers.{}.modX.1
joint_transformer_blocks.{}.norm1_context.linear = double_layers.{}.modC.1
joint_transformer_blocks.{}.attn.to_q = double_layers.{}.attn.w2q
joint_transformer_blocks.{}.attn.to_k = double_layers.{}.attn.w2k
joint_transformer_blocks.{}.attn.to_v = double_layers.{}.attn.w2v
joint_transformer_blocks.{}.attn.to_out.0 = double_layers.{}.attn.w2o
joint_transformer_blocks.{}.attn.add_q_proj = double_layers.{}.attn.w1q
joint_transformer_blocks.{}.attn.add_k_proj = double_layers.{}.attn.w1k
joint_transformer_blocks.{}.attn.add_v_proj = double_layers.{}.attn.w1v
joint_transformer_blocks.{}.attn.to_add_out = double_layers.{}.attn.w1o
joint_transformer_blocks.{}.ff.linear_1 = double_layers.{}.mlpX.c_fc1
joint_transformer_blocks.{}.ff.linear_2 = double_layers.{}.mlpX.c_fc2
joint_transformer_blocks.{}.ff.out_projection = double_layers.{}.mlpX.c_proj
joint_transformer_blocks.{}.ff_context.linear_1 = double_layers.{}.mlpC.c_fc1
joint_transformer_blocks.{}.ff_context.linear_2 = double_layers.{}.mlpC.c_fc2
joint_transformer_blocks.{}.ff_context.out_projection = double_layers.{}.mlpC.c_proj
single_transformer_blocks.{}.norm1.linear = single_layers.{}.modCX.1
single_transformer_blocks.{}.attn.to_q = single_layers.{}.attn.w1q
single_transformer_blocks.{}.attn.to_k = single_layers.{}.attn.w1k
single_transformer_blocks.{}.attn.to_v = single_layers.{}.attn.w1v
single_transformer_blocks.{}.attn.to_out.0 = single_layers.{}.attn.w1o
single_transformer_blocks.{}.ff.linear_1 = single_layers.{}.mlp.c_fc1
single_transformer_blocks.{}.ff.linear_2 = single_layers.{}.mlp.c_fc2
single_transformer_blocks.{}.ff.out_projection = single_layers.{}.mlp.c_proj
"""
