"""The linear predictor that the demo's loss is held against: closed forms on Gaussian data."""

from __future__ import annotations

import pytest
import torch

from difftrain.demo.judge import Wiener
from difftrain.diffusion import ddpm


def gaussian(count: int) -> torch.Tensor:
    """Draw latents (N, 2, 2, 2) with unequal variances, correlated, off centre."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(8, 8, generator=generator, dtype=torch.float64) * torch.linspace(0.2, 2, 8)
    return (torch.randn(count, 8, generator=generator, dtype=torch.float64) @ mix.T + 0.7).view(count, 2, 2, 2)


def noisy(x_0: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(x_0.shape, generator=generator, dtype=torch.float64)
    t = torch.full((len(x_0),), step)
    return ddpm.add_noise(ddpm.tables(), x_0, noise, t), noise, t


@pytest.mark.parametrize("step", [20, 300, 900])
def test_it_is_the_least_squares_solution(step: int) -> None:
    data = gaussian(20000)
    x_t, noise, t = noisy(data, step)
    target = ddpm.velocity(ddpm.tables(), data, noise, t).flatten(1)
    design = torch.cat([x_t.flatten(1), torch.ones(len(data), 1, dtype=torch.float64)], 1)
    solution = torch.linalg.lstsq(design, target).solution
    best = (design @ solution - target).square().mean()
    ours = (Wiener(data).predict(x_t, t, "v_prediction").flatten(1) - target).square().mean()
    assert float(ours) == pytest.approx(float(best), rel=2e-3)


def test_its_error_is_the_closed_form() -> None:
    data = gaussian(20000)
    fitted = Wiener(data)
    x_t, noise, t = noisy(data, 500)
    target = ddpm.velocity(ddpm.tables(), data, noise, t)
    a2 = ddpm.tables().alphas_cumprod[500].double()
    expected = (fitted.variance / (a2 * fitted.variance + 1 - a2)).mean()
    error = (fitted.predict(x_t, t, "v_prediction") - target).square().mean()
    assert float(error) == pytest.approx(float(expected), rel=0.02)


def test_noise_and_velocity_are_one_prediction() -> None:
    data = gaussian(500)
    fitted = Wiener(data)
    x_t, _, t = noisy(data, 400)
    table = ddpm.tables()
    noise = fitted.predict(x_t, t, "epsilon")
    x_0 = (x_t - table.sigma[400] * noise) / table.alpha[400]
    velocity = ddpm.velocity(table, x_0, noise, t)
    torch.testing.assert_close(fitted.predict(x_t, t, "v_prediction"), velocity, rtol=1e-5, atol=1e-5)


def test_moments_over_ranks_are_those_of_all() -> None:
    data = gaussian(300)
    halves = data[:100].flatten(1), data[100:].flatten(1)
    total = sum(half.sum(0) for half in halves)
    outer = sum(half.T @ half for half in halves)
    x_t, _, t = noisy(data, 100)
    one, two = Wiener(data), Wiener.from_moments(300, total, outer)
    torch.testing.assert_close(one.predict(x_t, t, "epsilon"), two.predict(x_t, t, "epsilon"))
