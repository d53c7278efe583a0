"""Wan 2.1, image to video (Alibaba 2025): Wan's network beside the latents of the first frame, which CLIP-H sees as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.facts import Agree
from difftrain.models.families.wan import Wan
from difftrain.models.shown_frames import FRAMES, SEEN

if TYPE_CHECKING:
    from torch import Tensor

_TEXT = 512  # tokens: diffusers' blocks take all ahead of the last so many for the image's


class WanI2V(Wan):
    """What differs from text to video: more channels, and the states of an image encoder before those of the text."""

    name = "wan_i2v"
    modelspec = "wan-2.1-i2v"
    frames_encoder = "image_encoder"
    agree = (
        Agree("transformer.in_channels", lambda s: 2 * s["vae"]["z_dim"] + (s["vae"].get("scale_factor_temporal") or 4),
              "noise, a mask of the VAE's frames and the first frame's latents"),
        *(row for row in Wan.agree if row.where != "transformer.in_channels"),
        Agree("transformer.image_dim", lambda s: s["image_encoder"]["hidden_size"], "image_encoder's hidden_size"),
        Agree("transformer.added_kv_proj_dim",
              lambda s: s["transformer"]["num_attention_heads"] * s["transformer"]["attention_head_dim"],
              "the transformer's own width"),
        Agree("transformer.pos_embed_seq_len", lambda s: None, 'with positions of two images it is type = "wan_flf2v"'),
    )  # fmt: skip

    def entering(self, x_t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Put what is known of the clip behind the noisy one, channel by channel."""
        return torch.cat((x_t, conditions[FRAMES].to(x_t.dtype)), dim=1)

    def contexts(self, conditions: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the text, filled up to the length that the blocks count on, and the states of each image."""
        text, seen = conditions["tokens"], conditions.get(SEEN)
        if seen is None:  # Wan 2.2 has no image encoder
            return (text,)
        text = torch.nn.functional.pad(text, (0, 0, 0, _TEXT - text.shape[1]))
        return text, seen.unflatten(1, (self.row.shown_frames, -1)).flatten(0, 1)

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export."""
        return 'image=reference, prompt="a red cat", num_frames=5, output_type="pil"'

    @classmethod
    def infer(cls, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        sizes = cls.sizes_of(shapes) | {"image_dim": shapes["img_emb.proj.0.weight"][0]}
        sizes["added_kv_proj_dim"] = shapes["img_emb.proj.4.weight"][0]
        if "img_emb.emb_pos" in shapes:
            sizes["pos_embed_seq_len"] = shapes["img_emb.emb_pos"][1]
        return sizes
