"""From noise to pictures: one loop over a diffusers scheduler for every family, flow or not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from difftrain.sampling.samplers import make_sampler

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.contracts import Drawer


@torch.no_grad()
def walk(
    model: Drawer,
    conditions: Mapping[str, Tensor],
    unconditional: Mapping[str, Tensor] | None,
    noise: Tensor,
    *,
    sampler: Any,
    steps: int,
    guidance: float,
    generator: Any = None,
) -> Tensor:
    """Walk from noise to latents. Shapes: noise and latents (B, C, [F,] h, w).

    unconditional: what guidance starts from; None: no guidance. generator: of what a sampler draws on its way, one or one
    a picture. Guidance: Ho and Salimans, Classifier-free diffusion guidance, 2022, equation 6, with `guidance` = 1 + w.
    """
    # the sampler's times, and conditions for both halves of guidance in one batch
    _set_times(model, sampler, steps)
    given = dict(conditions) if unconditional is None else _joined(unconditional, conditions)
    options = {"generator": generator} if "generator" in inspect.signature(sampler.step).parameters else {}

    # from the sampler's first noise level down: one prediction and one step at each time
    x = noise * getattr(sampler, "init_noise_sigma", 1.0)
    for t in sampler.timesteps:
        entering = x if unconditional is None else torch.cat([x, x])
        if hasattr(sampler, "scale_model_input"):
            entering = sampler.scale_model_input(entering, t)
        output = model.predict(entering, t, given)
        if unconditional is not None:
            without, with_text = output.chunk(2)
            output = without + guidance * (with_text - without)
        x = sampler.step(output, t, x, **options, return_dict=False)[0]
    return x


def _set_times(model: Drawer, sampler: Any, steps: int) -> None:
    """Choose the times that are walked through: those that its pipeline in diffusers walks through."""
    if model.walks and "sigmas" in inspect.signature(sampler.set_timesteps).parameters:
        sampler.set_timesteps(sigmas=torch.linspace(1.0, 1.0 / steps, steps).tolist())
    else:
        sampler.set_timesteps(steps)


def _joined(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put two sets of conditions into one batch."""
    return {name: torch.cat([first[name], second[name]]) for name in second}


@contextmanager
def evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put modules into eval mode, and every submodule back into the mode that it had."""
    modes = [(module, module.training) for whole in modules for module in whole.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# --- Many pictures of one size in one call: for measuring what a model draws, where one by one takes long


def draw_batch(
    model: Drawer, captions: Sequence[str], noise: Tensor, *, size_hw: tuple[int, int], steps: int, guidance: float,
    sampler: str, seeds: Sequence[int], spacing: str | None = None,
) -> Tensor:  # fmt: skip
    """Draw captions from noise that is given, with the model's own unconditional where there is guidance.

    seeds: of what a sampler draws on its way. spacing: diffusers' timestep_spacing, in place of the model's own. The
    caller may hold autocast: the VAE is decoded outside of it.
    Shapes: noise (B, C, h, w) on the model's device; (B, 3, H, W) in 0..1, fp32.
    """
    config = {**model.scheduler.config, **({"timestep_spacing": spacing} if spacing else {})}
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    with evaluating(model.modules), torch.no_grad():
        conditions = model.conditions(list(captions), size_hw)
        latents = walk(
            model,
            conditions,
            model.unconditional([""] * len(captions), conditions, size_hw) if guidance > 1 else None,
            noise,
            sampler=make_sampler(sampler, config, model.tokens(size_hw)),
            steps=steps,
            guidance=guidance,
            generator=generators,
        )
        return model.decode(latents)
