"""Names of tensors in the original layout of Stable Diffusion's single files: UNet, VAE, and OpenCLIP's text encoder."""

from __future__ import annotations

import re
from typing import Any

from difftrain.models.weights.keys import KeyPiece, Rule, renamed

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def unet_rule(unet: Any) -> Rule:
    """Return where each tensor of a UNet2DConditionModel of any size lies, without the prefix of a whole model.

    The original layout numbers a UNet's blocks as flat lists.
    """
    stride, up_types = unet.config.layers_per_block + 1, unet.config.up_block_types

    def rule(name: str) -> KeyPiece:
        for ours, theirs in _UNET_ENDS.items():
            if name.startswith(ours + "."):
                return KeyPiece(theirs + name.removeprefix(ours))
        side, rest = name.split(".", 1)
        if side == "mid_block":
            kind, j, inner = rest.split(".", 2)
            middle = f"1.{inner}" if kind == "attentions" else f"{2 * int(j)}.{renamed(inner, _RESNET)}"
            return KeyPiece(f"middle_block.{middle}")
        i, kind, j, inner = rest.split(".", 3)
        down, block = side == "down_blocks", int(i)
        flat = "input_blocks" if down else "output_blocks"
        if kind == "downsamplers":
            return KeyPiece(f"{flat}.{(block + 1) * stride}.0.op{inner.removeprefix('conv')}")
        if kind == "upsamplers":
            position = 2 if "CrossAttn" in up_types[block] else 1
            return KeyPiece(f"{flat}.{block * stride + stride - 1}.{position}.{inner}")
        number = block * stride + int(j) + (1 if down else 0)
        inside = f"1.{inner}" if kind == "attentions" else f"0.{renamed(inner, _RESNET)}"
        return KeyPiece(f"{flat}.{number}.{inside}")

    return rule


_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def vae_rule(vae: Any) -> Rule:
    """Return where each tensor of an AutoencoderKL lies, without the prefix of a whole model.

    The original decoder counts its blocks from the picture inwards.
    """
    num_blocks = len(vae.config.block_out_channels)

    def rule(name: str) -> KeyPiece:
        name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        middle = re.fullmatch(r"(encoder|decoder)\.mid_block\.(\w+)\.(\d+)\.(.+)", name)
        if middle:
            coder, kind, number, inner = middle.groups()
            if kind == "resnets":
                return KeyPiece(f"{coder}.mid.block_{int(number) + 1}.{inner}")
            ours = next(each for each in _VAE_ATTENTION if inner.startswith(f"{each}."))
            is_linear = inner.endswith("weight") and ours != "group_norm"
            theirs = f"{coder}.mid.attn_1.{_VAE_ATTENTION[ours]}{inner.removeprefix(ours)}"
            return KeyPiece(theirs, form="conv" if is_linear else "same")
        block = re.fullmatch(r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name)
        if not block:
            return KeyPiece(name)
        coder, side, place, kind, number, inner = block.groups()
        level = int(place) if side == "down" else num_blocks - 1 - int(place)
        body = f"block.{number}" if kind == "resnets" else f"{side}sample"
        return KeyPiece(f"{coder}.{side}.{level}.{body}.{inner}")

    return rule


_CLIP_ENDS = {
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}
_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_CLIP_STACKED = ("q_proj", "k_proj", "v_proj")


def clip_rule(encoder: Any) -> Rule:
    """Return where each tensor of a CLIPTextModel, with its projection or without, lies in OpenCLIP's layout.

    It keeps q, k and v one behind another.
    """
    width = encoder.config.hidden_size

    def rule(name: str) -> KeyPiece:
        if name in _CLIP_ENDS:
            return KeyPiece(_CLIP_ENDS[name], form="transposed" if name == "text_projection.weight" else "same")
        layer, inner = re.fullmatch(r"text_model\.encoder\.layers\.(\d+)\.(.+)", name).groups()  # type: ignore[union-attr]
        block = f"transformer.resblocks.{layer}"
        if stacked := re.fullmatch(r"self_attn\.([qkv]_proj)\.(weight|bias)", inner):
            return KeyPiece(f"{block}.attn.in_proj_{stacked[2]}", _CLIP_STACKED.index(stacked[1]) * width)
        return KeyPiece(f"{block}.{renamed(inner, _CLIP_LAYER)}")

    return rule
