"""Many pictures of one size in one call: for measuring what a model draws, where one by one takes long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from difftrain.sampling import draw
from difftrain.sampling.samplers import make_sampler

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.contracts import Drawer


def draw_batch(
    model: Drawer, captions: Sequence[str], noise: Tensor, *, size_hw: tuple[int, int], steps: int, guidance: float,
    sampler: str, seeds: Sequence[int], spacing: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw captions from noise that is given, with the model's own unconditional where there is guidance.

    seeds: of what a sampler draws on its way. spacing: diffusers' timestep_spacing, in place of the model's own. The
    caller may hold autocast: the VAE is decoded outside of it.
    Shapes: noise (B, C, h, w) on the model's device; (B, 3, H, W) in 0..1, fp32.
    """
    config = {**model.scheduler.config, **({"timestep_spacing": spacing} if spacing else {})}
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    with draw.evaluating(model.modules), torch.no_grad():
        conditions = model.conditions(list(captions), size_hw)
        latents = draw.walk(
            model,
            conditions,
            model.unconditional([""] * len(captions), conditions, size_hw) if guidance > 1 else None,
            noise,
            sampler=make_sampler(sampler, config, model.tokens(size_hw)),
            steps=steps,
            guidance=guidance,
            generator=generators,
        )
        return model.decode(latents)
