"""Cosmos-Predict2, image to video (NVIDIA 2025): a clip goes on from its first frame, which stands without noise among the tokens.

One more channel says which frames are given. What the network says of these is not used, and nothing is learnt of them.
A picture is drawn from its text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch, Inputs
from difftrain.models.facts import Agree
from difftrain.models.families.cosmos_predict2 import CosmosPredict2
from difftrain.models.passes import Tokens
from difftrain.models.shown_frames import FRAMES

if TYPE_CHECKING:
    from torch import Tensor

CLEAN_SIGMA = 1e-4  # sigma that a given frame is said to have
# of the releases, by their heads: no tensor says it
_ROPE_SCALES = {16: [1.0, 3.0, 3.0], 40: [20 / 24, 2.0, 2.0]}


class CosmosPredict2Video(CosmosPredict2):
    """What differs from text to image: given frames, a time for every frame, and positions in time."""

    name = "cosmos_predict2_video"
    modelspec = "cosmos-predict2-video2world"
    fps = 16.0  # of the releases
    agree = (
        Agree("transformer.in_channels", lambda s: s["vae"]["z_dim"] + 1, "the VAE's z_dim, and one for given frames"),
        *(row for row in CosmosPredict2.agree if row.where != "transformer.in_channels"),
    )

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, F, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, J), temb (B, N, 3 D)."""
        # --- which frames are given: the first of a clip
        mask = torch.zeros_like(x_t[:, :1])
        if x_t.shape[2] > 1:
            mask[:, :, 0] = 1.0
        latents = conditions[FRAMES][:, -x_t.shape[1] :]
        times = (
            mask[:, :, :, :1, :1] * (CLEAN_SIGMA / (CLEAN_SIGMA + 1))
            + (1 - mask[:, :, :, :1, :1]) * t.view(-1, 1, 1, 1, 1) / 1000.0
        )
        x = mask * latents + (1 - mask) * x_t

        # --- tokens
        channels = (x, mask, torch.zeros_like(mask)) if net.config.concat_padding_mask else (x, mask)
        image = net.patch_embed(torch.cat(channels, dim=1))  # (B, F, h, w, D)
        size = tuple(image.shape[1:4])
        image = image.flatten(1, 3)
        temb, time = (
            made.view(len(image), size[0], 1, 1, -1).expand(-1, -1, *size[1:], -1).flatten(1, 3)
            for made in net.time_embed(image, times.flatten())
        )
        more = {"time": time, "mask": mask, "given": mask * (x_t - latents) / (t.view(-1, 1, 1, 1, 1) / 1000.0)}
        rope = self.rope(net, tuple(x_t.shape[2:]), x_t.device)
        return Tokens(image, conditions["tokens"], temb, size, rope=rope, more=more)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, F, H, W): of given frames that which leads to them."""
        return (1 - tokens.more["mask"]) * super().leave(net, tokens) + tokens.more["given"]

    def noised(self, batch: Batch, latents: Tensor, conditions: dict[str, Tensor]) -> Inputs:
        """Noise latents, and learn nothing of a clip's first frame."""
        made = super().noised(batch, latents, conditions)
        if latents.shape[2] == 1:
            return made
        learnt = torch.ones_like(latents[:, :1])
        learnt[:, :, 0] = 0.0
        return replace(made, mask=learnt if made.mask is None else learnt * made.mask)

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export."""
        return 'image=reference, prompt="a red cat", num_frames=5, output_type="pil"'

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        sizes = CosmosPredict2.infer(shapes)
        return sizes | {"rope_scale": _ROPE_SCALES.get(sizes["num_attention_heads"], _ROPE_SCALES[16])}
