"""HunyuanVideo-1.5, image to video (Tencent 2025): the network goes on from a first frame, which SigLIP sees as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.facts import Agree
from difftrain.models.families.hunyuan_video_15 import HunyuanVideo15
from difftrain.models.shown_frames import FRAMES, SEEN

if TYPE_CHECKING:
    from torch import Tensor


class HunyuanVideo15I2V(HunyuanVideo15):
    """What differs from text to video: the latents of the first frame by itself, and its tokens before the text."""

    name = "hunyuan_video_15_i2v"
    modelspec = "hunyuan-video-1.5-i2v"
    frames_encoder = "image_encoder"
    frame_alone = True
    unread = r"^transformer_blocks\.{last}\.(ff_context|attn\.to_add_out)\."
    agree = (
        *HunyuanVideo15.agree,
        Agree(
            "transformer.image_embed_dim", lambda s: s["image_encoder"]["hidden_size"], "image_encoder's hidden_size"
        ),
    )

    def entering(self, x_t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Put the first frame's latents behind the noisy clip, then the mask that says which they are."""
        mask, latents = conditions[FRAMES].to(x_t.dtype).split((1, x_t.shape[1]), dim=1)
        return torch.cat((x_t, latents, mask), dim=1)

    def seen(self, net: Any, conditions: dict[str, Tensor]) -> Tensor:
        """Return the tokens of the first frame as SigLIP sees it, (B, S, D)."""
        made: Tensor = net.image_embedder(conditions[SEEN])
        return made

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export."""
        return 'image=reference, prompt="a red cat", num_frames=5, output_type="pil"'
