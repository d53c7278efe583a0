"""Losses of one sample: l2, l1, pseudo-Huber ones, whose threshold may follow the timestep, and torch's own.

Source: kohya's definitions. Its huber is 2 c (sqrt(e^2 + c^2) - c), about e^2 for small errors e and 2 c |e| for large
ones; its smooth_l1 is the same over c, about e^2 / c and 2 |e|. huber_delta and smooth_l1_beta are torch's: e^2 / 2, and
linear beyond the threshold; the second is the first over the threshold.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from difftrain.config import LossSection
from difftrain.diffusion.ddpm import STEPS, DdpmTables

TYPES = ("l2", "l1", "huber", "smooth_l1", "pseudo_huber", "huber_delta", "smooth_l1_beta")
SCHEDULES = ("constant", "exponential", "snr")
_SMALLEST_MASK = 1e-6  # of a sample's sum: below any mask of 8 bits, and a division by nothing gives nothing


def threshold(table: DdpmTables, t: Tensor, schedule: str, c: float, scale: float) -> Tensor:
    """Return the threshold c of each sample, (B,) fp32.

    constant: scale c. exponential: scale at t = 0 falling to scale c at the end. snr: (1 - c) / (1 + sigma / alpha)^2
    + c, which knows no scale (kohya).
    """
    if schedule == "constant":
        return torch.full(t.shape, scale * c, device=t.device)
    if schedule == "exponential":
        return torch.exp(t * (math.log(c) / STEPS)) * scale
    if schedule == "snr":
        # sigma / alpha of the timestep, from the product of 1 - beta
        left = table.alphas_cumprod[t]
        return (1.0 - c) / (1.0 + ((1.0 - left) / left).sqrt()).square() + c
    raise ValueError(f"a threshold's schedule is one of {', '.join(SCHEDULES)}, got {schedule!r}")


def fixed_threshold(section: LossSection) -> float | None:
    """Return the threshold of a loss whose threshold is the same at all times, or nothing for the others."""
    bend = 1.0 if section.bend is None else section.bend
    c = section.pseudo_huber_c or section.huber_c
    return {"pseudo_huber": c, "huber_delta": bend, "smooth_l1_beta": bend}.get(section.type)


def elementwise(prediction: Tensor, target: Tensor, kind: str, c: Tensor | None = None) -> Tensor:
    """Return the loss of every element. Shapes: prediction, target (B, ...), c (B,) for huber and smooth_l1."""
    error = prediction - target
    if kind == "l2":
        return error.square()
    if kind == "l1":
        return error.abs()
    if kind not in TYPES or c is None:
        raise ValueError(f"a loss is one of {', '.join(TYPES)}, all but l2 and l1 with a threshold; got {kind!r}")
    c = c.view(-1, *(1,) * (error.ndim - 1))
    if kind in ("huber_delta", "smooth_l1_beta"):
        size = error.abs()
        # a parabola up to the threshold, from there the line that touches it
        straight = torch.where(size < c, 0.5 * error.square(), c * (size - 0.5 * c))
        return straight if kind == "huber_delta" else straight / c
    # pseudo-Huber: a hyperbola, smooth at the threshold
    bent = (error.square() + c.square()).sqrt() - c
    return bent if kind == "pseudo_huber" else 2.0 * c * bent if kind == "huber" else 2.0 * bent


def per_sample(loss: Tensor, mask: Tensor | None = None, over: str = "mask") -> Tensor:
    """Return each sample's own mean: of a masked one over its mask, or over all its elements.

    Shapes: loss (B, C, H, W), mask (B, 1, H, W) -> (B,). The mean is the sample's own, so that no split of the batch
    changes it. over: "mask" divides by the mask's sum, and a mask of zeros gives 0; "all" by the number of elements,
    so that a sample counts by how much of it the mask keeps.
    """
    if mask is None:
        return loss.flatten(1).mean(1)
    # channels first: a mask has one, and counts cells
    weighed = loss.mean(1, keepdim=True) * mask
    if over == "all":
        return weighed.flatten(1).mean(1)
    return weighed.flatten(1).sum(1) / mask.flatten(1).sum(1).clamp(min=_SMALLEST_MASK)


def mask_at(mask: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Bring a mask to another size: the share of each cell that it covers. Shapes: (B, 1, H, W) -> (B, 1, h, w)."""
    return torch.nn.functional.interpolate(mask.float(), size=size_hw, mode="area")


def mask_nearest(mask: Tensor, size_hw: tuple[int, int]) -> Tensor:
    """Bring a mask to another size: the value at the middle of each cell. Shapes: (B, 1, H, W) -> (B, 1, h, w)."""
    return torch.nn.functional.interpolate(mask.float(), size=size_hw, mode="nearest-exact")


# --- Weights of a sample's loss by its signal-to-noise ratio, as kohya has them. Shapes: all (B,) fp32, like the SNR
# Every one is a factor; several together multiply. The SNR is that of the plain schedule, also where training uses zero
# terminal SNR: there the ratio ends at 0, which most of these cannot take, and kohya weighs so too.


HIGHEST_SNR = 1000.0  # kohya's: steps with less noise than this all weigh as if they had it


def min_snr(snr: Tensor, gamma: float, prediction_type: str, *, plus_one: bool = False) -> Tensor:
    """Return min(SNR, gamma) / SNR for epsilon, over SNR + 1 for v. Source: Hang et al. 2023 (arXiv 2303.09556).

    plus_one: for v min(SNR + 1, gamma) / (SNR + 1), as diffusers' examples have it.
    """
    if _is_epsilon(prediction_type):
        return snr.clamp(max=gamma) / snr
    return (snr + 1.0 if plus_one else snr).clamp(max=gamma) / (snr + 1.0)


def debiased(snr: Tensor, prediction_type: str) -> Tensor:
    """Return 1 / sqrt(SNR) for epsilon, 1 / (SNR + 1) for v. Source: Yu et al. 2024, "Unmasking Bias in Diffusion"."""
    snr = snr.clamp(max=HIGHEST_SNR)
    return 1.0 / (snr.sqrt() if _is_epsilon(prediction_type) else snr + 1.0)


def like_noise_prediction(snr: Tensor) -> Tensor:
    """Return SNR / (SNR + 1): a velocity's squared error becomes about that of the noise it implies."""
    snr = snr.clamp(max=HIGHEST_SNR)
    return snr / (snr + 1.0)


def plus_like_velocity(snr: Tensor, share: float) -> Tensor:
    """Return 1 + share (SNR + 1) / SNR: the loss, and a share of what it would be as a velocity's."""
    return 1.0 + share / like_noise_prediction(snr)


def _is_epsilon(prediction_type: str) -> bool:
    if prediction_type not in ("epsilon", "v_prediction"):
        raise ValueError(f"prediction_type is epsilon or v_prediction, got {prediction_type!r}")
    return prediction_type == "epsilon"
