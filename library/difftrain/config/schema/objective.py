"""Sections about what is learnt: loss, noise, time, speed-ups, averages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from difftrain.config.schema.section import EmaWidth, NonNegative, PositiveInt, Section


class LossSection(Section):
    """How an error is measured, and what a sample's weighs."""

    type: Literal["l1", "l2", "huber", "smooth_l1", "pseudo_huber", "huber_delta", "smooth_l1_beta"] = Field(
        "l2", description="how an error is measured; huber and smooth_l1 are smooth"
    )
    pseudo_huber_c: Annotated[float, Field(gt=0)] | None = Field(
        None, description="of pseudo_huber: sqrt(d^2 + c^2) - c"
    )
    bend: Annotated[float, Field(gt=0)] | None = Field(
        None, description="error beyond which huber_delta and smooth_l1_beta are linear; unset: 1"
    )
    mask_mean: Literal["mask", "all"] = Field(
        "mask", description="a masked sample's mean is over its mask, or over all"
    )
    text_recon_gamma: NonNegative = Field(0.0, description="weight of text reconstruction (SD3-Light); 0: off")
    text_recon_target_layer: Annotated[int, Field(ge=0)] = Field(
        0, description="its target: 0: output of the context embedder; k: output of block k"
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = Field(
        "snr", description="how the threshold of huber and smooth_l1 follows the timestep"
    )
    huber_c: Annotated[float, Field(gt=0)] = Field(
        0.1, description="that threshold: the constant one, or where the schedule ends"
    )
    huber_scale: Annotated[float, Field(gt=0)] = Field(
        1.0, description="factor of the threshold; none with {loss.huber_schedule=snr}, as in kohya's"
    )
    masked: bool = Field(
        False, description="masks of {data.conditioning_dir} count; those of {data.alpha_mask=true} always do"
    )
    prior_weight: NonNegative = Field(1.0, description="weight of the loss of regularisation images")
    min_snr_gamma: NonNegative | None = Field(None, description="min-SNR weighting with this gamma; 0: off")
    min_snr_plus_one: bool = Field(
        False,
        description="for v-prediction {loss.min_snr_gamma} cuts SNR + 1, as in diffusers' examples, in place of the SNR",
    )
    scale_v_pred_like_noise_pred: bool = Field(False, description="weigh a v-prediction's loss by SNR / (SNR + 1)")
    v_pred_like: NonNegative | None = Field(
        None, description="weigh an epsilon prediction's loss by 1 + this (SNR + 1) / SNR; 0: off"
    )
    debiased_estimation: bool = Field(False, description="weigh by 1 / sqrt(SNR), or 1 / (SNR + 1) for v-prediction")


class FlowSection(Section):
    """How the time t in (0, 1) of a rectified flow is drawn; the model sees 1000 t."""

    timestep_sample_method: Literal["logit_normal", "uniform", "mode", "cosmap"] = Field(
        "logit_normal", description="how the time of a flow is sampled"
    )
    sigmoid_scale: Annotated[float, Field(gt=0)] = Field(
        1.0, description="width of logit_normal: t = sigmoid(scale * normal)"
    )
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = Field(1.29, description="scale of mode")
    shift: Annotated[float, Field(gt=0)] | None = Field(None, description="t <- s t / (1 + (s - 1) t)")
    flux_shift: bool = Field(False, description="the shift follows the number of latent tokens")
    min_t: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="lowest time that is trained")
    max_t: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="highest time that is trained")


class NoiseSection(Section):
    """What is mixed into the latents, and how far."""

    offset: NonNegative | None = Field(
        None, description="shift the noise of each channel by this times a normal; about 0.05; 0: off"
    )
    offset_random_strength: bool = Field(
        False, description="sample that strength per image, between 0 and {noise.offset}"
    )
    adaptive_scale: float | None = Field(
        None, description="add this times |mean of the channel's latents| to {noise.offset}; the sum is at least 0"
    )
    multires_iterations: Annotated[int, Field(ge=0)] | None = Field(
        None, description="add this many levels of coarser noise; 6 to 10; 0: off"
    )
    multires_discount: NonNegative = Field(0.3, description="strength of a level as a share of the one before")
    ip_gamma: NonNegative | None = Field(
        None, description="perturb the input by this much more noise than the target has; about 0.1; 0: off"
    )
    ip_gamma_random_strength: bool = Field(
        False, description="sample that strength per image, between 0 and {noise.ip_gamma}"
    )
    zero_terminal_snr: bool = Field(
        False, description="the last timestep is all noise; for {model.prediction_type=v_prediction}"
    )
    min_timestep: Annotated[int, Field(ge=0, le=999)] | None = Field(
        None, description="lowest timestep that is trained; unset: 0"
    )
    max_timestep: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="end of the timesteps that are trained, itself not one; unset: 1000"
    )


class RepaSection(Section):
    """Alignment of hidden image tokens with a frozen image encoder's (Yu et al. 2024)."""

    encoder: str | None = Field(None, description="folder of a transformers vision model; unset: off")
    weight: NonNegative = Field(0.5, description="weight of the alignment in the loss")
    layer: PositiveInt = Field(4, description="block whose image tokens are aligned, counted from 1")
    hidden: PositiveInt = Field(2048, description="width of the projector between the two")
    until_step: PositiveInt | None = Field(None, description="so many steps; then the term is off")


class TreadSection(Section):
    """Token routing: some image tokens pass by the blocks from start to end (Krause et al. 2025)."""

    share: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of the image tokens that are routed; 0: off")
    start: PositiveInt = Field(2, description="first block that routed tokens pass by, counted from 1")
    end: PositiveInt | None = Field(None, description="last such block; unset: two before the last")


class PatchMaskingSection(Section):
    """Deferred patch masking: the first blocks mix all patches, the others see some (Sehwag et al. 2024)."""

    share: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of the patches that are left out; 0: off")
    mixer_layers: PositiveInt = Field(2, description="blocks that see all patches")
    until_step: PositiveInt | None = Field(None, description="so many steps; then all patches are seen")


class EmaSection(Section):
    """A moving average of the trained weights."""

    enable: bool = Field(False, description="keep a moving average of the weights and export it too")
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(0.9999, description="decay of the moving average in one update")
    update_every: PositiveInt = Field(1, description="steps between two updates of the moving average")
    ramp: bool = Field(
        False,
        description="the first update copies the weights, the n-th after it decays by (1 + n) / (10 + n), at most"
        " {ema.decay}: diffusers' EMAModel",
    )
    profiles: tuple[EmaWidth, ...] = Field(
        (),
        description="widths of power-function averages kept as well, as fractions of the run: 0.05,0.10; difftrain export --ema_width",
    )
    snapshot_precision: Literal["float", "fp16"] = Field(
        "fp16", description="precision of the snapshots that {ema.profiles} stores at every save"
    )
