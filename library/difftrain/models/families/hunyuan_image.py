"""HunyuanImage 2.1 (Tencent 2025): joint and single blocks over a refined text, and over the glyphs of what a caption quotes.

The distilled release is told a guidance, and the time that a step goes to, which is that of the step itself in training:
there the mean of the velocity over a step is the velocity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import UNTIL
from difftrain.models.facts import Agree, Lora, Shift, Text
from difftrain.models.families.flux import Flux
from difftrain.models.passes import Tokens

if TYPE_CHECKING:
    from torch import Tensor


# around a caption; its first 34 tokens say nothing of the picture and are cut off
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>"
)

# layers that adapters go to, as ComfyUI names them: it runs this transformer with the blocks of its HunyuanVideo
COMFY_LAYERS = """
transformer_blocks.{}.attn.to_q + transformer_blocks.{}.attn.to_k + transformer_blocks.{}.attn.to_v = double_blocks.{}.img_attn.qkv
transformer_blocks.{}.attn.add_q_proj + transformer_blocks.{}.attn.add_k_proj + transformer_blocks.{}.attn.add_v_proj = double_blocks.{}.txt_attn.qkv
transformer_blocks.{}.attn.to_out.0 = double_blocks.{}.img_attn.proj
transformer_blocks.{}.attn.to_add_out = double_blocks.{}.txt_attn.proj
transformer_blocks.{}.ff.net.0.proj = double_blocks.{}.img_mlp.0
transformer_blocks.{}.ff.net.2 = double_blocks.{}.img_mlp.2
transformer_blocks.{}.ff_context.net.0.proj = double_blocks.{}.txt_mlp.0
transformer_blocks.{}.ff_context.net.2 = double_blocks.{}.txt_mlp.2
single_transformer_blocks.{}.attn.to_q + single_transformer_blocks.{}.attn.to_k + single_transformer_blocks.{}.attn.to_v + single_transformer_blocks.{}.proj_mlp = single_blocks.{}.linear1
single_transformer_blocks.{}.proj_out = single_blocks.{}.linear2
"""


class HunyuanImage(Flux):
    """The facts of a HunyuanImage model: a guidance is told as to Flux, and all else is its own."""

    name = "hunyuan_image"
    modelspec = "hunyuan-image-2.1"
    texts: tuple[Text, ...] = (
        Text("text_encoder", "tokenizer", "llm", 1000, hidden=-3, template=TEMPLATE, drop=34, masked=True, passes_mask=True),
        Text("text_encoder_2", "tokenizer_2", "t5", 128, masked=True, passes_mask=True, quoted=True, raw_bytes=True),
    )  # fmt: skip
    patch = 1
    shift = Shift(5.0)
    zero = r"(norm1|norm1_context|norm_out|\.norm)\.linear\.|^proj_out\."
    silent = r"^context_embedder_2\."  # where no caption of a batch quotes
    vae_scales = MappingProxyType({})
    infer = None  # type: ignore[assignment]
    keys = ""
    lora = Lora((
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff.net.0.proj",
        "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out",
    ), layers=COMFY_LAYERS)  # fmt: skip
    agree: tuple[Agree, ...] = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.patch_size", lambda s: [1, 1], "a token is one latent pixel"),
        Agree("transformer.text_embed_dim", lambda s: s["text_encoder"]["text_config"]["hidden_size"],
              "the language model's hidden_size"),
        Agree("transformer.text_embed_2_dim", lambda s: s["text_encoder_2"]["d_model"], "text_encoder_2's d_model"),
        Agree("transformer.attention_head_dim", lambda s: sum(s["transformer"]["rope_axes_dim"]), "rope_axes_dim in all"),
    )  # fmt: skip

    def conditions(self, made: dict[str, Tensor], batch: Any = None) -> dict[str, Tensor]:
        """Return tokens (B, L, J) and glyphs (B, G, K), each with what of it is text."""
        return {
            "tokens": made["hidden_1"], "mask": made["mask_1"], "glyphs": made["hidden_2"], "glyph_mask": made["mask_2"],
        }  # fmt: skip

    def tokenizer_class(self, text: Text, vocabulary: Any) -> str:
        """Name the class of transformers that a text encoder's vocabulary is exported for."""
        return "ByT5Tokenizer" if text.raw_bytes else super().tokenizer_class(text, vocabulary)

    def guided(self, conditions: dict[str, Tensor], guidance: float | None) -> dict[str, Tensor]:
        """Tell a distilled transformer the guidance of a drawn picture, and where the steps go to."""
        if self.source.complete(self.denoiser)["use_meanflow"]:
            conditions = conditions | {
                UNTIL: torch.zeros(len(conditions["tokens"]), device=conditions["tokens"].device)
            }
        return super().guided(conditions, guidance)

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, G + L, D), temb (B, D)."""
        until = conditions.get(UNTIL, t) if net.config.use_meanflow else None
        guidance = next(iter(self._guidance(net, t, conditions)), None)
        temb = net.time_guidance_embed(t, guidance=guidance, timestep_r=until)
        image, mask = net.x_embedder(x_t), or_all(conditions, "mask", "tokens")
        text = net.context_embedder(conditions["tokens"], t, mask)
        if net.context_embedder_2 is not None:
            glyphs, glyph_mask = (
                net.context_embedder_2(conditions["glyphs"]),
                or_all(conditions, "glyph_mask", "glyphs"),
            )
            text, mask = in_order(glyphs, glyph_mask, text, mask)
        mask = torch.nn.functional.pad(mask, (image.shape[1], 0), value=True)[:, None, None]
        size = (x_t.shape[-2], x_t.shape[-1])
        return Tokens(image, text, temb, size, rope=self.rope_of(net, size, x_t.device), more={"mask": mask})

    def rope_of(self, net: Any, size: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Return the rotary tables of latents, (h, w) or (F, h, w)."""
        return self.rotary(size, device, lambda: net.rope(torch.empty(1, 1, *size)))

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block of either kind: both take and return image and text apart."""
        image, text = block(
            tokens.image, tokens.text, tokens.temb, attention_mask=tokens.more["mask"], image_rotary_emb=tokens.rope
        )
        return replace(tokens, image=image, text=text)

    def guider(self) -> Any:
        """Make the guidance that the pipeline of a model that is not distilled draws with; None: of one that is."""
        from diffusers import AdaptiveProjectedMixGuidance

        return None if self.source.complete(self.denoiser)["guidance_embeds"] else AdaptiveProjectedMixGuidance()

    def write_beside(self, folder: Path) -> dict[str, list[str]]:
        """Write the guidance of the pipeline beside what any has."""
        classes, guider = super().write_beside(folder), self.guider()
        if guider is not None:
            guider.save_pretrained(folder / "guider")
            classes["guider"] = ["diffusers", type(guider).__name__]
        return classes


def or_all(conditions: Mapping[str, Tensor], mask: str, of: str) -> Tensor:
    """Return a mask, or one that keeps all, (B, L)."""
    kept = conditions.get(mask)
    return conditions[of].new_ones(conditions[of].shape[:2], dtype=torch.bool) if kept is None else kept


def in_order(first: Tensor, first_mask: Tensor, second: Tensor, second_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Put two texts one behind the other: what is text of both, then what fills them up. Masks keep beginnings.

    Rows are gathered by arithmetic on the device: no length is looked at on the host.
    """
    a, b, length = first_mask.sum(1, keepdim=True), second_mask.sum(1, keepdim=True), first.shape[1]
    rows = torch.arange(length + second.shape[1], device=first.device)[None]
    source = torch.where(rows < a, rows, torch.where(rows < a + b, rows - a + length, rows))
    source = torch.where((rows >= a + b) & (rows < length + b), rows - b, source)
    both = torch.cat((first, second), dim=1)
    return both.gather(1, source[..., None].expand(-1, -1, both.shape[2])), rows < a + b
