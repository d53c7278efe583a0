"""Flux.1 (Black Forest Labs 2024): joint and single transformer blocks that learn a rectified flow.

dev is distilled from guidance, which it is told; schnell is not told any. Trained with guidance 1; samples take theirs
from `--g`, 3.5 in diffusers' pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch
from difftrain.models import passes
from difftrain.models.facts import Agree, Bound, FamilyOption, Lora, Shift, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

# rows that its relatives have too
SHARED_KEYS = """
x_embedder = img_in
context_embedder = txt_in
norm_out.linear = final_layer.adaLN_modulation.1 halves
proj_out = final_layer.linear
transformer_blocks.{}.attn.to_q + transformer_blocks.{}.attn.to_k + transformer_blocks.{}.attn.to_v = double_blocks.{}.img_attn.qkv
transformer_blocks.{}.attn.add_q_proj + transformer_blocks.{}.attn.add_k_proj + transformer_blocks.{}.attn.add_v_proj = double_blocks.{}.txt_attn.qkv
transformer_blocks.{}.attn.norm_q = double_blocks.{}.img_attn.norm.query_norm leaf=scale
transformer_blocks.{}.attn.norm_k = double_blocks.{}.img_attn.norm.key_norm leaf=scale
transformer_blocks.{}.attn.norm_added_q = double_blocks.{}.txt_attn.norm.query_norm leaf=scale
transformer_blocks.{}.attn.norm_added_k = double_blocks.{}.txt_attn.norm.key_norm leaf=scale
transformer_blocks.{}.attn.to_out.0 = double_blocks.{}.img_attn.proj
transformer_blocks.{}.attn.to_add_out = double_blocks.{}.txt_attn.proj
single_transformer_blocks.{}.attn.norm_q = single_blocks.{}.norm.query_norm leaf=scale
single_transformer_blocks.{}.attn.norm_k = single_blocks.{}.norm.key_norm leaf=scale
"""


class Flux(ModelFamily):
    """The facts of a Flux model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "flux"
    modelspec = "flux-1-dev"
    texts: tuple[Text, ...] = (
        Text("text_encoder", "tokenizer", "clip", 77, hidden=None, pooled="pooler_output"),
        Text("text_encoder_2", "tokenizer_2", "t5", 512),
    )
    blocks: tuple[str, ...] = ("transformer_blocks", "single_transformer_blocks")
    shift = Shift(dynamic=(256, 4096, 0.5, 1.15))
    zero = r"(norm1|norm1_context|norm_out|\.norm)\.linear\.|^proj_out\."
    vae_scales = MappingProxyType({"scaling_factor": 0.3611, "shift_factor": 0.1159, "norm_num_groups": 32})
    options: tuple[FamilyOption, ...] = (
        FamilyOption("model.guidance", "the guidance value of a guidance-distilled model"),
    )
    lora = Lora((
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff.net.0.proj",
        "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out",
    ))  # fmt: skip
    agree: tuple[Agree | Bound, ...] = (
        Agree("transformer.in_channels", lambda s: 4 * s["vae"]["latent_channels"], "a token is 2x2 latent pixels"),
        Agree("transformer.joint_attention_dim", lambda s: s["text_encoder_2"]["d_model"], "text_encoder_2's d_model"),
        Agree("transformer.pooled_projection_dim", lambda s: s["text_encoder"]["hidden_size"], "text_encoder's hidden_size"),
        Agree("transformer.patch_size", lambda s: 1, "its tokens are packed before they enter"),
        Agree("transformer.attention_head_dim", lambda s: sum(s["transformer"]["axes_dims_rope"]), "axes_dims_rope in all"),
    )  # fmt: skip

    def conditions(self, made: dict[str, Tensor], batch: Batch | None = None) -> dict[str, Tensor]:
        """Return tokens (B, L, J) and pooled (B, P)."""
        return {"tokens": made["hidden_2"], "pooled": made["pooled_1"]}

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, D), temb (B, D)."""
        image = net.x_embedder(passes.pack(x_t, self.patch))
        text = net.context_embedder(conditions["tokens"])
        temb = net.time_text_embed(t, *self._guidance(net, t, conditions), conditions["pooled"])
        size = (x_t.shape[-2] // self.patch, x_t.shape[-1] // self.patch)
        return Tokens(image, text, temb, size, rope=self.rope(net, (size,), text.shape[1], x_t.device))

    def _guidance(self, net: Any, t: Tensor, conditions: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return 1000 times the guidance that a distilled transformer is told; schnell is told none."""
        if not net.config.guidance_embeds:
            return ()
        guidance = conditions.get("guidance")
        return (torch.full_like(t, 1000.0 * self.cfg.model.guidance) if guidance is None else 1000.0 * guidance,)

    def guided(self, conditions: dict[str, Tensor], guidance: float | None) -> dict[str, Tensor]:
        """Tell a distilled transformer the guidance of a drawn picture, else that of the training."""
        if guidance is None:
            return conditions
        tokens = conditions["tokens"]
        return conditions | {"guidance": torch.full((len(tokens),), guidance, device=tokens.device)}

    def remarks(self) -> list[str]:
        """Say where a guidance is asked for that no weights are there to take."""
        embeds = self.source.complete(self.denoiser)["guidance_embeds"]
        return (
            []
            if self.cfg.model.guidance == 1.0 or embeds
            else ["guidance has no effect: this transformer has no guidance input"]
        )

    def rope(
        self, net: Any, sizes: tuple[tuple[int, int], ...], length: int, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return the rotary tables of text and images, made in fp64."""
        return self.rotary((sizes, length), device, lambda: net.pos_embed(self.places(sizes, length)))

    def places(self, sizes: tuple[tuple[int, int], ...], length: int) -> Tensor:
        """Say where tokens of text and images lie: number of the image, row and column, (L + N, 3)."""
        grids = [passes.grid(*size, first=number) for number, size in enumerate(sizes)]
        return passes.behind_text(torch.cat(grids), length)

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block of either kind: both take and return text and image apart."""
        text, image = block(tokens.image, tokens.text, tokens.temb, tokens.rope)
        return replace(tokens, text=text, image=image)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, H, W)."""
        return passes.unpack(net.proj_out(net.norm_out(tokens.image, tokens.temb)), self.patch, tokens.size)

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        return shared_sizes(shapes) | {
            "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
            "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        }

    keys = (
        SHARED_KEYS
        + """
time_text_embed.timestep_embedder.linear_1 = time_in.in_layer
time_text_embed.timestep_embedder.linear_2 = time_in.out_layer
time_text_embed.text_embedder.linear_1 = vector_in.in_layer
time_text_embed.text_embedder.linear_2 = vector_in.out_layer
time_text_embed.guidance_embedder.linear_1 = guidance_in.in_layer
time_text_embed.guidance_embedder.linear_2 = guidance_in.out_layer
transformer_blocks.{}.norm1.linear = double_blocks.{}.img_mod.lin
transformer_blocks.{}.norm1_context.linear = double_blocks.{}.txt_mod.lin
transformer_blocks.{}.ff.net.0.proj = double_blocks.{}.img_mlp.0
transformer_blocks.{}.ff.net.2 = double_blocks.{}.img_mlp.2
transformer_blocks.{}.ff_context.net.0.proj = double_blocks.{}.txt_mlp.0
transformer_blocks.{}.ff_context.net.2 = double_blocks.{}.txt_mlp.2
single_transformer_blocks.{}.norm.linear = single_blocks.{}.modulation.lin
single_transformer_blocks.{}.attn.to_q + single_transformer_blocks.{}.attn.to_k + single_transformer_blocks.{}.attn.to_v + single_transformer_blocks.{}.proj_mlp = single_blocks.{}.linear1
single_transformer_blocks.{}.proj_out = single_blocks.{}.linear2
"""
    )


def shared_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Read the sizes that Flux and its relatives have off tensors of the original layout. Raises KeyError."""
    head = shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    return {
        "in_channels": shapes["img_in.weight"][1],
        "num_layers": count(shapes, r"double_blocks\.(\d+)\."),
        "num_single_layers": count(shapes, r"single_blocks\.(\d+)\."),
        "attention_head_dim": head,
        "num_attention_heads": shapes["img_in.weight"][0] // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "axes_dims_rope": [head // 8, 7 * head // 16, 7 * head // 16],
    }
