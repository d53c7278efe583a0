"""Names of SDXL's weights: as diffusers' modules call them, and as single files of the original layout do.

A file's tensor is one module tensor as it is, one in another shape (a linear layer stored as a 1x1 convolution, a
transposed projection), or a stack of several (OpenCLIP keeps q, k and v in one). The rules below hold for every size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from difftrain.models.parts.places import Place

PREFIXES = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder_1": "conditioner.embedders.0.transformer.",
    "text_encoder_2": "conditioner.embedders.1.model.",
}
# Tensors of single files that are no weights of a module: written for readers that expect them, ignored when read.
POSITION_IDS = PREFIXES["text_encoder_1"] + "text_model.embeddings.position_ids"
LOGIT_SCALE = PREFIXES["text_encoder_2"] + "logit_scale"
EXTRA_KEYS = (POSITION_IDS, LOGIT_SCALE)

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
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN_CLIP_ENDS = {
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}
_OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_STACKED = ("q_proj", "k_proj", "v_proj")


def canonical(part: str, name: str) -> str:
    """Give a text encoder's tensor the name it has in files: transformers 5.6 dropped CLIPTextModel's "text_model."."""
    if part == "text_encoder_1" and not name.startswith("text_model."):
        return f"text_model.{name}"
    return name


def original_places(part: str, module: Any) -> dict[str, Place]:
    """Map every tensor of a part's module to its place in the original layout."""
    prefix = PREFIXES[part]
    rule = _RULES[part](module)
    places = {}
    for name in module.state_dict():
        place = rule(canonical(part, name))
        places[name] = Place(prefix + place.key, place.form, place.index, place.count)
    return places


def diffusers_places(part: str, module: Any) -> dict[str, Place]:
    """Map every tensor of a part's module to its name in a diffusers folder."""
    return {name: Place(canonical(part, name)) for name in module.state_dict()}


class _Unet:
    """Number diffusers' blocks as the original's flat lists of input and output blocks."""

    def __init__(self, module: Any) -> None:
        config = module.config
        self.stride = config.layers_per_block + 1
        self.up_types = config.up_block_types

    def __call__(self, name: str) -> Place:
        for ours, theirs in _UNET_ENDS.items():
            if name.startswith(ours + "."):
                return Place(theirs + name.removeprefix(ours))
        side, rest = name.split(".", 1)
        block = self._middle(rest) if side == "mid_block" else self._side(side, rest)
        return Place(block)

    def _middle(self, rest: str) -> str:
        kind, j, inner = rest.split(".", 2)
        if kind == "attentions":
            return f"middle_block.1.{inner}"
        return f"middle_block.{2 * int(j)}.{_renamed(inner, _RESNET)}"

    def _side(self, side: str, rest: str) -> str:
        i, kind, j, inner = rest.split(".", 3)
        down = side == "down_blocks"
        block, flat = int(i), "input_blocks" if down else "output_blocks"
        if kind == "downsamplers":
            return f"{flat}.{(block + 1) * self.stride}.0.op{inner.removeprefix('conv')}"
        if kind == "upsamplers":
            position = 2 if "CrossAttn" in self.up_types[block] else 1
            return f"{flat}.{block * self.stride + self.stride - 1}.{position}.{inner}"
        number = block * self.stride + int(j) + (1 if down else 0)
        if kind == "attentions":
            return f"{flat}.{number}.1.{inner}"
        return f"{flat}.{number}.0.{_renamed(inner, _RESNET)}"


class _Vae:
    """Rename AutoencoderKL's blocks; the original numbers the decoder's from the picture inwards."""

    def __init__(self, module: Any) -> None:
        self.num_blocks = len(module.config.block_out_channels)

    def __call__(self, name: str) -> Place:
        name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        found = re.fullmatch(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d)\.(.+)", name)
        if found:
            return self._middle(*found.groups())
        found = re.fullmatch(r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name)
        if not found:
            return Place(name)
        coder, side, i, kind, j, inner = found.groups()
        number = int(i) if side == "down" else self.num_blocks - 1 - int(i)
        body = f"block.{j}" if kind == "resnets" else f"{side}sample"
        return Place(f"{coder}.{side}.{number}.{body}.{inner}")

    @staticmethod
    def _middle(coder: str, kind: str, j: str, inner: str) -> Place:
        if kind == "resnets":
            return Place(f"{coder}.mid.block_{int(j) + 1}.{inner}")
        form = "conv" if inner.startswith("to_") and inner.endswith("weight") else "same"
        return Place(f"{coder}.mid.attn_1.{_renamed(inner, _VAE_ATTENTION)}", form)


def _open_clip(name: str) -> Place:
    if name in _OPEN_CLIP_ENDS:
        return Place(_OPEN_CLIP_ENDS[name], "transposed" if name == "text_projection.weight" else "same")
    layer, inner = re.fullmatch(r"text_model\.encoder\.layers\.(\d+)\.(.+)", name).groups()  # type: ignore[union-attr]
    stacked = re.fullmatch(r"self_attn\.([qkv]_proj)\.(weight|bias)", inner)
    block = f"transformer.resblocks.{layer}"
    if stacked:
        which, kind = stacked.groups()
        return Place(f"{block}.attn.in_proj_{kind}", "same", _STACKED.index(which), 3)
    return Place(f"{block}.{_renamed(inner, _OPEN_CLIP_LAYER)}")


_RULES: dict[str, Callable[[Any], Callable[[str], Place]]] = {
    "unet": _Unet,
    "vae": _Vae,
    "text_encoder_1": lambda _: Place,
    "text_encoder_2": lambda _: _open_clip,
}


def _renamed(name: str, table: dict[str, str]) -> str:
    """Rename the beginning of a name by a table; raises KeyError where no row fits."""
    for ours, theirs in table.items():
        if name.startswith(ours + "."):
            return theirs + name.removeprefix(ours)
    raise KeyError(name)
