"""A family's own sampler draws what its diffusers pipeline draws from the exported folder, from the prompt on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from families import Conditions, Tiny, config, exported, loaded, pipeline_of

from difftrain.models import passes
from difftrain.models.registry import TRAINED
from difftrain.sampling.draw import walk
from difftrain.sampling.samplers import is_flow, make_sampler

SIZE, STEPS, PROMPT, NEGATIVE = (64, 96), 3, 'a red cat beside a "sign"', "blurry"


class Oracle(NamedTuple):
    """How a pipeline is called: (our conditions, those of the negative or None, scale) -> what it takes beside sizes.

    pack, unpack: of its latents. guidance: what a distilled model is told.
    """

    options: Callable[[Conditions, Conditions | None, float], dict[str, Any]]
    pack: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    unpack: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    guidance: float | None = None


def _flux(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    options = {"prompt": PROMPT, "guidance_scale": 3.5, "max_sequence_length": 32}
    return options if negative is None else options | {"negative_prompt": NEGATIVE, "true_cfg_scale": scale}


def _sdxl(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    return {"prompt": PROMPT, "negative_prompt": NEGATIVE if negative else None, "guidance_scale": scale}


def _sd3(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """From the conditions on: transformers' T5 tokenizer reads a tiny vocabulary in another way."""
    given = {"prompt_embeds": ours["tokens"], "pooled_prompt_embeds": ours["pooled"], "guidance_scale": scale}
    if negative is None:
        return given
    return given | {
        "negative_prompt_embeds": negative["tokens"], "negative_pooled_prompt_embeds": negative["pooled"],
    }  # fmt: skip


ORACLES = {
    "flux": Oracle(
        _flux, lambda x: passes.pack(x, 2), lambda x: passes.unpack(x, 2, (SIZE[0] // 16, SIZE[1] // 16)), 3.5
    ),
    "sd3": Oracle(_sd3),
    "sdxl": Oracle(_sdxl),
}
LENGTHS = {"flux": 32}
# what a family may be made with that decides how pictures are drawn
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("flux", {}),
    ("sd3", {}),
    ("sd3", {"flow": {"flux_shift": True}}),
    ("sdxl", {}),
    ("sdxl", {"model": {"prediction_type": "v_prediction"}, "noise": {"zero_terminal_snr": True}}),
]


def drawn(name: str, sections: dict[str, Any]) -> Tiny:
    """Make a tiny family of a kind."""
    model = {"t5_max_length": LENGTHS[name]} if name in LENGTHS else {}
    sections = dict(sections)
    return loaded(config(name, sections, **model, **sections.pop("model", {})))


@pytest.mark.parametrize(("name", "sections"), KINDS)
def test_own_sampler_is_the_pipeline_from_the_prompt_on(name: str, sections: dict[str, Any], tmp_path: Path) -> None:
    tiny = drawn(name, sections)
    pipeline = pipeline_of(exported(tiny, tmp_path / "folder"), name)
    pipeline.set_progress_bar_config(disable=True)
    model, oracle = tiny.family.drawer(tiny.parts), ORACLES[name]
    noise = torch.randn((1, *model.latent_shape(SIZE)), generator=torch.Generator().manual_seed(5))
    sampler = "flow_euler" if is_flow(model.scheduler.config) else "euler"
    for scale in (1.0, 3.0):
        conditions = model.conditions([PROMPT], SIZE, oracle.guidance)
        negative = model.unconditional([NEGATIVE], conditions, SIZE, oracle.guidance) if scale > 1 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = pipeline(
                **oracle.options(conditions, negative, scale), height=SIZE[0], width=SIZE[1], latents=oracle.pack(noise),
                num_inference_steps=STEPS, output_type="latent",
            ).images  # fmt: skip
        ours = walk(
            model,
            conditions,
            negative,
            noise,
            sampler=make_sampler(sampler, model.scheduler.config, model.tokens(SIZE)),
            steps=STEPS,
            guidance=scale,
        )
        np.testing.assert_allclose(ours, oracle.unpack(theirs), atol=1e-5 * float(ours.abs().max()))
    raw = ours / pipeline.vae.config.scaling_factor + (pipeline.vae.config.shift_factor or 0.0)
    with torch.no_grad():
        decoded = pipeline.vae.decode(raw).sample
    np.testing.assert_allclose(model.decode(ours), (decoded / 2 + 0.5).clamp(0, 1), atol=1e-5)


def test_every_family_that_trains_is_drawn_here() -> None:
    assert {name for name, _ in KINDS} == set(ORACLES) == set(TRAINED), "say how its pipeline is called"


def test_encoders_that_are_trained_encode_a_prompt_once() -> None:
    """Conditions hold what they made, not the ids that training gives the root."""
    frozen, trained = (loaded(config("sdxl", train_text_encoder=each)) for each in (False, True))
    assert set(trained.family.in_root) == {"unet", "text_encoder_1", "text_encoder_2"}
    with torch.no_grad():
        for part in trained.family.in_root[1:]:
            frozen.parts.frozen[part].load_state_dict(trained.parts.root.get_submodule(part).state_dict())
    told = [tiny.family.drawer(tiny.parts).conditions([PROMPT], SIZE) for tiny in (frozen, trained)]
    assert told[0].keys() == told[1].keys()
    assert all(torch.equal(value, told[1][key]) for key, value in told[0].items())
