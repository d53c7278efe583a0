"""A family's own sampler draws what its diffusers pipeline draws from the exported folder, from the prompt on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from difftrain.config import ModelSection, TrainConfig, TrainingSection
from difftrain.models import passes
from difftrain.models.registry import FAMILIES, make_family
from difftrain.sampling.draw import walk
from difftrain.sampling.samplers import make_sampler

SIZE, STEPS, PROMPT = (64, 96), 3, 'a red cat beside a "sign"'


class Oracle(NamedTuple):
    """How a pipeline is called: what it takes beside the prompt, and how its latents are laid out."""

    options: dict[str, Any]
    pack: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    unpack: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


def _packed(x: torch.Tensor) -> torch.Tensor:
    return passes.pack(x, 2)


def _unpacked(x: torch.Tensor) -> torch.Tensor:
    return passes.unpack(x, 2, (SIZE[0] // 16, SIZE[1] // 16))


ORACLES = {
    "flux": Oracle({"guidance_scale": 3.5, "max_sequence_length": 32}, _packed, _unpacked),
}


def config(name: str) -> TrainConfig:
    lengths = {"t5_max_length": 32} if FAMILIES[name].has("model.t5_max_length") else {}
    model = ModelSection(family=name, init_from_config="tiny", **lengths)  # type: ignore[arg-type]
    return TrainConfig(model=model, training=TrainingSection(seed=1))


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_own_sampler_is_the_pipeline_from_the_prompt_on(name: str, scale: float, tmp_path: Path) -> None:
    import diffusers

    family: Any = make_family(config(name))
    parts = family.load()
    folder = family.export(iter(parts.root.state_dict().items()), parts, "diffusers", tmp_path / "folder")
    pipeline = getattr(diffusers, FAMILIES[name].pipeline).from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    model, oracle = family.drawer(parts), ORACLES[name]
    noise = torch.randn((1, *model.latent_shape(SIZE)), generator=torch.Generator().manual_seed(5))
    negative = {"negative_prompt": "blurry", "true_cfg_scale": scale} if scale > 1 else {}
    theirs = pipeline(
        PROMPT, height=SIZE[0], width=SIZE[1], num_inference_steps=STEPS, latents=oracle.pack(noise),
        output_type="latent", **oracle.options, **negative,
    ).images  # fmt: skip
    guidance = oracle.options.get("guidance_scale")
    sampler = make_sampler("flow_euler", model.scheduler.config, model.tokens(SIZE))
    ours = walk(
        model,
        model.conditions([PROMPT], SIZE, guidance),
        model.unconditional(["blurry"], SIZE, guidance) if scale > 1 else None,
        noise,
        sampler=sampler,
        steps=STEPS,
        guidance=scale,
    )
    np.testing.assert_allclose(ours, oracle.unpack(theirs), atol=1e-5)
    pixels = model.decode(ours)
    decoded = pipeline.vae.decode(ours / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor).sample
    np.testing.assert_allclose(pixels, (decoded.detach() / 2 + 0.5).clamp(0, 1), atol=1e-5)
