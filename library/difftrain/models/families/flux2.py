"""Flux.2 dev (Black Forest Labs 2025): Flux.1's two kinds of blocks under one shared modulation a kind, over three states of a Mistral.

Latents are folded 2 x 2 into 128 channels before they are normalised, by statistics that lie among the VAE's weights. dev
is distilled from guidance, which it is told; trained with guidance 1, while samples take theirs from `--g`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models import passes
from difftrain.models.facts import Agree, Bound, Lora, Shift, Sizes, StepShift, Text
from difftrain.models.families.flux import Flux
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor


# Mistral's chat with the system prompt that the release was trained with
TEMPLATE = (
    "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing on "
    "object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
)
# the release's own fit: of 10 and of 200 steps, up to 4300 tokens
MU = StepShift((10, 8.73809524e-05, 1.89833333), (200, 0.00016927, 0.45666666), 4300)


def language(sizes: Sizes) -> Mapping[str, Any]:
    """Return the sizes of the language model, which may stand beside those of one that sees."""
    encoder = sizes["text_encoder"]
    return encoder.get("text_config") or encoder


def agreement(text: Text, depth_in: str) -> tuple[Agree | Bound, ...]:
    """Say what must hold between a Flux.2 transformer and the language model whose states it is given.

    depth_in: the argument of the encoder that says its depth.
    """
    deepest = max(text.layers)

    def shallow(sizes: Sizes) -> str:
        depth = language(sizes)["num_hidden_layers"]
        return f"has {depth} layers" if depth < deepest else ""

    return (
        Agree("transformer.in_channels", lambda s: 4 * s["vae"]["latent_channels"], "a token is 2x2 latent pixels"),
        Agree("transformer.joint_attention_dim", lambda s: len(text.layers) * language(s)["hidden_size"],
              f"{len(text.layers)} states of the language model side by side"),
        Agree("transformer.patch_size", lambda s: 1, "latents are folded before they enter"),
        Agree("transformer.attention_head_dim", lambda s: sum(s["transformer"]["axes_dims_rope"]), "axes_dims_rope in all"),
        Bound(f"text_encoder.{depth_in}", shallow, f"state {deepest} is read"),
    )  # fmt: skip


class Flux2(Flux):
    """The facts of a Flux.2 model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "flux2"
    modelspec = "flux-2-dev"
    texts: tuple[Text, ...] = (
        Text(
            "text_encoder", "tokenizer", "llm", 512, layers=(10, 20, 30), template=TEMPLATE, masked=True, zeros=False,
            pads_left=True, marked=True, strips=("[IMG]",),
        ),
    )  # fmt: skip
    patch = 1  # of a latent pixel that is four of the VAE's
    shift = Shift(dynamic=(256, 4096, 0.5, 1.15), mu=MU)
    zero = r"_modulation(_img|_txt)?\.linear\.|^norm_out\.linear\.|^proj_out\."
    vae_scales = MappingProxyType({})
    lora = Lora((
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "linear_in",
        "linear_out", "to_qkv_mlp_proj", "attn.to_out",
    ))  # fmt: skip
    agree = agreement(texts[0], "text_config")
    guided_file = True  # a file of the transformer alone is of this family where it has a guidance input

    def conditions(self, made: dict[str, Tensor], batch: Any = None) -> dict[str, Tensor]:
        """Return tokens (B, L, J), those of the padding too: no mask tells them apart."""
        return {"tokens": made["hidden_1"]}

    def tokenizer_class(self, text: Text, vocabulary: Any) -> str:
        """Return the processor that a release has in place of a tokenizer, or the tokenizer of a small vocabulary."""
        return "PixtralProcessor" if vocabulary.reads_pictures else super().tokenizer_class(text, vocabulary)

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, D), temb (B, D)."""
        image, text = net.x_embedder(passes.pack(x_t, self.patch)), net.context_embedder(conditions["tokens"])
        temb = net.time_guidance_embed(t, next(iter(self._guidance(net, t, conditions)), None))
        more = {
            "image": net.double_stream_modulation_img(temb),
            "text": net.double_stream_modulation_txt(temb),
            "both": net.single_stream_modulation(temb),
        }
        size = (x_t.shape[-2], x_t.shape[-1])
        return Tokens(image, text, temb, size, rope=self.rope(net, size, text.shape[1], x_t.device), more=more)

    def rope(self, net: Any, size: tuple[int, int], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rotary tables of text and image: (picture, row, column, place in the text), made once a size."""
        key = (size, length, device)
        if key not in self._ropes:
            places = passes.behind_text(torch.nn.functional.pad(passes.grid(*size), (0, 1)), length)
            places[:length, 3] = torch.arange(length)
            cos, sin = net.pos_embed(places)
            self._ropes[key] = (cos.to(device), sin.to(device))
        return self._ropes[key]

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block of either kind, each with the modulation of its kind."""
        more = tokens.more
        if hasattr(block, "norm1_context"):
            text, image = block(tokens.image, tokens.text, more["image"], more["text"], tokens.rope)
        else:
            text, image = block(tokens.image, tokens.text, more["both"], tokens.rope, split_hidden_states=True)
        return replace(tokens, text=text, image=image)

    @classmethod
    def infer(cls, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:  # type: ignore[override]
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        head = shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
        width, channels = shapes["img_in.weight"]
        guided = "guidance_in.in_layer.weight" in shapes
        if guided != cls.guided_file or "double_stream_modulation_img.lin.weight" not in shapes:
            raise KeyError(
                "guidance_in.in_layer.weight" if cls.guided_file else "double_stream_modulation_img.lin.weight"
            )
        return {
            "in_channels": channels,
            "num_layers": count(shapes, r"double_blocks\.(\d+)\."),
            "num_single_layers": count(shapes, r"single_blocks\.(\d+)\."),
            "attention_head_dim": head,
            "num_attention_heads": width // head,
            "joint_attention_dim": shapes["txt_in.weight"][1],
            "timestep_guidance_channels": shapes["time_in.in_layer.weight"][1],
            "mlp_ratio": shapes["double_blocks.0.img_mlp.2.weight"][1] / width,
            "guidance_embeds": guided,
            "axes_dims_rope": [head // 4] * 4,
        }

    keys = """
x_embedder = img_in
context_embedder = txt_in
time_guidance_embed.timestep_embedder.linear_1 = time_in.in_layer
time_guidance_embed.timestep_embedder.linear_2 = time_in.out_layer
time_guidance_embed.guidance_embedder.linear_1 = guidance_in.in_layer
time_guidance_embed.guidance_embedder.linear_2 = guidance_in.out_layer
double_stream_modulation_img.linear = double_stream_modulation_img.lin
double_stream_modulation_txt.linear = double_stream_modulation_txt.lin
single_stream_modulation.linear = single_stream_modulation.lin
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
transformer_blocks.{}.ff.linear_in = double_blocks.{}.img_mlp.0
transformer_blocks.{}.ff.linear_out = double_blocks.{}.img_mlp.2
transformer_blocks.{}.ff_context.linear_in = double_blocks.{}.txt_mlp.0
transformer_blocks.{}.ff_context.linear_out = double_blocks.{}.txt_mlp.2
single_transformer_blocks.{}.attn.to_qkv_mlp_proj = single_blocks.{}.linear1
single_transformer_blocks.{}.attn.to_out = single_blocks.{}.linear2
single_transformer_blocks.{}.attn.norm_q = single_blocks.{}.norm.query_norm leaf=scale
single_transformer_blocks.{}.attn.norm_k = single_blocks.{}.norm.key_norm leaf=scale
"""
