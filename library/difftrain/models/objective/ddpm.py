"""Noise or velocity over 1000 discrete steps (DDPM): what is mixed in, what a sample's loss weighs, how it is measured.

A family takes it by naming DdpmObjective before ModelFamily among its bases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch, DrawSpec, Inputs, NoiseMix
from difftrain.diffusion import ddpm, losses
from difftrain.diffusion.ddpm import BETA_END, BETA_START, STEPS
from difftrain.models.facts import Shift

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.config.schema.sections import LossSection, NoiseSection
    from difftrain.models.weights.source import WeightSource

OFFSET, OFFSET_STRENGTH, PERTURBATION, PERTURBATION_STRENGTH = (
    "noise_offset", "noise_offset_strength", "ip_noise", "ip_noise_strength",
)  # fmt: skip


def noise_draws(section: NoiseSection, plain: Mapping[str, DrawSpec]) -> dict[str, DrawSpec]:
    """Return the host draws of a run: the plain ones, and what its noises want beside or in them."""
    draws = dict(plain)
    noise, timestep = plain["noise"], plain["timestep"]
    adaptive = _is_adaptive(section)
    mix = NoiseMix(
        offset=0.0 if adaptive else section.offset or 0.0,
        offset_random=section.offset_random_strength,
        iterations=section.multires_iterations or 0,
        discount=section.multires_discount,
        normalise=not adaptive,
    )

    # --- mixed into the noise, or drawn beside it
    if mix.offset or mix.iterations:
        draws["noise"] = replace(noise, mix=mix)
    if adaptive:  # waits for the latents
        draws[OFFSET] = replace(noise, factor=0)
        if section.offset_random_strength:
            draws[OFFSET_STRENGTH] = DrawSpec("uniform")
    if section.ip_gamma:
        draws[PERTURBATION] = noise
        if section.ip_gamma_random_strength:
            draws[PERTURBATION_STRENGTH] = DrawSpec("uniform")
    draws["timestep"] = replace(
        timestep, low=section.min_timestep or 0, high=min(section.max_timestep or timestep.high, timestep.high)
    )
    return draws


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
        # levels and offset together make the deviation larger than 1
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
        weight = weight * losses.min_snr(snr, section.min_snr_gamma, kind, plus_one=section.min_snr_plus_one)
    if section.scale_v_pred_like_noise_pred:
        weight = weight * losses.like_noise_prediction(snr)
    if section.v_pred_like:
        weight = weight * losses.plus_like_velocity(snr, section.v_pred_like)
    if section.debiased_estimation:
        weight = weight * losses.debiased(snr, kind)
    if "loss_weight" in batch.features:
        weight = weight * batch.features["loss_weight"]
    return weight


def table_of(section: NoiseSection, device: torch.device) -> ddpm.DdpmTables:
    """Return the process that is trained."""
    return ddpm.tables(device, section.zero_terminal_snr)


def mask_of(batch: Batch, latents: Tensor) -> Tensor | None:
    """Return the mask of the loss at the latents' size, where there is one: the share of each latent pixel."""
    height, width = latents.shape[-2:]
    return None if batch.loss_mask is None else losses.mask_at(batch.loss_mask, (height, width))


def sample_losses(section: LossSection, table: ddpm.DdpmTables, prediction: Tensor, inputs: Inputs) -> Tensor:
    """Return the loss of each sample, not weighed yet, (B,) fp32."""
    c = None
    if section.type in ("huber", "smooth_l1"):
        c = losses.threshold(table, inputs.timestep, section.huber_schedule, section.huber_c, section.huber_scale)
    elif (fixed := losses.fixed_threshold(section)) is not None:
        c = torch.full(inputs.timestep.shape, fixed, device=inputs.timestep.device)
    error = losses.elementwise(prediction.float(), inputs.target.float(), section.type, c)
    return losses.per_sample(error, inputs.mask, section.mask_mean)


class DdpmObjective:
    """What a family of this objective says in place of ModelFamily's flow."""

    cfg: TrainConfig
    source: WeightSource
    shift = Shift(walks=False)  # of a flow's times; here the steps are the table's

    def draws(self, latent: DrawSpec) -> dict[str, DrawSpec]:
        """Return the host draws: noise, the step, and what noises want beside them."""
        plain = {"noise": latent, "timestep": DrawSpec("integer", high=STEPS)}
        return noise_draws(self.cfg.noise, plain)

    def noised(self, batch: Batch, latents: Tensor, conditions: dict[str, Tensor]) -> Inputs:
        """Noise latents to sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) e, with noise or velocity to predict; all in fp32."""
        section, t = self.cfg.noise, batch.draws["timestep"].long()
        noise, table = noise_of(section, batch, latents), table_of(section, latents.device)
        target = ddpm.target(table, latents, noise, t, self.cfg.model.prediction_type)
        # the input sees perturbed noise, the target the plain one
        x_t = ddpm.add_noise(table, latents, perturbed(section, batch, noise), t)
        return Inputs(x_t, t, conditions, target, weight_of(self.cfg, batch, t), mask_of(batch, latents))

    def term_sums(self, outputs: tuple[Tensor, ...], inputs: Inputs) -> dict[str, Tensor]:
        """Sum over samples of weight times the sample's own mean loss, in fp32."""
        table = table_of(self.cfg.noise, inputs.timestep.device)
        return {"loss": (inputs.weight * sample_losses(self.cfg.loss, table, outputs[0], inputs)).sum()}

    def scheduler(self) -> Any:
        """Make the scheduler that samplers take their settings from, and that exports hold."""
        from diffusers import EulerDiscreteScheduler

        return EulerDiscreteScheduler(**scheduler_config(self.cfg))

    def stored_fields(self) -> dict[str, Any]:
        """Return what weights say that they predict, and of their noise: in a folder's scheduler, or a file's header or marks."""
        file, scheduler, fields = self.source.single_file, self.source.scheduler, {}
        header = file.header if file is not None else {}
        marks = file.marks if file is not None else frozenset()
        kind = {"v": "v_prediction", "epsilon": "epsilon"}.get(header.get("modelspec.prediction_type", ""))
        kind = "v_prediction" if "v_pred" in marks else scheduler.get("prediction_type") or kind
        if kind in ("epsilon", "v_prediction"):
            fields["model.prediction_type"] = kind
        if scheduler.get("rescale_betas_zero_snr") or "ztsnr" in marks or header.get("ss_zero_terminal_snr") == "True":
            fields["noise.zero_terminal_snr"] = True
        if (layer := header.get("modelspec.encoder_layer", "")).isdecimal():
            fields["model.clip_skip"] = int(layer)
        return fields

    def header_facts(self) -> dict[str, str | None]:
        """Return what modelspec says of the objective; min and max of a model that is trained on part of the noise levels."""
        low, high = self.cfg.noise.min_timestep, self.cfg.noise.max_timestep
        return {
            "prediction_type": "v" if self.cfg.model.prediction_type == "v_prediction" else "epsilon",
            "encoder_layer": str(self.cfg.model.clip_skip) if self.cfg.model.clip_skip else None,
            "timestep_range": None if low is None and high is None else f"{low or 0},{STEPS if high is None else high}",
        }

    def objective_facts(self) -> dict[str, Any]:
        """Return what a header says of the loss and the noise, under kohya's names."""
        loss, noise = self.cfg.loss, self.cfg.noise
        return {
            "loss_type": loss.type,
            "huber_schedule": loss.huber_schedule,
            "huber_c": loss.huber_c,
            "huber_scale": loss.huber_scale,
            "min_snr_gamma": loss.min_snr_gamma,
            "debiased_estimation": loss.debiased_estimation,
            "noise_offset": noise.offset,
            "noise_offset_random_strength": noise.offset_random_strength,
            "adaptive_noise_scale": noise.adaptive_scale,
            "multires_noise_iterations": noise.multires_iterations,
            "multires_noise_discount": noise.multires_discount,
            "ip_noise_gamma": noise.ip_gamma,
            "ip_noise_gamma_random_strength": noise.ip_gamma_random_strength,
            "zero_terminal_snr": noise.zero_terminal_snr,
        }


def scheduler_config(cfg: TrainConfig) -> dict[str, Any]:
    """Return the arguments that diffusers' schedulers understand; those of zero terminal SNR only where asked for.

    With it the last timestep has no signal, and only "trailing" starts there: Lin et al. 2024, section 3.3.
    """
    shared = {
        "num_train_timesteps": STEPS,
        "beta_start": BETA_START,
        "beta_end": BETA_END,
        "beta_schedule": "scaled_linear",
        "prediction_type": cfg.model.prediction_type,
        "timestep_spacing": "leading",
        "steps_offset": 1,
    }
    if cfg.noise.zero_terminal_snr:
        shared |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return shared
