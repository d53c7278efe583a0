"""Sections about what is learnt: loss, noise, time, speed-ups, averages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from difftrain.config.schema.section import EmaWidth, NonNegative, PositiveInt, Section


class LossSection(Section):
    """How an error is measured, and what a sample's weighs."""

    type: Literal["l1", "l2", "huber", "smooth_l1", "pseudo_huber", "huber_delta", "smooth_l1_beta"] = "l2"
    pseudo_huber_c: Annotated[float, Field(gt=0)] | None = Field(
        None, description="of pseudo_huber: sqrt(d^2 + c^2) - c"
    )
    bend: Annotated[float, Field(gt=0)] | None = Field(
        None, description="error beyond which huber_delta and smooth_l1_beta are linear; unset: 1"
    )
    mask_mean: Literal["mask", "all"] = Field(
        "mask", description="a masked sample's mean is over its mask, or over all"
    )
    text_recon_gamma: NonNegative = 0.0
    text_recon_target_layer: Annotated[int, Field(ge=0)] = 0
    huber_schedule: Literal["constant", "exponential", "snr"] = "snr"
    huber_c: Annotated[float, Field(gt=0)] = 0.1
    huber_scale: Annotated[float, Field(gt=0)] = 1.0
    masked: bool = Field(False, description="masks of data.conditioning_dir count; those of alpha_mask always do")
    prior_weight: NonNegative = Field(1.0, description="what a regularisation picture's loss is multiplied by")
    min_snr_gamma: NonNegative | None = None  # 0: off, here and below
    scale_v_pred_like_noise_pred: bool = False
    v_pred_like: NonNegative | None = None
    debiased_estimation: bool = False


class FlowSection(Section):
    """How the time t in (0, 1) of a rectified flow is drawn; the model sees 1000 t."""

    timestep_sample_method: Literal["logit_normal", "uniform", "mode", "cosmap"] = "logit_normal"
    sigmoid_scale: Annotated[float, Field(gt=0)] = 1.0
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = 1.29
    shift: Annotated[float, Field(gt=0)] | None = Field(None, description="t <- s t / (1 + (s - 1) t)")
    flux_shift: bool = Field(False, description="the shift follows the number of latent tokens")
    min_t: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_t: Annotated[float, Field(gt=0, le=1)] = 1.0


class NoiseSection(Section):
    """What is mixed into the latents, and how far."""

    offset: NonNegative | None = None  # 0: off, as with every strength here
    offset_random_strength: bool = False
    adaptive_scale: float | None = None
    multires_iterations: Annotated[int, Field(ge=0)] | None = None
    multires_discount: NonNegative = 0.3
    ip_gamma: NonNegative | None = None
    ip_gamma_random_strength: bool = False
    zero_terminal_snr: bool = False
    min_timestep: Annotated[int, Field(ge=0, le=999)] | None = None
    max_timestep: Annotated[int, Field(ge=1, le=1000)] | None = None


class RepaSection(Section):
    """Alignment of hidden picture tokens with a frozen image encoder's (Yu et al. 2024)."""

    encoder: str | None = Field(None, description="folder of a transformers vision model; unset: off")
    weight: NonNegative = Field(0.5, description="of the alignment beside the loss")
    layer: PositiveInt = Field(4, description="block whose picture tokens are aligned, counted from 1")
    hidden: PositiveInt = Field(2048, description="width of the projector between the two")
    until_step: PositiveInt | None = Field(None, description="so many steps; then the term is off")


class TreadSection(Section):
    """Token routing: some picture tokens pass by the blocks from start to end (Krause et al. 2025)."""

    share: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of the picture tokens that are routed; 0: off")
    start: PositiveInt = Field(2, description="first block that routed tokens pass by, counted from 1")
    end: PositiveInt | None = Field(None, description="last such block; unset: two before the last")


class PatchMaskingSection(Section):
    """Deferred patch masking: the first blocks mix all patches, the others see some (Sehwag et al. 2024)."""

    share: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of the patches that are left out; 0: off")
    mixer_layers: PositiveInt = Field(2, description="blocks that see all patches")
    until_step: PositiveInt | None = Field(None, description="so many steps; then all patches are seen")


class EmaSection(Section):
    """A moving average of the trained weights."""

    enable: bool = False
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    update_every: PositiveInt = Field(1, description="steps between two updates of the average; decay is of one update")
    profiles: tuple[EmaWidth, ...] = Field((), description="relative widths of power-function averages")
    snapshot_precision: Literal["float", "fp16"] = "fp16"
