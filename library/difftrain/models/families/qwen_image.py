"""Qwen-Image (Alibaba 2025, arXiv:2508.02324): picture and text in one stream, read by a language model that also sees.

Its rotary tables are complex in diffusers; here blocks are given the same numbers as real ones (device/rotary.py).
Guidance keeps the length of each token of the prediction with text, as the pipeline does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from difftrain.device.fused_layers import real_tables
from difftrain.models import passes
from difftrain.models.facts import Agree, Lora, Shift, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

RealTables = tuple["Tensor", "Tensor"]
# around a caption; its first 34 tokens say nothing of the picture and are cut off
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


class QwenImage(ModelFamily):
    """The facts of a Qwen-Image model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "qwen_image"
    modelspec = "qwen-image"
    texts = (
        Text(
            "text_encoder", "tokenizer", "llm", 1024, hidden=-1, template=TEMPLATE, drop=34, masked=True, passes_mask=True
        ),
    )  # fmt: skip
    blocks = ("transformer_blocks",)
    shift = Shift(dynamic=(256, 8192, 0.5, 0.9), terminal=0.02)
    zero = r"(img_mod|txt_mod)\.1\.|^norm_out\.linear\.|^proj_out\."
    unread = r"^transformer_blocks\.{last}\.(txt_mlp|attn\.to_add_out)\."  # text ends with the last block's attention
    silent = r"^transformer_blocks\.{last}\.attn\.(add_q_proj|norm_added_q)\."  # what it asks there, nothing reads
    lora = Lora((
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "img_mlp.net.0.proj",
        "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2", "img_mod.1", "txt_mod.1",
    ))  # fmt: skip
    agree = (
        Agree("transformer.in_channels", lambda s: 4 * s["vae"]["z_dim"], "a token is 2x2 latent pixels"),
        Agree("transformer.out_channels", lambda s: s["vae"]["z_dim"], "the VAE's z_dim"),
        Agree("transformer.patch_size", lambda s: 2, "a token is 2x2 latent pixels"),
        Agree(
            "transformer.joint_attention_dim", lambda s: s["text_encoder"]["text_config"]["hidden_size"],
            "the language model's hidden_size",
        ),
        Agree("transformer.attention_head_dim", lambda s: sum(s["transformer"]["axes_dims_rope"]), "axes_dims_rope in all"),
    )  # fmt: skip

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, 1, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, D), temb (B, D)."""
        image = net.img_in(passes.pack(x_t[:, :, 0], self.patch))
        text = net.txt_in(net.txt_norm(conditions["tokens"]))
        temb = net.time_text_embed(t / 1000.0, image)
        size = (1, x_t.shape[-2] // self.patch, x_t.shape[-1] // self.patch)
        rope = self.rope(net, (size,), text.shape[1], x_t.device)
        return Tokens(image, text, temb, size, rope=rope, more={"mask": conditions.get("mask")})

    def rope(
        self, net: Any, sizes: tuple[tuple[int, int, int], ...], length: int, device: torch.device
    ) -> tuple[RealTables, ...]:
        """Return the rotary tables of images and text."""

        def make() -> list[Tensor]:
            tables = net.pos_embed([list(sizes)], max_txt_seq_len=length, device=torch.device("cpu"))
            return [real for table in tables for real in real_tables(table)]

        cos, sin, text_cos, text_sin = self.rotary((sizes, length), device, make)
        return (cos, sin), (text_cos, text_sin)

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block, which takes and returns text and image apart."""
        text, image = block(tokens.image, tokens.text, tokens.more["mask"], tokens.temb, tokens.rope)
        return replace(tokens, text=text, image=image)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, 1, H, W)."""
        patches = net.proj_out(net.norm_out(tokens.image, tokens.temb))
        return passes.unpack(patches, self.patch, tokens.size).unsqueeze(2)

    def with_guidance(self, without: Tensor, with_text: Tensor, scale: float) -> Tensor:
        """Go beyond the prediction with text, and give each token the length that it has there."""
        beyond = super().with_guidance(without, with_text, scale)
        beyond, kept = (passes.pack(x[:, :, 0], self.patch) for x in (beyond, with_text))
        beyond = beyond * (kept.norm(dim=-1, keepdim=True) / beyond.norm(dim=-1, keepdim=True))
        size = (with_text.shape[-2] // self.patch, with_text.shape[-1] // self.patch)
        return passes.unpack(beyond, self.patch, size).unsqueeze(2)

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off its tensors, which are called alike in every layout. Raises KeyError."""
        width, channels = shapes["img_in.weight"]
        head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
        return {
            "in_channels": channels,
            "out_channels": shapes["proj_out.weight"][0] // 4,
            "num_layers": count(shapes, r"transformer_blocks\.(\d+)\."),
            "attention_head_dim": head,
            "num_attention_heads": width // head,
            "joint_attention_dim": shapes["txt_in.weight"][1],
            "axes_dims_rope": [head // 8, 7 * head // 16, 7 * head // 16],
        }
