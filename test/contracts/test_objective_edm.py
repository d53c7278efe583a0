"""The objective of Karras et al. 2022: a plain square on its target is the paper's weighted loss of the denoiser."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from difftrain.contracts import Batch, Bucket, DrawSpec
from difftrain.models.objective.flow import Edm, EdmSigma

BUCKET = Bucket(64, 64)


def batch_of(latents: torch.Tensor, sigma: torch.Tensor) -> Batch:
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(len(latents))
    return Batch(BUCKET, ids, ids * 0, {}, {"noise": noise, "timestep": sigma})


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (4, 3, 2, 5, 6)])
@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_the_target_is_karras_weighted_loss(shape: tuple[int, ...], sigma_data: float) -> None:
    objective = Edm(sigma_data)
    generator = torch.Generator().manual_seed(1)
    latents = sigma_data * torch.randn(shape, generator=generator)
    sigma = torch.tensor([0.01, 0.3, 1.0, 20.0])
    batch = batch_of(latents, sigma)
    inputs = objective.inputs(batch, latents, {})
    output = torch.randn(shape, generator=generator)  # what a network might say

    wide = sigma.double().view(-1, *(1,) * (latents.ndim - 1))
    x = latents.double() + wide * batch.draws["noise"].double()
    total = wide**2 + sigma_data**2
    denoised = sigma_data**2 / total * x + wide * sigma_data / total.sqrt() * output.double()  # D, equation 7
    weight = (wide**2 + sigma_data**2) / (wide * sigma_data) ** 2  # lambda, table 1
    wanted = (weight * (denoised - latents.double()) ** 2).flatten(1).mean(1)
    found = (output.double() - inputs.target.double()).square().flatten(1).mean(1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
    torch.testing.assert_close(objective.denoised(x.float(), sigma, output).double(), denoised, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs.x_t.double(), x / total.sqrt(), rtol=1e-5, atol=1e-6)  # c_in
    torch.testing.assert_close(inputs.timestep, sigma.log() / 4)  # c_noise
    assert (inputs.weight == 1).all()


def test_what_enters_and_what_is_asked_for_have_unit_variance() -> None:
    objective, count = Edm(0.5), 2000
    latents = 0.5 * torch.randn((count, 4, 4, 4), generator=torch.Generator().manual_seed(3))
    for sigma in (0.05, 0.5, 5.0):
        inputs = objective.inputs(batch_of(latents, torch.full((count,), sigma)), latents, {})
        assert inputs.x_t.var() == pytest.approx(1, rel=0.02) and inputs.target.var() == pytest.approx(1, rel=0.02)


def test_sigma_is_log_normal_growing_and_picklable() -> None:
    sigma = pickle.loads(pickle.dumps(EdmSigma(-1.2, 1.2)))
    assert sigma(0.5, BUCKET) == pytest.approx(math.exp(-1.2))
    places = [(2 * i + 1) / 2000 for i in range(1000)]
    logs = [math.log(sigma(u, BUCKET)) for u in places]
    assert logs == sorted(logs)
    mean = sum(logs) / len(logs)
    assert mean == pytest.approx(-1.2, abs=1e-6)
    assert math.sqrt(sum((each - mean) ** 2 for each in logs) / len(logs)) == pytest.approx(1.2, rel=0.01)
    assert all(math.isfinite(sigma(u, BUCKET)) for u in (0.0, 1.0, math.nextafter(1.0, 0.0)))


def test_the_draws_are_the_noise_and_sigma() -> None:
    latent = DrawSpec("normal", channels=16, factor=8)
    draws = Edm().draws(latent)
    assert draws["noise"] is latent and draws["timestep"].kind == "uniform" and draws["timestep"].shape(BUCKET) == ()
