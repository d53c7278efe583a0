"""What the contract suite cannot see of Flux.2: shifts that follow the steps, statistics that are no identity, marks in captions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import config, made

from difftrain.contracts import Bucket
from difftrain.models.families.flux2 import MU
from difftrain.models.vae.latents import Latents
from difftrain.sampling.samplers import FLOW_SAMPLERS, make_sampler


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 4300, 4301, 16384])
def test_mu_is_the_pipelines(tokens: int) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    for steps in (4, 28, 50, 200):
        assert MU(tokens, steps) == compute_empirical_mu(tokens, steps)
    side = 16 * math.isqrt(tokens)
    if side**2 == 256 * tokens:  # training has no steps: it shifts as a walk in 50 does
        time = made(config("flux2", {"flow": {"flux_shift": True}})).features.draws["timestep"].through
        assert time.shift_of(Bucket(side, side)) == pytest.approx(math.exp(compute_empirical_mu(tokens, 50)))


def test_samplers_follow_the_number_of_steps() -> None:
    import diffusers

    stored = made(config("flux2")).scheduler().config
    for steps in (4, 28):
        euler, heun = (make_sampler(name, stored, 1024, mu=MU) for name in FLOW_SAMPLERS)
        theirs = diffusers.FlowMatchEulerDiscreteScheduler.from_config(stored)
        sigmas = torch.linspace(1.0, 1.0 / steps, steps).tolist()
        theirs.set_timesteps(sigmas=sigmas, mu=MU(1024, steps))
        euler.set_timesteps(sigmas=sigmas)
        assert torch.equal(euler.sigmas, theirs.sigmas)
        heun.set_timesteps(steps)
        assert heun.config.shift == pytest.approx(math.exp(MU(1024, steps)))


def test_latents_are_folded_before_they_are_normalised() -> None:
    from diffusers import Flux2Pipeline

    generator = torch.Generator().manual_seed(1)
    stored = {"bn.running_mean": torch.randn(32, generator=generator), "bn.running_var": 1 + torch.rand(32, generator=generator)}  # fmt: skip
    sizes: dict[str, Any] = {"latent_channels": 8, "batch_norm_eps": 1e-4, "block_out_channels": [8] * 4}
    latents, raw = Latents("diffusers:AutoencoderKLFlux2", sizes, stored.__getitem__), torch.randn(2, 8, 4, 6)
    mean, var = (value.view(1, -1, 1, 1) for value in stored.values())
    theirs = (Flux2Pipeline._patchify_latents(raw) - mean) / torch.sqrt(var + 1e-4)
    torch.testing.assert_close(latents.scaled(raw), theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(latents.unscaled(theirs), raw, atol=1e-5, rtol=1e-5)


def test_a_mark_in_a_caption_is_not_read_as_one() -> None:
    tokenize = made(config("flux2")).tokenizer(None)  # type: ignore[arg-type]
    plain, marked = (tokenize([text]) for text in ("a red cat", "a red[IMG] cat"))
    assert torch.equal(plain["input_ids_1"], marked["input_ids_1"])
    assert not plain["mask_1"][0, 0] and plain["mask_1"][0, -1], "texts are filled up in front"
