"""Cosmos-Predict2, text to image (NVIDIA 2025): a transformer over clips that reads T5's states across; a picture is one frame.

The releases were trained in the terms of Karras et al. 2022: x = x0 + sigma e. With t = sigma / (1 + sigma) what the network
takes, x / (1 + sigma), is x_t of a flow, and what it predicts is the velocity e - x0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.facts import Agree, Lora, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

# sigmas that the pipeline draws through, whatever its scheduler was stored with, and whatever shift training has
LEVELS = MappingProxyType({"sigma_max": 80.0, "sigma_min": 0.002})
_ROPE_SCALE = [1.0, 4.0, 4.0]  # of both releases: no tensor says it
_NEEDS = "\nThe pipeline needs the packages `cosmos_guardrail` and `torchvision`.\n"


class CosmosPredict2(ModelFamily):
    """The facts of a Cosmos-Predict2 model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "cosmos_predict2"
    modelspec = "cosmos-predict2"
    texts = (Text("text_encoder", "tokenizer", "t5", 512, masked=True),)
    blocks = ("transformer_blocks",)
    fps: float | None = None  # that positions in time are counted by
    zero = r"norm[123]\.linear_2\.|^norm_out\.linear_2\.|^proj_out\."
    lora = Lora(("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"))
    agree: tuple[Agree, ...] = (
        Agree("transformer.in_channels", lambda s: s["vae"]["z_dim"], "the VAE's z_dim"),
        Agree("transformer.out_channels", lambda s: s["vae"]["z_dim"], "the VAE's z_dim"),
        Agree("transformer.text_embed_dim", lambda s: s["text_encoder"]["d_model"], "text_encoder's d_model"),
        Agree("transformer.patch_size", lambda s: [1, 2, 2], "a token is 2x2 latent pixels of one frame"),
        Agree("transformer.extra_pos_embed_type", lambda s: None, "positions are rotary alone; others are Cosmos 1's"),
        Agree("transformer.use_crossattn_projection", lambda s: False, "with a projection it is Cosmos-Predict2.5"),
        Agree(
            "transformer.img_context_dim_in", lambda s: None, "with pictures in its context it is Cosmos-Transfer2.5"
        ),
    )

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, F, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, J), temb (B, 3 D).

        Where one more channel marks padding, there is none.
        """
        channels = (x_t, torch.zeros_like(x_t[:, :1])) if net.config.concat_padding_mask else (x_t,)
        image = net.patch_embed(torch.cat(channels, dim=1))  # (B, F, h, w, D)
        size = tuple(image.shape[1:4])
        image = image.flatten(1, 3)
        temb, time = net.time_embed(image, self.level(t))
        rope = self.rope(net, tuple(x_t.shape[2:]), x_t.device)
        return Tokens(image, conditions["tokens"], temb, size, rope=rope, more={"time": time})

    def level(self, t: Tensor) -> Tensor:
        """Return what the network is told of a time in 0..1000."""
        return t / 1000.0

    def rope(self, net: Any, latent: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Return the rotary tables of latents of this size."""
        fps = (self.cfg.data.framerate or self.fps) if self.fps else None
        return self.rotary(latent, device, lambda: net.rope(torch.empty((1, 1, *latent)), fps=fps))

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block; text stays as it entered."""
        return replace(tokens, image=block(tokens.image, tokens.text, tokens.more["time"], tokens.temb, tokens.rope))

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, F, H, W): channels lie fastest in a token."""
        patches = net.proj_out(net.norm_out(tokens.image, tokens.more["time"], tokens.temb))
        patches = patches.unflatten(2, (self.patch, self.patch, -1)).unflatten(1, tokens.size)  # (B, F, h, w, p, p, C)
        return patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)

    def scheduler(self) -> Any:
        """Make the scheduler, which says the levels of noise that pictures are drawn through."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler: Any = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
        scheduler.register_to_config(**LEVELS)
        return scheduler

    def largest_side(self) -> int:
        """Return the longest side in pixels that there are positions for."""
        return int(self.vae.factor * min(self.source.complete(self.denoiser)["max_size"][1:]))

    def card(self, dtype: str) -> str:
        """Write the page beside an export. dtype: "torch.float16", of its weights."""
        return super().card(dtype) + _NEEDS

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        width, entering = shapes["x_embedder.proj.1.weight"]
        head = shapes["blocks.0.self_attn.q_norm.weight"][0]
        return {
            "in_channels": entering // 4 - 1,
            "out_channels": shapes["final_layer.linear.weight"][0] // 4,
            "num_attention_heads": width // head,
            "attention_head_dim": head,
            "num_layers": count(shapes, r"blocks\.(\d+)\."),
            "mlp_ratio": shapes["blocks.0.mlp.layer1.weight"][0] / width,
            "text_embed_dim": shapes["blocks.0.cross_attn.k_proj.weight"][1],
            "adaln_lora_dim": shapes["blocks.0.adaln_modulation_self_attn.1.weight"][0],
            "rope_scale": _ROPE_SCALE,
            "extra_pos_embed_type": None,
        }

    keys = """
patch_embed.proj = x_embedder.proj.1
time_embed.t_embedder.linear_1 = t_embedder.1.linear_1
time_embed.t_embedder.linear_2 = t_embedder.1.linear_2
time_embed.norm = t_embedding_norm
norm_out.linear_1 = final_layer.adaln_modulation.1
norm_out.linear_2 = final_layer.adaln_modulation.2
proj_out = final_layer.linear
transformer_blocks.{}.norm1.linear_1 = blocks.{}.adaln_modulation_self_attn.1
transformer_blocks.{}.norm1.linear_2 = blocks.{}.adaln_modulation_self_attn.2
transformer_blocks.{}.norm2.linear_1 = blocks.{}.adaln_modulation_cross_attn.1
transformer_blocks.{}.norm2.linear_2 = blocks.{}.adaln_modulation_cross_attn.2
transformer_blocks.{}.norm3.linear_1 = blocks.{}.adaln_modulation_mlp.1
transformer_blocks.{}.norm3.linear_2 = blocks.{}.adaln_modulation_mlp.2
transformer_blocks.{}.attn1.to_q = blocks.{}.self_attn.q_proj
transformer_blocks.{}.attn1.to_k = blocks.{}.self_attn.k_proj
transformer_blocks.{}.attn1.to_v = blocks.{}.self_attn.v_proj
transformer_blocks.{}.attn1.to_out.0 = blocks.{}.self_attn.output_proj
transformer_blocks.{}.attn1.norm_q = blocks.{}.self_attn.q_norm
transformer_blocks.{}.attn1.norm_k = blocks.{}.self_attn.k_norm
transformer_blocks.{}.attn2.to_q = blocks.{}.cross_attn.q_proj
transformer_blocks.{}.attn2.to_k = blocks.{}.cross_attn.k_proj
transformer_blocks.{}.attn2.to_v = blocks.{}.cross_attn.v_proj
transformer_blocks.{}.attn2.to_out.0 = blocks.{}.cross_attn.output_proj
transformer_blocks.{}.attn2.norm_q = blocks.{}.cross_attn.q_norm
transformer_blocks.{}.attn2.norm_k = blocks.{}.cross_attn.k_norm
transformer_blocks.{}.ff.net.0.proj = blocks.{}.mlp.layer1
transformer_blocks.{}.ff.net.2 = blocks.{}.mlp.layer2
"""
