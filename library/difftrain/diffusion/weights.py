"""Weights of a sample's loss by its signal-to-noise ratio, as kohya has them. Shapes: all (B,) fp32, like the SNR.

Every one is a factor; several together multiply. The SNR is that of the plain schedule, also where training uses zero
terminal SNR: there the ratio ends at 0, which most of these cannot take, and kohya weighs so too.
"""

from __future__ import annotations

from torch import Tensor

HIGHEST_SNR = 1000.0  # kohya's: steps with less noise than this all weigh as if they had it


def min_snr(snr: Tensor, gamma: float, prediction_type: str) -> Tensor:
    """Return min(SNR, gamma) / SNR for epsilon, over SNR + 1 for v. Source: Hang et al. 2023, equation 6."""
    clipped = snr.clamp(max=gamma)
    return clipped / (snr if _is_epsilon(prediction_type) else snr + 1.0)


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
