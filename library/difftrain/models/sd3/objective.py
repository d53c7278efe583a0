"""What SD3 learns: the velocity of a rectified flow, and where asked, the text tokens at the end from those before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from difftrain.contracts import METRIC, DrawSpec, Inputs
from difftrain.diffusion import losses
from difftrain.diffusion.flow import FlowTime
from difftrain.models.sd3 import routing

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.config.sections import FlowSection, LossSection
    from difftrain.contracts import Batch

NUM_TEXTS = 3  # encoders, each dropped on its own
DENOISE, TEXT_RECON = "denoise", "text_recon"


def draws(cfg: TrainConfig, channels: int, factor: int, patch: int) -> dict[str, DrawSpec]:
    """Return the host draws of a run: noise, time, the VAE's posterior, which texts are dropped, which tokens stay.

    channels, factor: of the latents. patch: latent pixels along a token's side.
    """
    latent = DrawSpec("normal", channels=channels, factor=factor)
    found = {"noise": latent, "timestep": DrawSpec("uniform", through=time_of(cfg.flow, factor * patch))}
    if cfg.cache.latents_as == "moments":
        found["moments"] = latent
    if cfg.model.enable_uncond_text_dropout:
        found |= {dropping(number): DrawSpec("uniform", trains=True) for number in range(1, NUM_TEXTS + 1)}
    return found | routing.draws(cfg, factor * patch)


def time_of(section: FlowSection, token: int) -> FlowTime:
    """Return how a time is drawn. token: pixels along a token's side."""
    return FlowTime(
        method=section.timestep_sample_method,
        sigmoid_scale=section.sigmoid_scale,
        mode_scale=section.mode_scale,
        shift=section.shift,
        flux_shift=section.flux_shift,
        min_t=section.min_t,
        max_t=section.max_t,
        token=token,
    )


def dropping(number: int) -> str:
    """Name the draw that decides whether a text encoder is dropped: of its tokens and its pooled state alike."""
    return f"uncond_{number}"


def kept(batch: Batch, number: int, probability: float) -> Tensor | None:
    """Tell which samples keep a text encoder's outputs, (B,) bool; None: all, as in evaluation."""
    drawn = batch.draws.get(dropping(number))
    return None if drawn is None else drawn >= probability


def weight_of(batch: Batch, samples: int, device: torch.device) -> Tensor:
    """Return the weight of each sample's loss by the source that it comes from, (B,) fp32."""
    given = batch.features.get("loss_weight")
    return torch.ones(samples, device=device) if given is None else given


def mask_of(batch: Batch, latents: Tensor) -> Tensor | None:
    """Return the mask of the loss at the latents' size, where there is one."""
    height, width = latents.shape[-2:]
    return None if batch.loss_mask is None else losses.mask_nearest(batch.loss_mask, (height, width))


def sums(section: LossSection, outputs: tuple[Tensor, ...], inputs: Inputs) -> dict[str, Tensor]:
    """Sum the terms of the loss over the samples, in fp32; beside them what each is by itself, not weighed by gamma."""
    velocity, *texts = outputs
    denoise = (inputs.weight * denoise_losses(section, velocity, inputs)).sum()
    measured = {f"{METRIC}{DENOISE}_loss": denoise}
    if not texts:
        return {"loss": denoise, **measured}
    last, target = texts
    recon = (inputs.weight * (last.float() - target.float()).square().flatten(1).mean(1)).sum()
    measured[f"{METRIC}{TEXT_RECON}_loss"] = recon
    return {DENOISE: denoise, TEXT_RECON: section.text_recon_gamma * recon, **measured}


def denoise_losses(section: LossSection, velocity: Tensor, inputs: Inputs) -> Tensor:
    """Return the loss of each sample's velocity, not weighed yet, (B,) fp32."""
    fixed = losses.fixed_threshold(section)
    c = None if fixed is None else torch.full(inputs.timestep.shape, fixed, device=velocity.device)
    error = losses.elementwise(velocity.float(), inputs.target.float(), section.type, c)
    return losses.per_sample(error, inputs.mask, section.mask_mean)
