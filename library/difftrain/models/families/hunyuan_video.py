"""HunyuanVideo (Tencent 2024, arXiv:2412.03603): joint and single blocks over a clip and a refined text; a picture is one frame.

Text to video. A distilled release is told a guidance. CLIP's vector of the caption goes into the modulations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch
from difftrain.models.facts import Agree, Lora, Shift, Text
from difftrain.models.families.flux import Flux
from difftrain.models.families.hunyuan_image import COMFY_LAYERS, or_all
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

# around a caption; its first 95 tokens say nothing of the clip and are cut off
TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)


class HunyuanVideo(Flux):
    """The facts of a HunyuanVideo model: a guidance is told as to Flux, and all else is its own."""

    name = "hunyuan_video"
    modelspec = "hunyuan-video"
    texts = (
        Text("text_encoder", "tokenizer", "llm", 256, hidden=-3, template=TEMPLATE, drop=95, masked=True, passes_mask=True),
        Text("text_encoder_2", "tokenizer_2", "clip", 77, hidden=None, pooled="pooler_output"),
    )  # fmt: skip
    shift = Shift(7.0)
    vae_scales = MappingProxyType({})
    lora = Lora(Flux.lora.targets, layers=COMFY_LAYERS)
    agree = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.patch_size", lambda s: 2, "a token is 2x2 latent pixels"),
        Agree("transformer.patch_size_t", lambda s: 1, "a token is of one latent frame"),
        Agree("transformer.text_embed_dim", lambda s: s["text_encoder"]["hidden_size"], "text_encoder's hidden_size"),
        Agree("transformer.pooled_projection_dim", lambda s: s["text_encoder_2"]["hidden_size"], "text_encoder_2's hidden_size"),
        Agree("transformer.attention_head_dim", lambda s: sum(s["transformer"]["rope_axes_dim"]), "rope_axes_dim in all"),
        Agree("transformer.image_condition_type", lambda s: None, "image to video is not built"),
    )  # fmt: skip

    def conditions(self, made: dict[str, Tensor], batch: Batch | None = None) -> dict[str, Tensor]:
        """Return tokens (B, L, J), what of them is text, and pooled (B, P)."""
        return {"tokens": made["hidden_1"], "mask": made["mask_1"], "pooled": made["pooled_2"]}

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, F, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, D), temb (B, D)."""
        guidance = next(iter(self._guidance(net, t, conditions)), None)
        temb, _ = net.time_text_embed(t, conditions["pooled"], guidance)
        image, mask = net.x_embedder(x_t), or_all(conditions, "mask", "tokens")
        text = net.context_embedder(conditions["tokens"], t, mask)
        mask = torch.nn.functional.pad(mask, (image.shape[1], 0), value=True)[:, None, None]
        latent = tuple(x_t.shape[2:])
        size = (latent[0], latent[1] // self.patch, latent[2] // self.patch)
        rope = self.rotary(latent, x_t.device, lambda: net.rope(torch.empty(1, 1, *latent)))
        return Tokens(image, text, temb, size, rope=rope, more={"mask": mask})

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block of either kind: both take and return image and text apart."""
        image, text = block(tokens.image, tokens.text, tokens.temb, tokens.more["mask"], tokens.rope)
        return replace(tokens, image=image, text=text)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, F, H, W): channels lie slowest in a token."""
        patches = net.proj_out(net.norm_out(tokens.image, tokens.temb))
        x = patches.unflatten(1, tokens.size).unflatten(4, (-1, self.patch, self.patch))  # (B, F, h, w, C, p, p)
        return x.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export: it draws clips unless it is told one frame."""
        return '"a red cat", num_frames=1, output_type="pil"'

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        head = shapes["double_blocks.0.img_attn_q_norm.weight"][0]
        width, channels = shapes["img_in.proj.weight"][:2]
        return {
            "in_channels": channels,
            "out_channels": shapes["final_layer.linear.weight"][0] // 4,
            "num_attention_heads": width // head,
            "attention_head_dim": head,
            "num_layers": count(shapes, r"double_blocks\.(\d+)\."),
            "num_single_layers": count(shapes, r"single_blocks\.(\d+)\."),
            "num_refiner_layers": count(shapes, r"txt_in\.individual_token_refiner\.blocks\.(\d+)\."),
            "mlp_ratio": shapes["double_blocks.0.img_mlp.fc1.weight"][0] / width,
            "guidance_embeds": "guidance_in.mlp.0.weight" in shapes,
            "text_embed_dim": shapes["txt_in.input_embedder.weight"][1],
            "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
            "rope_axes_dim": [head // 8, 7 * head // 16, 7 * head // 16],
        }

    keys = """
x_embedder.proj = img_in.proj
context_embedder.proj_in = txt_in.input_embedder
context_embedder.time_text_embed.timestep_embedder.linear_1 = txt_in.t_embedder.mlp.0
context_embedder.time_text_embed.timestep_embedder.linear_2 = txt_in.t_embedder.mlp.2
context_embedder.time_text_embed.text_embedder.linear_1 = txt_in.c_embedder.linear_1
context_embedder.time_text_embed.text_embedder.linear_2 = txt_in.c_embedder.linear_2
{refiner}.norm1 = {their_refiner}.norm1
{refiner}.norm2 = {their_refiner}.norm2
{refiner}.norm_out.linear = {their_refiner}.adaLN_modulation.1
{refiner}.attn.to_q + {refiner}.attn.to_k + {refiner}.attn.to_v = {their_refiner}.self_attn_qkv
{refiner}.attn.to_out.0 = {their_refiner}.self_attn_proj
{refiner}.ff.net.0.proj = {their_refiner}.mlp.fc1
{refiner}.ff.net.2 = {their_refiner}.mlp.fc2
time_text_embed.timestep_embedder.linear_1 = time_in.mlp.0
time_text_embed.timestep_embedder.linear_2 = time_in.mlp.2
time_text_embed.guidance_embedder.linear_1 = guidance_in.mlp.0
time_text_embed.guidance_embedder.linear_2 = guidance_in.mlp.2
time_text_embed.text_embedder.linear_1 = vector_in.in_layer
time_text_embed.text_embedder.linear_2 = vector_in.out_layer
norm_out.linear = final_layer.adaLN_modulation.1 halves
proj_out = final_layer.linear
{joint}.norm1.linear = {double}.img_mod.linear
{joint}.norm1_context.linear = {double}.txt_mod.linear
{joint}.attn.to_q + {joint}.attn.to_k + {joint}.attn.to_v = {double}.img_attn_qkv
{joint}.attn.add_q_proj + {joint}.attn.add_k_proj + {joint}.attn.add_v_proj = {double}.txt_attn_qkv
{joint}.attn.norm_q = {double}.img_attn_q_norm
{joint}.attn.norm_k = {double}.img_attn_k_norm
{joint}.attn.norm_added_q = {double}.txt_attn_q_norm
{joint}.attn.norm_added_k = {double}.txt_attn_k_norm
{joint}.attn.to_out.0 = {double}.img_attn_proj
{joint}.attn.to_add_out = {double}.txt_attn_proj
{joint}.ff.net.0.proj = {double}.img_mlp.fc1
{joint}.ff.net.2 = {double}.img_mlp.fc2
{joint}.ff_context.net.0.proj = {double}.txt_mlp.fc1
{joint}.ff_context.net.2 = {double}.txt_mlp.fc2
{one}.norm.linear = {single}.modulation.linear
{one}.attn.to_q + {one}.attn.to_k + {one}.attn.to_v + {one}.proj_mlp = {single}.linear1
{one}.attn.norm_q = {single}.q_norm
{one}.attn.norm_k = {single}.k_norm
{one}.proj_out = {single}.linear2
""".format(
        refiner="context_embedder.token_refiner.refiner_blocks.{}",
        their_refiner="txt_in.individual_token_refiner.blocks.{}",
        joint="transformer_blocks.{}",
        double="double_blocks.{}",
        one="single_transformer_blocks.{}",
        single="single_blocks.{}",
    )
