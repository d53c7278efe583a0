"""Many pictures of one size in one call of a pipeline: for measuring what a model draws, where one by one takes long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from difftrain.sampling import draw
from difftrain.sampling.grid import modules_of, tokens_of
from difftrain.sampling.samplers import make_sampler

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.contracts import Drawer


def draw_batch(
    pipeline: Any, captions: Sequence[str], noise: Tensor, *, size_hw: tuple[int, int], steps: int, guidance: float,
    sampler: str, seeds: Sequence[int],
) -> Tensor:  # fmt: skip
    """Draw captions from noise that is given, with the pipeline's own unconditional where there is guidance.

    seeds: of what a sampler draws on its way. The caller may hold autocast: the VAE is decoded outside of it.
    Shapes: noise (B, C, h, w) on the pipeline's device; (B, 3, H, W) in 0..1, fp32.
    """
    if hasattr(pipeline, "predict"):
        return _drawn(pipeline, captions, noise, size_hw, steps, guidance, sampler, seeds)
    pipeline.set_progress_bar_config(disable=True)
    kept = pipeline.scheduler
    height, width = size_hw
    try:
        with draw.evaluating(modules_of(pipeline)), torch.no_grad():
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


def _drawn(
    model: Drawer, captions: Sequence[str], noise: Tensor, size_hw: tuple[int, int], steps: int, guidance: float,
    sampler: str, seeds: Sequence[int],
) -> Tensor:  # fmt: skip
    stepper = make_sampler(sampler, model.scheduler.config, model.tokens(size_hw))
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    with draw.evaluating(model.modules), torch.no_grad():
        nothing = model.unconditional([""] * len(captions), size_hw) if guidance > 1 else None
        latents = draw.walk(
            model, model.conditions(list(captions), size_hw), nothing, noise, sampler=stepper, steps=steps,
            guidance=guidance, generator=generators,
        )  # fmt: skip
        return model.decode(latents)


def decode_latents(model: Any, latents: Tensor) -> Tensor:
    """Turn a model's latents into pixels in 0..1."""
    return model.decode(latents) if hasattr(model, "predict") else decoded(model.vae, latents)


def decoded(vae: Any, latents: Tensor) -> Tensor:
    """Turn scaled latents into pixels in 0..1, in the VAE's own dtype."""
    with torch.autocast(latents.device.type, enabled=False):
        raw = latents.to(next(vae.parameters()).dtype) / vae.config.scaling_factor
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        pixels = vae.decode(raw + shift, return_dict=False)[0].float()
    return (pixels / 2 + 0.5).clamp(0, 1)
