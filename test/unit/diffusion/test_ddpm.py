"""The DDPM process against diffusers and the algebra of it."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDPMScheduler

from difftrain.diffusion import ddpm

TABLES = ddpm.tables()


@pytest.fixture(scope="module")
def scheduler() -> DDPMScheduler:
    return DDPMScheduler(num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_0, noise = torch.randn(2, 7, 4, 6, 5, generator=generator)
    return x_0, noise, torch.tensor([0, 1, 49, 250, 500, 998, 999])


def test_tables_are_fp32_and_equal_diffusers(scheduler: DDPMScheduler) -> None:
    assert all(column.shape == (1000,) and column.dtype == torch.float32 for column in TABLES)
    torch.testing.assert_close(ddpm.alphas_cumprod(), scheduler.alphas_cumprod, rtol=2e-6, atol=0)
    torch.testing.assert_close(TABLES.alpha**2 + TABLES.sigma**2, torch.ones(1000), rtol=3e-7, atol=0)
    torch.testing.assert_close(TABLES.snr, (TABLES.alpha / TABLES.sigma) ** 2, rtol=1e-6, atol=0)


def test_noise_and_velocity_equal_diffusers(scheduler: DDPMScheduler) -> None:
    x_0, noise, t = _batch()
    torch.testing.assert_close(ddpm.add_noise(TABLES, x_0, noise, t), scheduler.add_noise(x_0, noise, t))
    torch.testing.assert_close(ddpm.velocity(TABLES, x_0, noise, t), scheduler.get_velocity(x_0, noise, t))


def test_x_t_and_velocity_turn_back_into_data_and_noise() -> None:
    x_0, noise, t = _batch()
    x_t, v = ddpm.add_noise(TABLES, x_0, noise, t), ddpm.velocity(TABLES, x_0, noise, t)
    alpha, sigma = (c[t].view(-1, 1, 1, 1) for c in (TABLES.alpha, TABLES.sigma))
    torch.testing.assert_close(alpha * x_t - sigma * v, x_0, rtol=0, atol=2e-6)
    torch.testing.assert_close(sigma * x_t + alpha * v, noise, rtol=0, atol=2e-6)


def test_targets() -> None:
    x_0, noise, t = _batch()
    assert ddpm.target(TABLES, x_0, noise, t, "epsilon") is noise
    assert torch.equal(ddpm.target(TABLES, x_0, noise, t, "v_prediction"), ddpm.velocity(TABLES, x_0, noise, t))
    with pytest.raises(ValueError, match="got 'sample'"):
        ddpm.target(TABLES, x_0, noise, t, "sample")


def test_tables_are_made_once_a_device() -> None:
    assert ddpm.tables(torch.device("cpu")) is ddpm.tables(torch.device("cpu"))


def test_tables_first_asked_for_in_inference_serve_training() -> None:
    ddpm.tables.cache_clear()
    with torch.inference_mode():
        table = ddpm.tables("cpu")
    x_0 = torch.ones(2, 3, requires_grad=True)
    ddpm.add_noise(table, x_0, torch.zeros(2, 3), torch.tensor([5, 900])).sum().backward()
    assert x_0.grad is not None and torch.equal(x_0.grad[:, 0], table.alpha[[5, 900]])
