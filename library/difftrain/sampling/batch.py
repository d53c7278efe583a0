"""Many pictures of one size in one call of a pipeline: for measuring what a model draws, where one by one takes long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from difftrain.sampling.grid import evaluating, tokens_of
from difftrain.sampling.samplers import make_sampler

if TYPE_CHECKING:
    from torch import Tensor


def draw_batch(
    pipeline: Any, captions: Sequence[str], noise: Tensor, *, size_hw: tuple[int, int], steps: int, guidance: float,
    sampler: str, seeds: Sequence[int],
) -> Tensor:  # fmt: skip
    """Draw captions from noise that is given, with the pipeline's own unconditional where there is guidance.

    seeds: of what a sampler draws on its way. The caller may hold autocast: the VAE is decoded outside of it.
    Shapes: noise (B, C, h, w) on the pipeline's device; (B, 3, H, W) in 0..1, fp32.
    """
    pipeline.set_progress_bar_config(disable=True)
    kept = pipeline.scheduler
    height, width = size_hw
    try:
        with evaluating(pipeline), torch.no_grad():
            pipeline.scheduler = make_sampler(sampler, kept.config, tokens_of(pipeline, height, width))
            latents = pipeline(
                list(captions),
                height=height,
                width=width,
                num_inference_steps=steps,
                guidance_scale=guidance,
                generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
                latents=noise,
                output_type="latent",
            ).images
            return decoded(pipeline.vae, latents)
    finally:
        pipeline.scheduler = kept


def decoded(vae: Any, latents: Tensor) -> Tensor:
    """Turn scaled latents into pixels in 0..1, in the VAE's own dtype."""
    with torch.autocast(latents.device.type, enabled=False):
        raw = latents.to(next(vae.parameters()).dtype) / vae.config.scaling_factor
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        pixels = vae.decode(raw + shift, return_dict=False)[0].float()
    return (pixels / 2 + 0.5).clamp(0, 1)
