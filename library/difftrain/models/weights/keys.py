"""Names of a model's tensors in its original layout: rows of a table that is read both ways.

A row is a line "ours [+ ours ...] = theirs [halves] [leaf=NAME]": modules or tensors, "{}" the number of a block. Several
of ours on one of theirs lie there one behind another on dim 0. halves: the two halves of dim 0 are swapped (scale before
shift). leaf: what is called weight here is called NAME there. A row of modules stands for their weights and biases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class KeyRow:
    """One row of a table."""

    ours: tuple[str, ...]
    theirs: str
    halves: bool = False
    leaf: str = "weight"


@cache
def rows(table: str) -> tuple[KeyRow, ...]:
    """Read a table, a row a line."""
    parsed = []
    for line in filter(None, map(str.strip, table.splitlines())):
        left, _, right = line.partition(" = ")
        theirs, *marks = right.split()
        leaf = next((mark.removeprefix("leaf=") for mark in marks if mark.startswith("leaf=")), "weight")
        parsed.append(KeyRow(tuple(left.split(" + ")), theirs, "halves" in marks, leaf))
    return tuple(parsed)


class KeyPiece(NamedTuple):
    """Where a tensor of ours lies: rows of the tensor `key` from `start`.

    form: "same"; "conv": (C, D) as (C, D, 1, 1); "transposed". halves: see the table.
    """

    key: str
    start: int = 0
    halves: bool = False
    form: str = "same"


Rule = Callable[[str], KeyPiece]  # our name -> where it lies


def table_rule(table: str, shapes: Shapes) -> Rule:
    """Return the rule that a table is, for tensors of these shapes. The rule raises KeyError for what no row names."""
    places = {name: (row, index) for row in rows(table) for index, name in enumerate(row.ours)}

    def rule(name: str) -> KeyPiece:
        owner, _, leaf = name.rpartition(".")
        for owner_name, ending in ((name, ""), (owner, leaf)):
            for pattern, number in _patterns(owner_name):
                if pattern in places:
                    row, index = places[pattern]
                    theirs = row.theirs.replace("{}", number)
                    key = f"{theirs}.{row.leaf if ending == 'weight' else ending}" if ending else theirs
                    before = (pattern.replace("{}", number) for pattern in row.ours[:index])
                    start = sum(shapes[f"{pattern}.{ending}" if ending else pattern][0] for pattern in before)
                    return KeyPiece(key, start, row.halves)
        raise KeyError(f"no row of the table names {name}")

    return rule


def _patterns(name: str) -> list[tuple[str, str]]:
    """Return a name as it is, and with the number of its block as {}: a row for one block goes before that for all."""
    first = re.search(r"\.(\d+)(?=\.|$)", name)
    plain = [(name, "")]
    return [*plain, (f"{name[: first.start()]}.{{}}{name[first.end() :]}", first[1])] if first else plain


class KeyMap:
    """Where all tensors of one model lie. pieces: our name -> place. stored: their key -> its whole shape."""

    def __init__(self, shapes: Shapes, rule: Rule) -> None:
        self.shapes = dict(shapes)
        self.pieces = {name: rule(name) for name in shapes}
        self.stored: dict[str, tuple[int, ...]] = {}
        self.members: dict[str, list[str]] = {}  # their key -> ours in it, in order
        for name, piece in self.pieces.items():
            shape = _stored_shape(piece, shapes[name])
            before = self.stored.get(piece.key, (0,))
            self.stored[piece.key] = (max(before[0], piece.start + shape[0]), *shape[1:]) if shape else shape
            self.members.setdefault(piece.key, []).append(name)
        for names in self.members.values():
            names.sort(key=lambda name: self.pieces[name].start)

    def restored(self, name: str, tensor: Tensor) -> Tensor:
        """Take a tensor of ours out of theirs."""
        piece, shape = self.pieces[name], self.shapes[name]
        value = tensor
        if len(self.members[piece.key]) > 1:
            value = tensor[piece.start : piece.start + _stored_shape(piece, shape)[0]]
        if piece.form == "conv":
            value = value.reshape(shape)
        return swapped(value.T if piece.form == "transposed" else value, piece.halves)

    def restored_rows(self, name: str, numbers: Tensor) -> Tensor:
        """Take those of ours out of numbers for each row of theirs, (rows, 1)."""
        piece, shape = self.pieces[name], self.shapes[name]
        if piece.form == "transposed":
            raise ValueError(f"{name} lies transposed: its rows are no rows of {piece.key}")
        return swapped(numbers[piece.start : piece.start + shape[0]], piece.halves)

    def collected(self, name: str, value: Tensor, waiting: dict[str, Tensor]) -> Tensor | None:
        """Take a tensor of ours; return theirs once all that it holds have come, which wait until then."""
        key = self.pieces[name].key
        members = self.members[key]
        if len(members) == 1:
            return self.joined(key, {name: value})
        waiting[name] = value.detach().to("cpu", copy=True)  # whoever gives it may write over it
        if any(member not in waiting for member in members):
            return None
        return self.joined(key, {member: waiting.pop(member) for member in members})

    def joined(self, key: str, ours: Mapping[str, Tensor]) -> Tensor:
        """Make a tensor of theirs of all of ours that it holds, by our names."""
        import torch

        values = [self._stored(name, ours[name]) for name in self.members[key]]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _stored(self, name: str, value: Tensor) -> Tensor:
        piece = self.pieces[name]
        value = swapped(value, piece.halves)
        if piece.form == "conv":
            return value[:, :, None, None]
        return value.T.contiguous() if piece.form == "transposed" else value


def _stored_shape(piece: KeyPiece, shape: tuple[int, ...]) -> tuple[int, ...]:
    if piece.form == "conv":
        return (*shape, 1, 1)
    return shape[::-1] if piece.form == "transposed" else shape


def swapped(value: Tensor, halves: bool) -> Tensor:
    """Swap the two halves of dim 0, or return a tensor as it is."""
    import torch

    return torch.cat(value.chunk(2)[::-1]) if halves else value


def renamed(name: str, table: Mapping[str, str]) -> str:
    """Rename the beginning of a name by a table. Raises KeyError where no row fits."""
    for ours, theirs in table.items():
        if name.startswith(ours + "."):
            return theirs + name.removeprefix(ours)
    raise KeyError(name)


# --- Names of tensors in the original layout of Stable Diffusion's single files: UNet, VAE, and OpenCLIP's text encoder


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
        # the layers before and after all blocks
        for ours, theirs in _UNET_ENDS.items():
            if name.startswith(ours + "."):
                return KeyPiece(theirs + name.removeprefix(ours))
        side, remaining = name.split(".", 1)
        if side == "mid_block":
            kind, j, inner = remaining.split(".", 2)
            middle = f"1.{inner}" if kind == "attentions" else f"{2 * int(j)}.{renamed(inner, _RESNET)}"
            return KeyPiece(f"middle_block.{middle}")
        i, kind, j, inner = remaining.split(".", 3)
        # input_blocks and output_blocks are one flat list over all levels; input block 0 is conv_in
        down, block = side == "down_blocks", int(i)
        flat = "input_blocks" if down else "output_blocks"
        if kind == "downsamplers":
            return KeyPiece(f"{flat}.{(block + 1) * stride}.0.op{inner.removeprefix('conv')}")
        if kind == "upsamplers":
            # an upsampler is the last part of its output block, after resnet and perhaps attention
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
            ours = next(prefix for prefix in _VAE_ATTENTION if inner.startswith(f"{prefix}."))
            is_linear = inner.endswith("weight") and ours != "group_norm"
            theirs = f"{coder}.mid.attn_1.{_VAE_ATTENTION[ours]}{inner.removeprefix(ours)}"
            return KeyPiece(theirs, form="conv" if is_linear else "same")
        block = re.fullmatch(r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name)
        if not block:
            return KeyPiece(name)
        coder, side, index, kind, number, inner = block.groups()
        # the original numbers the decoder's levels by resolution, diffusers in the order they run
        level = int(index) if side == "down" else num_blocks - 1 - int(index)
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
