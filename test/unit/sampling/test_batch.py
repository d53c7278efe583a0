"""Many pictures in one call are the ones that are drawn one by one; between steps they are fp32."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cached import loaded as sdxl_parts

from difftrain.config import TrainConfig
from difftrain.models.registry import make_family
from difftrain.sampling import make_sampler
from difftrain.sampling.draw import draw_batch

FAMILIES = ["sdxl", "sd3"]
CAPTIONS = ["a picture", "two, three", ""]


@cache
def made(family: str) -> Any:
    cfg = TrainConfig.model_validate({"model": {"family": family, "init_from_config": "tiny"}, "training": {"seed": 1}})
    return make_family(cfg).drawer(sdxl_parts() if family == "sdxl" else make_family(cfg).load())


@pytest.mark.parametrize(("family", "sampler"), [("sdxl", "ddim"), ("sdxl", "euler_a"), ("sd3", "flow_euler")])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_lot_is_its_pictures(family: str, sampler: str, guidance: float) -> None:
    model = made(family)
    noise = torch.randn(len(CAPTIONS), *model.latent_shape((64, 64)), generator=torch.Generator().manual_seed(2))

    def drawn(which: slice) -> torch.Tensor:
        return draw_batch(
            model, CAPTIONS[which], noise[which], size_hw=(64, 64), steps=2, guidance=guidance, sampler=sampler,
            seeds=[5, 6, 7][which],
        )  # fmt: skip

    together = drawn(slice(None))
    assert together.shape == (3, 3, 64, 64) and together.dtype == torch.float32
    assert 0 <= float(together.min()) < float(together.max()) <= 1
    for n in range(len(CAPTIONS)):
        np.testing.assert_allclose(drawn(slice(n, n + 1))[0], together[n], atol=2e-3)
    assert not torch.allclose(together[0], together[1], atol=0.05)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("halves", [torch.bfloat16, torch.float16])
def test_latents_are_fp32_at_every_step_though_the_model_gives_halves(family: str, halves: torch.dtype) -> None:
    """A step is much smaller than what is stepped from: rounded to halves each time, much of it is lost."""
    model = made(family)
    root, size = model.parts.root, (4 * model.family.vae.factor,) * 2
    noise = torch.randn(1, *model.latent_shape(size), generator=torch.Generator().manual_seed(2))
    seen: list[torch.Tensor] = []

    def look(_: Any, args: tuple[Any, ...]) -> None:
        seen.append(args[0])

    def answer(*_: Any) -> tuple[torch.Tensor]:
        """Give 1.0 in place of what the model gives: an error of the steps' arithmetic alone is left."""
        return (torch.ones_like(seen[-1], dtype=halves),)

    hooks = root.register_forward_pre_hook(look), root.register_forward_hook(answer)
    try:
        with torch.autocast("cpu", halves):
            draw_batch(
                model, ["a"], noise, size_hw=size, steps=12, guidance=1.0,
                sampler="flow_euler" if family == "sd3" else "euler", seeds=[0],
            )  # fmt: skip
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == 12 and {each.dtype for each in seen} == {torch.float32}
    if family == "sd3":
        assert seen[0].equal(noise)
        sampler = make_sampler("flow_euler", model.scheduler.config)
        sampler.set_timesteps(12)
        torch.testing.assert_close(seen[-1], noise + (sampler.sigmas[11] - 1), rtol=0, atol=1e-5)
