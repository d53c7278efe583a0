"""The DDPM process of Stable Diffusion: integer timesteps 0..999, scaled-linear betas, fp32 mixing.

Source: Ho et al. 2020 (the process); Salimans & Ho 2022 (velocity); Lin et al. 2024 (zero terminal SNR). The tables are
made on the host in fp64 and rounded once, so that every device mixes with the same numbers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

STEPS = 1000
BETA_START, BETA_END = 0.00085, 0.012


class DdpmTables(NamedTuple):
    """Hold the process by timestep t, each (1000,) fp32.

    alphas_cumprod: product of 1 - beta up to t. alpha, sigma: its root and the root of 1 minus it, so that
    x_t = alpha x_0 + sigma noise. snr: alpha^2 / sigma^2.
    """

    alphas_cumprod: Tensor
    alpha: Tensor
    sigma: Tensor
    snr: Tensor


def kept(zero_terminal_snr: bool = False) -> np.ndarray:
    """Return the product of 1 - beta up to each t, (1000,) fp64; 0 at the last t where the terminal SNR is to be 0.

    Source: Lin et al. 2024, "Common Diffusion Noise Schedules and Sample Steps are Flawed", algorithm 1.
    """
    # scaled-linear: evenly spaced roots of beta, as Stable Diffusion was trained
    plain = np.cumprod(1.0 - np.linspace(BETA_START**0.5, BETA_END**0.5, STEPS) ** 2)
    if not zero_terminal_snr:
        return plain
    root = np.sqrt(plain)
    # algorithm 1: move the root so that it ends at 0, stretch it so that it begins where it did
    return ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2


def betas(kept_to: np.ndarray) -> np.ndarray:
    """Return the beta of each t from the product of 1 - beta up to it."""
    return 1.0 - kept_to / np.concatenate([[1.0], kept_to[:-1]])


def almost_zero_snr() -> list[float]:
    """Return the betas of zero terminal SNR for samplers that divide by what is kept: the last keeps 2^-24.

    That is what diffusers' own schedulers put there, for the same reason.
    """
    left = kept(zero_terminal_snr=True)
    # an exact 0 would be divided by in the first step of a sampler
    left[-1] = 2.0**-24
    return betas(left).tolist()


@functools.cache
def tables(device: torch.device | str = "cpu", zero_terminal_snr: bool = False) -> DdpmTables:
    """Return the tables on a device; copied there once, so that a step does not wait for them."""
    left = kept(zero_terminal_snr)
    # fp64 until here: the difference 1 - left loses its digits in fp32 near t = 0
    exact = (left, np.sqrt(left), np.sqrt(1.0 - left), left / (1.0 - left))
    with torch.inference_mode(False):  # kept for ever, and training may be the second to ask
        return DdpmTables(*(torch.from_numpy(column.astype(np.float32)).to(device) for column in exact))


def alphas_cumprod() -> Tensor:
    """Return the product of 1 - beta up to each t, (1000,) fp32 on the host."""
    return tables().alphas_cumprod


def add_noise(table: DdpmTables, x_0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = alpha_t x_0 + sigma_t noise (Ho et al. 2020, equation 4). Shapes: x_0, noise (B, ...), t (B,) int64."""
    return _at(table.alpha, t, x_0) * x_0 + _at(table.sigma, t, x_0) * noise


def velocity(table: DdpmTables, x_0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """v = alpha_t noise - sigma_t x_0. Shapes: as `add_noise`. Source: Salimans & Ho 2022, appendix D."""
    return _at(table.alpha, t, x_0) * noise - _at(table.sigma, t, x_0) * x_0


def target(table: DdpmTables, x_0: Tensor, noise: Tensor, t: Tensor, prediction_type: str) -> Tensor:
    """Return what the denoiser is to predict: "epsilon" (Ho et al. 2020, equation 14) or "v_prediction"."""
    if prediction_type == "epsilon":
        return noise
    if prediction_type == "v_prediction":
        return velocity(table, x_0, noise, t)
    raise ValueError(f"prediction_type is epsilon or v_prediction, got {prediction_type!r}")


def _at(column: Tensor, t: Tensor, like: Tensor) -> Tensor:
    """Pick a column at t, shaped to broadcast over a batch: (B,) -> (B, 1, ...)."""
    return column[t].view(-1, *(1,) * (like.ndim - 1))
