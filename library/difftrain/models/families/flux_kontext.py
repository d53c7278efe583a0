"""Flux.1 Kontext (Black Forest Labs 2025): Flux.1 that edits an image, whose tokens stand behind those that are drawn.

Tokens of a reference have the rows and columns of their own image and its number, from 1 on, on the first axis of
positions, where drawn ones have 0. Source: diffusers, pipelines/flux/pipeline_flux_kontext.py, which takes one reference;
further ones are numbered on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import control_name
from difftrain.models import passes
from difftrain.models.families.flux import Flux
from difftrain.models.passes import Tokens

if TYPE_CHECKING:
    from torch import Tensor


class FluxKontext(Flux):
    """The facts of Flux.1 Kontext where they are not Flux.1's."""

    name = "flux_kontext"
    modelspec = "flux-1-kontext-dev"

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t and references (B, C, h, w), t (B,) in 0..1000 -> image (B, N, D) of all."""
        shown = [conditions[name] for number in range(self.num_control) if (name := control_name(number)) in conditions]
        images = torch.cat([passes.pack(one, self.patch) for one in (x_t, *shown)], dim=1)
        sizes = [(one.shape[-2] // self.patch, one.shape[-1] // self.patch) for one in (x_t, *shown)]
        temb = net.time_text_embed(t, *self._guidance(net, t, conditions), conditions["pooled"])
        text = net.context_embedder(conditions["tokens"])
        rope = self.rope(net, tuple(sizes), text.shape[1], x_t.device)
        return Tokens(net.x_embedder(images), text, temb, sizes[0], rope=rope)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity of the image that is drawn, (B, C, H, W)."""
        out = net.proj_out(net.norm_out(tokens.image, tokens.temb))
        return passes.unpack(out[:, : tokens.size[0] * tokens.size[1]], self.patch, tokens.size)
