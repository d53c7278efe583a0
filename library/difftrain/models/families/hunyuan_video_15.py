"""HunyuanVideo-1.5 (Tencent 2025): joint blocks over a clip, a refined text, and the glyphs of what a caption quotes.

Text to video here; the same network goes on from a first frame in hunyuan_video_15_i2v.py. It takes channels for that
frame in both, zeros where none is shown. A release that takes long steps is told the time that a step goes to, which is
that of the step itself in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import UNTIL
from difftrain.models.facts import Agree, Lora, Text
from difftrain.models.families.hunyuan_image import COMFY_LAYERS, HunyuanImage, in_order, or_all
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

_GAP = " " * 8  # the pipeline's own: a line of its source goes on there
# around a caption; its first 108 tokens say nothing of the clip and are cut off
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant. Describe the video by detailing the following aspects: "
    f"{_GAP}1. The main content and theme of the video. "
    f"{_GAP}2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. "
    f"{_GAP}3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. "
    f"{_GAP}4. background environment, light, style and atmosphere. "
    f"{_GAP}5. camera angles, movements, and transitions used in the video.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
GUIDANCE = 6.0  # that the pipeline draws with


class HunyuanVideo15(HunyuanImage):
    """The facts of a HunyuanVideo-1.5 model: its texts are HunyuanImage's, and all else is its own."""

    name = "hunyuan_video_15"
    modelspec = "hunyuan-video-1.5"
    texts = (
        Text("text_encoder", "tokenizer", "llm", 1000, hidden=-3, template=TEMPLATE, blank=" ", drop=108, masked=True,
             marked=True, passes_mask=True),
        Text("text_encoder_2", "tokenizer_2", "t5", 256, masked=True, passes_mask=True, quoted=True, raw_bytes=True),
    )  # fmt: skip
    blocks = ("transformer_blocks",)
    # text ends with the last block's attention, and no image is seen
    unread = r"^image_embedder\.|^transformer_blocks\.{last}\.(ff_context|attn\.to_add_out)\."
    silent = r"^context_embedder_2\.|^transformer_blocks\.{last}\.attn\.(add_q_proj|norm_added_q)\."
    lora = Lora((
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff.net.0.proj",
        "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    ), layers="\n".join(row for row in COMFY_LAYERS.splitlines() if not row.startswith("single_")))  # fmt: skip
    options = ()  # no guidance is embedded
    agree: tuple[Agree, ...] = (
        Agree("transformer.in_channels", lambda s: 2 * s["vae"]["latent_channels"] + 1,
              "noise, the latents of a shown frame and a mask of them"),
        Agree("transformer.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.patch_size", lambda s: 1, "a token is one latent pixel"),
        Agree("transformer.patch_size_t", lambda s: 1, "a token is of one latent frame"),
        Agree("transformer.text_embed_dim", lambda s: s["text_encoder"]["hidden_size"], "text_encoder's hidden_size"),
        Agree("transformer.text_embed_2_dim", lambda s: s["text_encoder_2"]["d_model"], "text_encoder_2's d_model"),
        Agree("transformer.attention_head_dim", lambda s: sum(s["transformer"]["rope_axes_dim"]), "rope_axes_dim in all"),
    )  # fmt: skip

    def entering(self, x_t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Put what is shown of a clip behind the noisy one, channel by channel: nothing."""
        return torch.cat((x_t, torch.zeros_like(x_t), torch.zeros_like(x_t[:, :1])), dim=1)

    def seen(self, net: Any, conditions: dict[str, Tensor]) -> Tensor | None:
        """Return the tokens of an image that is seen, (B, S, D); None: none is."""
        return None

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, F, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, S + G + L, D), temb (B, D)."""
        temb = net.time_embed(t, timestep_r=conditions.get(UNTIL, t) if net.config.use_meanflow else None)
        image, mask = net.x_embedder(self.entering(x_t, conditions)), or_all(conditions, "mask", "tokens")

        # --- the text, which says of every token what it comes from
        text = _of_kind(net, net.context_embedder(conditions["tokens"], t, mask), 0)
        glyphs = _of_kind(net, net.context_embedder_2(conditions["glyphs"]), 1)
        text, mask = in_order(glyphs, or_all(conditions, "glyph_mask", "glyphs"), text, mask)
        if (seen := self.seen(net, conditions)) is not None:
            text = torch.cat((_of_kind(net, seen, 2), text), dim=1)
            mask = torch.nn.functional.pad(mask, (seen.shape[1], 0), value=True)
        size = tuple(x_t.shape[2:])
        return Tokens(image, text, temb, size, rope=self.rope_of(net, size, x_t.device), more={"mask": mask})

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block."""
        image, text = block(tokens.image, tokens.text, tokens.temb, tokens.more["mask"], tokens.rope)
        return replace(tokens, image=image, text=text)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, F, H, W)."""
        return net.proj_out(net.norm_out(tokens.image, tokens.temb)).unflatten(1, tokens.size).movedim(4, 1)

    def remarks(self) -> list[str]:
        """Say nothing of a guidance: none is embedded."""
        return []

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export: it draws clips unless it is told one frame."""
        return '"a red cat", num_frames=1, output_type="pil"'

    def guider(self) -> Any:
        """Make the guidance that the pipeline draws with."""
        from diffusers import ClassifierFreeGuidance

        return ClassifierFreeGuidance(guidance_scale=GUIDANCE)

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:  # type: ignore[override]
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        head = shapes["double_blocks.0.img_attn_q_norm.weight"][0]
        width, channels = shapes["img_in.proj.weight"][:2]
        return {
            "in_channels": channels,
            "out_channels": shapes["final_layer.linear.weight"][0],
            "num_attention_heads": width // head,
            "attention_head_dim": head,
            "num_layers": count(shapes, r"double_blocks\.(\d+)\."),
            "num_refiner_layers": count(shapes, r"txt_in\.individual_token_refiner\.blocks\.(\d+)\."),
            "mlp_ratio": shapes["double_blocks.0.img_mlp.fc1.weight"][0] / width,
            "text_embed_dim": shapes["txt_in.input_embedder.weight"][1],
            "text_embed_2_dim": shapes["byt5_in.fc1.weight"][1],
            "image_embed_dim": shapes["vision_in.proj.1.weight"][1],
            "rope_axes_dim": [head // 8, 7 * head // 16, 7 * head // 16],
            "use_meanflow": "time_r_in.mlp.0.weight" in shapes,
        }

    keys = """
x_embedder.proj = img_in.proj
time_embed.timestep_embedder.linear_1 = time_in.mlp.0
time_embed.timestep_embedder.linear_2 = time_in.mlp.2
time_embed.timestep_embedder_r.linear_1 = time_r_in.mlp.0
time_embed.timestep_embedder_r.linear_2 = time_r_in.mlp.2
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
context_embedder_2.norm = byt5_in.layernorm
context_embedder_2.linear_1 = byt5_in.fc1
context_embedder_2.linear_2 = byt5_in.fc2
context_embedder_2.linear_3 = byt5_in.fc3
image_embedder.norm_in = vision_in.proj.0
image_embedder.linear_1 = vision_in.proj.1
image_embedder.linear_2 = vision_in.proj.3
image_embedder.norm_out = vision_in.proj.4
cond_type_embed = cond_type_embedding
norm_out.linear = final_layer.adaLN_modulation.1 halves
proj_out = final_layer.linear
{joint}.norm1.linear = {double}.img_mod.linear
{joint}.norm1_context.linear = {double}.txt_mod.linear
{joint}.attn.to_q = {double}.img_attn_q
{joint}.attn.to_k = {double}.img_attn_k
{joint}.attn.to_v = {double}.img_attn_v
{joint}.attn.add_q_proj = {double}.txt_attn_q
{joint}.attn.add_k_proj = {double}.txt_attn_k
{joint}.attn.add_v_proj = {double}.txt_attn_v
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
""".format(
        refiner="context_embedder.token_refiner.refiner_blocks.{}",
        their_refiner="txt_in.individual_token_refiner.blocks.{}",
        joint="transformer_blocks.{}",
        double="double_blocks.{}",
    )


def _of_kind(net: Any, tokens: Tensor, kind: int) -> Tensor:
    """Add what says where tokens come from: 0 the text, 1 glyphs, 2 an image."""
    return tokens + net.cond_type_embed(torch.full_like(tokens[:, :, 0], kind, dtype=torch.long))
