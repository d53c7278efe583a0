"""Lumina Image 2.0 (Alpha-VLLM 2025, arXiv:2503.21758): text and image refined apart, then one stream of both.

Texts are of many lengths: image tokens follow the last token of a caption, and padding stands behind them, where nobody
looks at it. So a sequence is as long as text and image together at any caption, and the host never waits for a length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from difftrain.device.rotary import tables_of_pairs
from difftrain.models import passes
from difftrain.models.facts import Agree, Bound, Lora, Shift, Sizes, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens, laid
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig

# before a caption; neither a negative prompt nor a caption that was dropped has it
TEMPLATE = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based on "
    "textual prompts or user prompts. <Prompt Start> {}"
)
_LENGTH = 256


def _head(s: Sizes) -> int:
    return int(s["transformer"]["hidden_size"] // s["transformer"]["num_attention_heads"])


class Lumina2(ModelFamily):
    """The facts of a Lumina Image 2.0 model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "lumina_2"
    modelspec = "lumina-2"
    texts = (
        Text("text_encoder", "tokenizer", "llm", _LENGTH, hidden=-2, template=TEMPLATE, bare="{}", masked=True, passes_mask=True),
    )  # fmt: skip
    blocks = ("context_refiner", "noise_refiner", "layers")
    shift = Shift(6.0)
    zero = r"\.norm1\.linear\.|^norm_out\."
    leaving = r"norm_out\b"
    vae_scales = MappingProxyType({"scaling_factor": 0.3611, "shift_factor": 0.1159, "norm_num_groups": 32})
    lora = Lora(("to_q", "to_k", "to_v", "to_out.0", "linear_1", "linear_2", "linear_3"))
    agree = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.cap_feat_dim", lambda s: s["text_encoder"]["hidden_size"], "text_encoder's hidden_size"),
        Agree("transformer.patch_size", lambda s: 2, "a token is 2x2 latent pixels"),
        Bound(
            "transformer.axes_dim_rope",
            lambda s: f"is {axes}, in all {sum(axes)}" if sum(axes := s["transformer"]["axes_dim_rope"]) != _head(s) else "",
            "hidden_size / num_attention_heads in all",
        ),
        Bound(
            "transformer.axes_lens",
            lambda s: f"is {most}" if (most := s["transformer"]["axes_lens"])[0] <= _LENGTH else "",
            f"the first is more than the {_LENGTH} tokens of a caption",
        ),
    )  # fmt: skip

    def __init__(self, cfg: TrainConfig) -> None:
        super().__init__(cfg)
        self._tables: dict[Any, list[Tensor]] = {}
        self._cells: dict[Any, Tensor] = {}

    # ------------------------------------------------------------------ the pass

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, D), temb (B, D)."""
        temb, text = net.time_caption_embed(x_t, 1.0 - t / 1000.0, conditions["tokens"])
        size = (x_t.shape[-2] // self.patch, x_t.shape[-1] // self.patch)
        image = net.x_embedder(passes.pack_channels_last(x_t, self.patch))
        mask = conditions.get("mask")
        mask = text.new_ones(text.shape[:2], dtype=torch.bool) if mask is None else mask
        return Tokens(image, text, temb, size, more=self._places(net, mask, size))

    def _places(self, net: Any, mask: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        """Lay out each sample's sequence: its caption, its image, and padding. Shapes: mask (B, L).

        order, back: (B, S) which token of text and image stands at a slot, and where it went; seen: (B, S); rotary
        tables of the sequence, of text and of image alone, cosines and sines, (2, B, ., D).
        """
        length, patches = mask.shape[1], size[0] * size[1]
        ends = mask.sum(dim=1, keepdim=True)
        slot = torch.arange(length + patches, device=mask.device).expand(len(mask), -1)
        is_text, is_padding = slot < ends, slot >= ends + patches
        order = torch.where(is_text, slot, torch.where(is_padding, slot - patches, slot - ends + length))
        back = torch.where(slot < ends, slot, torch.where(slot < length, slot + patches, slot - length + ends))

        # --- positions: a caption's tokens one behind the other; all of the image at the caption's end, in rows and columns
        key = (size, length, mask.device)
        if key not in self._cells:  # moved once a size
            self._cells[key] = F.pad(passes.grid(*size), (0, 0, length, 0)).to(mask.device, torch.int64)
        lies = self._cells[key].expand(len(mask), -1, -1)
        first = torch.where(slot < length, torch.minimum(slot, ends), ends)
        lies = torch.cat((first.unsqueeze(-1), lies[..., 1:]), dim=-1)  # (B, L + N, 3)
        apart = self._rotary(net, lies)
        joint = apart.gather(2, order[None, :, :, None].expand_as(apart))
        text, image = apart.split((length, patches), dim=2)
        return {
            "order": order, "back": back, "mask": mask, "seen": ~is_padding, "joint": joint, "text": text, "image": image,
        }  # fmt: skip

    def _rotary(self, net: Any, lies: Tensor) -> Tensor:
        """Look positions (B, S, 3) up in the tables of each axis, real-valued: (2, B, S, D)."""
        if lies.device not in self._tables:
            self._tables[lies.device] = [table.to(lies.device) for table in net.rope_embedder.freqs_cis]
        turned = [F.embedding(lies[..., axis], table) for axis, table in enumerate(self._tables[lies.device])]
        return torch.stack(tables_of_pairs(torch.cat(turned, dim=-1)))

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block: of those that refine text or image alone, or of those over both."""
        assert tokens.text is not None
        more = tokens.more
        if not block.modulation:
            return replace(tokens, text=block(tokens.text, more["mask"], more["text"].unbind(0)))
        if tokens.member == "noise_refiner":
            return replace(tokens, image=block(tokens.image, None, more["image"].unbind(0), tokens.temb))
        both = block(laid(self._joined(tokens), more["order"]), more["seen"], more["joint"].unbind(0), tokens.temb)
        text, image = laid(both, more["back"]).split((tokens.text.shape[1], tokens.image.shape[1]), dim=1)
        return replace(tokens, text=text, image=image)

    @staticmethod
    def _joined(tokens: Tokens) -> Tensor:
        assert tokens.text is not None
        return torch.cat((tokens.text, tokens.image), dim=1)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, H, W): the network says x0 - e, channels lie fastest in a token."""
        both = net.norm_out(laid(self._joined(tokens), tokens.more["order"]), tokens.temb)
        patches = laid(both, tokens.more["back"])[:, -tokens.image.shape[1] :]
        return -passes.unpack_channels_last(patches, self.patch, tokens.size)

    def with_guidance(self, without: Tensor, with_text: Tensor, scale: float) -> Tensor:
        """Guide, and keep the length of every row of what is predicted with text, as the pipeline does."""
        guided = super().with_guidance(without, with_text, scale)
        return guided * (with_text.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    # ------------------------------------------------------------------ the original layout

    def largest_side(self) -> int:
        """Return the longest side in pixels that there are positions for."""
        return int(self.token * min(self.source.complete(self.denoiser)["axes_lens"][1:]))

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        width, entering = shapes["x_embedder.weight"]
        shapes["layers.0.adaLN_modulation.1.weight"]  # one layer further than in what else has these names
        head = shapes["layers.0.attention.q_norm.weight"][0]
        return {
            "in_channels": entering // 4,
            "hidden_size": width,
            "num_layers": count(shapes, r"layers\.(\d+)\."),
            "num_refiner_layers": count(shapes, r"noise_refiner\.(\d+)\."),
            "num_attention_heads": width // head,
            "num_kv_heads": (shapes["layers.0.attention.qkv.weight"][0] - width) // 2 // head,
            "axes_dim_rope": [head // 3] * 3,
            "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        }

    keys = """
x_embedder = x_embedder
time_caption_embed.timestep_embedder.linear_1 = t_embedder.mlp.0
time_caption_embed.timestep_embedder.linear_2 = t_embedder.mlp.2
time_caption_embed.caption_embedder.0 = cap_embedder.0
time_caption_embed.caption_embedder.1 = cap_embedder.1
norm_out.linear_1 = final_layer.adaLN_modulation.1
norm_out.linear_2 = final_layer.linear
""" + "".join(
        line.replace("@", member)
        for member in ("context_refiner", "noise_refiner", "layers")
        for line in (
            "@.{}.attn.to_q + @.{}.attn.to_k + @.{}.attn.to_v = @.{}.attention.qkv\n",
            "@.{}.attn.to_out.0 = @.{}.attention.out\n",
            "@.{}.attn.norm_q = @.{}.attention.q_norm\n@.{}.attn.norm_k = @.{}.attention.k_norm\n",
            "@.{}.feed_forward.linear_1 = @.{}.feed_forward.w1\n",
            "@.{}.feed_forward.linear_2 = @.{}.feed_forward.w2\n",
            "@.{}.feed_forward.linear_3 = @.{}.feed_forward.w3\n",
            "@.{}.norm1 = @.{}.attention_norm1\n" if member == "context_refiner" else "@.{}.norm1.norm = @.{}.attention_norm1\n",
            "@.{}.norm1.linear = @.{}.adaLN_modulation.1\n",
            "@.{}.norm2 = @.{}.attention_norm2\n",
            "@.{}.ffn_norm1 = @.{}.ffn_norm1\n@.{}.ffn_norm2 = @.{}.ffn_norm2\n",
        )
    )  # fmt: skip
