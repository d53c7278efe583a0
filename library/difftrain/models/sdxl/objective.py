"""What is learnt: the noise that is mixed in, what a sample's loss weighs, and how its error is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from difftrain.contracts import Batch, DrawSpec, Inputs, NoiseMix
from difftrain.diffusion import ddpm, losses, weights

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.config.sections import LossSection, NoiseSection

OFFSET, OFFSET_STRENGTH, PERTURBATION, PERTURBATION_STRENGTH = (
    "noise_offset", "noise_offset_strength", "ip_noise", "ip_noise_strength",
)  # fmt: skip


def noise_draws(section: NoiseSection, plain: Mapping[str, DrawSpec]) -> dict[str, DrawSpec]:
    """Return the host draws of a run: the plain ones, and what its noises want beside or in them."""
    found = dict(plain)
    noise, timestep = plain["noise"], plain["timestep"]
    adaptive = _is_adaptive(section)
    mix = NoiseMix(
        offset=0.0 if adaptive else section.offset or 0.0,
        offset_random=section.offset_random_strength,
        iterations=section.multires_iterations or 0,
        discount=section.multires_discount,
        normalise=not adaptive,
    )
    if mix.offset or mix.iterations:
        found["noise"] = replace(noise, mix=mix)
    if adaptive:  # waits for the latents
        found[OFFSET] = replace(noise, factor=0)
        if section.offset_random_strength:
            found[OFFSET_STRENGTH] = DrawSpec("uniform")
    if section.ip_gamma:
        found[PERTURBATION] = noise
        if section.ip_gamma_random_strength:
            found[PERTURBATION_STRENGTH] = DrawSpec("uniform")
    found["timestep"] = replace(
        timestep, low=section.min_timestep or 0, high=min(section.max_timestep or timestep.high, timestep.high)
    )
    return found


def _is_adaptive(section: NoiseSection) -> bool:
    return bool(section.offset and section.adaptive_scale)


def noise_of(section: NoiseSection, batch: Batch, latents: Tensor) -> Tensor:
    """Return the noise of a batch: the host's, and where the offset follows the latents, that too.

    Its strength is offset + adaptive_scale |mean of the channel|, never below 0; levels of lower resolution are in the
    host's noise, and the sum is brought to unit deviation here.
    """
    noise = batch.draws["noise"].float()
    if not _is_adaptive(section):
        return noise
    strength = _strength(section.offset or 0.0, OFFSET_STRENGTH, batch)
    strength = strength + (section.adaptive_scale or 0.0) * latents.mean(dim=(2, 3), keepdim=True).abs()
    noise = noise + strength.clamp(min=0.0) * batch.draws[OFFSET]
    if section.multires_iterations:
        noise = noise / noise.flatten(1).std(1).view(-1, 1, 1, 1)
    return noise


def perturbed(section: NoiseSection, batch: Batch, noise: Tensor) -> Tensor:
    """Return the noise of the input where it is perturbed: the target keeps its own. Source: Ning et al. 2023."""
    if not section.ip_gamma:
        return noise
    return noise + _strength(section.ip_gamma, PERTURBATION_STRENGTH, batch) * batch.draws[PERTURBATION]


def _strength(full: float, draw: str, batch: Batch) -> Tensor:
    """Return a strength, (B or 1, 1, 1, 1): the full one, or each sample's share of it where it is drawn."""
    if draw in batch.draws:
        return (batch.draws[draw] * full).view(-1, 1, 1, 1)
    return torch.full((1, 1, 1, 1), full, device=batch.draws["noise"].device)


def weight_of(cfg: TrainConfig, batch: Batch, t: Tensor) -> Tensor:
    """Return the weight of each sample's loss, (B,) fp32: by its noise, and by the source that it comes from."""
    section, kind = cfg.loss, cfg.model.prediction_type
    snr = ddpm.tables(t.device).snr[t]
    weight = torch.ones(len(t), device=t.device)
    if section.min_snr_gamma:
        weight = weight * weights.min_snr(snr, section.min_snr_gamma, kind)
    if section.scale_v_pred_like_noise_pred:
        weight = weight * weights.like_noise_prediction(snr)
    if section.v_pred_like:
        weight = weight * weights.plus_like_velocity(snr, section.v_pred_like)
    if section.debiased_estimation:
        weight = weight * weights.debiased(snr, kind)
    if "loss_weight" in batch.features:
        weight = weight * batch.features["loss_weight"]
    return weight


def table_of(section: NoiseSection, device: torch.device) -> ddpm.Tables:
    """Return the process that is trained."""
    return ddpm.tables(device, section.zero_terminal_snr)


def mask_of(batch: Batch, latents: Tensor) -> Tensor | None:
    """Return the mask of the loss at the latents' size, where there is one."""
    height, width = latents.shape[-2:]
    return None if batch.loss_mask is None else losses.mask_at(batch.loss_mask, (height, width))


def sample_losses(section: LossSection, table: ddpm.Tables, prediction: Tensor, inputs: Inputs) -> Tensor:
    """Return the loss of each sample, not weighed yet, (B,) fp32."""
    c = None
    if section.type in ("huber", "smooth_l1"):
        c = losses.threshold(table, inputs.timestep, section.huber_schedule, section.huber_c, section.huber_scale)
    elif (fixed := losses.fixed_threshold(section)) is not None:
        c = torch.full(inputs.timestep.shape, fixed, device=inputs.timestep.device)
    error = losses.elementwise(prediction.float(), inputs.target.float(), section.type, c)
    return losses.per_sample(error, inputs.mask, section.mask_mean)
