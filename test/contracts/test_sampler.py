"""The contract of every sampler in the registry: it solves the model's equation, and depends on its seed alone.

The model is exact: what it has learnt are numbers of one mean and one spread, whose best prediction is known in closed
form, and with it where every noise ends.
"""

from __future__ import annotations

import math
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from refusals import names

from difftrain.config import TrainConfig
from difftrain.config.schema import names as schema_names
from difftrain.contracts import ConfigFault
from difftrain.diffusion.ddpm import STEPS, kept
from difftrain.models.objective.ddpm import scheduler_config
from difftrain.sampling.draw import walk
from difftrain.sampling.samplers import FLOW_SAMPLERS, SAMPLERS, make_sampler, sampler_fault

MEAN, SPREAD = 1.0, 0.5
NOISE = torch.randn((2, 4, 24, 24), generator=torch.Generator().manual_seed(1))
FLOWS = ({"shift": 1.0}, {"shift": 3.0}, {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15})
NAMES = [*SAMPLERS, *FLOW_SAMPLERS]
PLAIN = [name for name in NAMES if name.removeprefix("k_") == name or name.removeprefix("k_") not in NAMES]

every = pytest.mark.parametrize("name", NAMES)
each = pytest.mark.parametrize("name", PLAIN)  # the namesakes in k draw to the bit what these do


class ExactModel:
    """Predict what the best model of N(MEAN, SPREAD^2) would; kind: what of, "flow" or a prediction type."""

    def __init__(self, kind: str, **facts: Any) -> None:
        self.kind, self.walks, self.mu = kind, False, None
        if kind == "flow":
            self.scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler(**facts)
            return
        values = {"model": {"prediction_type": kind}, "noise": facts}
        self.scheduler = diffusers.EulerDiscreteScheduler(**scheduler_config(TrainConfig.model_validate(values)))
        left = np.maximum(kept(**facts), 2.0**-24)
        self._log_sigmas = 0.5 * np.log((1 - left) / left)

    def shares(self, t: float) -> tuple[float, float]:
        """Return alpha and sigma of x_t = alpha x_0 + sigma noise; between two times as diffusers does."""
        if self.kind == "flow":
            return 1 - t / STEPS, t / STEPS
        sigma = math.exp(np.interp(t, np.arange(STEPS), self._log_sigmas))
        return 1 / math.hypot(1, sigma), sigma / math.hypot(1, sigma)

    def predict(self, x: torch.Tensor, t: torch.Tensor, conditions: Any) -> torch.Tensor:
        alpha, sigma = self.shares(float(t))
        x0 = (MEAN * sigma**2 + alpha * SPREAD**2 * x.double()) / (alpha**2 * SPREAD**2 + sigma**2)
        noise = (x - alpha * x0) / sigma
        return {"epsilon": noise, "v_prediction": alpha * noise - sigma * x0, "flow": noise - x0}[self.kind].float()

    def end(self, noise: torch.Tensor) -> torch.Tensor:
        """Follow the noise to its end without a step: mean and spread of x_t say where each quantile goes."""
        alpha, sigma = self.shares(STEPS if self.kind == "flow" else STEPS - 1)
        return MEAN + SPREAD * (noise - alpha * MEAN) / math.hypot(alpha * SPREAD, sigma)


def models(name: str) -> list[ExactModel]:
    """Return all that a sampler may be asked to draw from."""
    if name in FLOW_SAMPLERS:
        return [ExactModel("flow", **facts) for facts in FLOWS]
    return [ExactModel("epsilon"), ExactModel("v_prediction"), ExactModel("v_prediction", zero_terminal_snr=True)]


def drawn(name: str, model: ExactModel, steps: int, noise: torch.Tensor = NOISE, seed: int = 3) -> torch.Tensor:
    """Walk with a generator for each picture, as for the pictures of a batch."""
    generators = [torch.Generator().manual_seed(seed + number) for number in range(len(noise))]
    sampler = make_sampler(name, model.scheduler.config, tokens=256)
    return walk(model, {}, None, noise, sampler=sampler, steps=steps, guidance=1.0, generator=generators)  # type: ignore[arg-type]


def test_the_configuration_has_these_names() -> None:
    assert (*SAMPLERS,) == schema_names.SAMPLERS and (*FLOW_SAMPLERS,) == schema_names.FLOW_SAMPLERS


@pytest.mark.flags("sample_sampler")
@each
def test_it_goes_from_noise_to_what_was_learnt(name: str) -> None:
    """Noise added on the way leaves nothing to compare but mean and spread; more steps come nearer in any case."""

    def error(model: ExactModel, steps: int) -> float:
        found = drawn(name, model, steps).double()
        if name.endswith("_a"):
            return abs(float(found.mean()) - MEAN) + abs(float(found.std()) - SPREAD)
        return float((found - model.end(NOISE.double())).square().mean().sqrt())

    for model in models(name):
        coarse, fine = error(model, 10), error(model, 30)
        assert fine < 0.09 and fine < 0.9 * coarse, (model.kind, coarse, fine)


@every
def test_it_walks_the_noise_levels_of_the_models_own_schedule(name: str) -> None:
    """As a user's pipeline does after `pipe.scheduler = Sampler.from_config(pipe.scheduler.config)`."""
    for model in models(name)[:2]:
        ours, asked = make_sampler(name, model.scheduler.config), model.scheduler.config
        theirs = type(ours).from_config(asked, **SAMPLERS.get(name, ("", {}))[1])
        for sampler in (ours, theirs):
            sampler.set_timesteps(12)
        assert torch.equal(torch.as_tensor(ours.timesteps), torch.as_tensor(theirs.timesteps))
        assert torch.equal(torch.as_tensor(getattr(ours, "sigmas", 0)), torch.as_tensor(getattr(theirs, "sigmas", 0)))
        assert not ours.config.get("clip_sample"), "latents go beyond [-1, 1]"
        times = [round(float(t), 2) for t in ours.timesteps]
        assert times == sorted(times, reverse=True) and times[0] > 0.9 * STEPS


@each
def test_its_seed_decides_and_nothing_else(name: str) -> None:
    model = models(name)[0]
    state = torch.get_rng_state()
    first = drawn(name, model, 6)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's draws move on"
    torch.manual_seed(7)
    assert torch.equal(drawn(name, model, 6), first)
    assert torch.equal(drawn(name, model, 6, seed=99), first) == (not name.endswith("_a"))
    torch.testing.assert_close(drawn(name, model, 6, NOISE[:1]), first[:1])  # no picture hangs on its neighbour


@every
def test_names_that_are_none_and_those_of_the_other_kind_are_refused(name: str) -> None:
    own, other = (FLOW_SAMPLERS, SAMPLERS) if name in FLOW_SAMPLERS else (SAMPLERS, FLOW_SAMPLERS)
    config, flow = models(name)[0].scheduler.config, name in FLOW_SAMPLERS
    assert sampler_fault(name) is None and sampler_fault(name, flow=flow) is None
    for wrong in (f"{name}x", next(iter(other))):
        with pytest.raises(ConfigFault) as caught:
            make_sampler(wrong, config)
        (fault,) = caught.value.faults
        assert fault.where == "sampler" and names(fault, wrong, f"one of {', '.join(own)}"), fault


@pytest.mark.parametrize(("registry", "kind"), [(SAMPLERS, "epsilon"), (FLOW_SAMPLERS, "flow")])
def test_no_two_are_the_same_but_for_the_namesakes_in_k(registry: dict[str, Any], kind: str) -> None:
    model = ExactModel(kind)
    found = {name: drawn(name, model, 5) for name in registry}
    plain = [name for name in found if name in PLAIN]
    for place, one in enumerate(plain):
        for other in plain[:place]:
            assert (found[one] - found[other]).abs().max() > 1e-3, (one, other)
    for name in set(found) - set(plain):
        assert torch.equal(found[name], found[name.removeprefix("k_")]), name


@pytest.mark.parametrize("name", [name for name, (kind, _) in SAMPLERS.items() if kind == "LMSDiscreteScheduler"])
def test_a_package_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert "package scipy" in str(sampler_fault(name)) and sampler_fault("ddim") is None
