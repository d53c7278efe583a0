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
from difftrain.models.families.flux import SHARED_KEYS, Flux, shared_sizes
from difftrain.models.passes import Tokens

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
        return Tokens(image, text, temb, size, rope=self.rope(net, (size,), text.shape[1], x_t.device), more=more)

    def places(self, sizes: tuple[tuple[int, int], ...], length: int) -> Tensor:
        """Say where tokens of text and images lie, as Flux.1 does, and on a fourth axis the place in the text."""
        places = torch.nn.functional.pad(super().places(sizes, length), (0, 1))
        places[:length, 3] = torch.arange(length)
        return places

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
        guided = "guidance_in.in_layer.weight" in shapes
        if guided != cls.guided_file or "double_stream_modulation_img.lin.weight" not in shapes:
            raise KeyError(
                "guidance_in.in_layer.weight" if cls.guided_file else "double_stream_modulation_img.lin.weight"
            )
        sizes = shared_sizes(shapes)
        return sizes | {
            "timestep_guidance_channels": shapes["time_in.in_layer.weight"][1],
            "mlp_ratio": shapes["double_blocks.0.img_mlp.2.weight"][1] / shapes["img_in.weight"][0],
            "guidance_embeds": guided,
            "axes_dims_rope": [sizes["attention_head_dim"] // 4] * 4,
        }

    keys = (
        SHARED_KEYS
        + """
time_guidance_embed.timestep_embedder.linear_1 = time_in.in_layer
time_guidance_embed.timestep_embedder.linear_2 = time_in.out_layer
time_guidance_embed.guidance_embedder.linear_1 = guidance_in.in_layer
time_guidance_embed.guidance_embedder.linear_2 = guidance_in.out_layer
double_stream_modulation_img.linear = double_stream_modulation_img.lin
double_stream_modulation_txt.linear = double_stream_modulation_txt.lin
single_stream_modulation.linear = single_stream_modulation.lin
transformer_blocks.{}.ff.linear_in = double_blocks.{}.img_mlp.0
transformer_blocks.{}.ff.linear_out = double_blocks.{}.img_mlp.2
transformer_blocks.{}.ff_context.linear_in = double_blocks.{}.txt_mlp.0
transformer_blocks.{}.ff_context.linear_out = double_blocks.{}.txt_mlp.2
single_transformer_blocks.{}.attn.to_qkv_mlp_proj = single_blocks.{}.linear1
single_transformer_blocks.{}.attn.to_out = single_blocks.{}.linear2
"""
    )
