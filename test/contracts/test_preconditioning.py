"""The preconditioning of Karras et al. 2022 as a flow: its velocity and weight are the paper's denoiser and loss."""

from __future__ import annotations

import math

import pytest
import torch

from difftrain.diffusion import flow
from difftrain.models.objective.flow import Preconditioning

SIGMAS = torch.tensor([0.01, 0.3, 1.0, 20.0])
TIMES = SIGMAS / (1 + SIGMAS)


def over(values: torch.Tensor, ndim: int) -> torch.Tensor:
    return values.double().view(-1, *(1,) * (ndim - 1))


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (4, 3, 2, 5, 6)])
@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_velocity_and_weight_are_the_papers(shape: tuple[int, ...], sigma_data: float) -> None:
    around, generator = Preconditioning(sigma_data), torch.Generator().manual_seed(1)
    latents, noise, output = (
        torch.randn(shape, generator=generator) for _ in range(3)
    )  # output: what a network might say
    latents *= sigma_data
    x_t = flow.add_noise(latents, noise, TIMES)

    # --- the paper, table 1, in double
    sigma, d = over(SIGMAS, len(shape)), sigma_data
    x, total = latents.double() + sigma * noise.double(), sigma**2 + d**2
    denoised = d**2 / total * x + sigma * d / total.sqrt() * output.double()  # D, equation 7
    loss = (total / (sigma * d) ** 2 * (denoised - latents.double()) ** 2).flatten(1).mean(1)  # lambda |D - x0|^2

    # --- ours
    velocity = around.velocity(x_t, TIMES, output)
    error = (velocity - flow.target(latents, noise)).square().flatten(1).mean(1)
    torch.testing.assert_close((error * around.weight(TIMES)).double(), loss, rtol=1e-4, atol=0)
    t = over(TIMES, len(shape))
    torch.testing.assert_close(x_t.double() - t * velocity.double(), denoised, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(around.entering(x_t, TIMES).double(), x / total.sqrt(), rtol=1e-5, atol=1e-6)  # c_in x
    torch.testing.assert_close(around.level(TIMES), SIGMAS.log() / 4)  # c_noise


def test_what_enters_has_unit_variance_at_every_time() -> None:
    generator = torch.Generator().manual_seed(3)
    latents, noise = (torch.randn((2000, 4, 4, 4), generator=generator) for _ in range(2))
    for sigma in (0.05, 0.5, 5.0):
        t = torch.full((2000,), sigma / (1 + sigma))
        entering = Preconditioning(0.5).entering(flow.add_noise(0.5 * latents, noise, t), t)
        assert entering.var() == pytest.approx(1, rel=0.02)


def test_the_ends_of_time_are_told_as_finite_levels() -> None:
    levels = Preconditioning(0.5).level(torch.tensor([0.0, 1.0]))
    assert levels.isfinite().all() and levels[0] < math.log(0.002) / 4 and levels[1] > math.log(80) / 4
