"""A family's own sampler draws what its diffusers pipeline draws from the exported folder, from the prompt on."""

from __future__ import annotations

import inspect
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import ORACLES, Tiny, config, exported, loaded, pipeline_of
from oracle import NEGATIVE, PROMPT, Conditions, Drawn
from PIL import Image

from difftrain.models.registry import FAMILIES
from difftrain.models.weights.find import shipped_sizes
from difftrain.sampling.draw import walk
from difftrain.sampling.edits import SourcePicture
from difftrain.sampling.samplers import SAMPLERS, is_flow, make_sampler

SIZE, STEPS = (64, 96), 3


KINDS = [
    pytest.param(name, kind, id=f"{name}-{'-'.join(f'{k}={v}' for each in kind.values() for k, v in each.items()) or 'plain'}")
    for name, oracle in ORACLES.items() if oracle.drawn is not None for kind in oracle.drawn.kinds
]  # fmt: skip


def called(name: str, skip: int | None = None) -> Drawn:
    """Say how a pipeline is called. skip: of states of the encoder, which lies in no file: a pipeline counts from its own,
    and of prompts alone. Negative ones it reads as if nothing were skipped, so ours are given to it.
    """
    drawn = ORACLES[name].drawn
    assert drawn is not None
    if skip is None:
        return drawn

    def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
        without = None if negative is None else negative["hidden_1"]
        given = {"clip_skip": skip, "negative_prompt": None, "negative_prompt_embeds": without}
        return drawn.options(ours, negative, scale) | given

    return replace(drawn, options=options)


def drawn(name: str, sections: dict[str, Any]) -> Tiny:
    """Make a tiny family of a kind."""
    length = called(name).t5_length
    model = {} if length is None else {"t5_max_length": length}
    sections = dict(sections)
    return loaded(config(name, sections, **model, **sections.pop("model", {})))


@pytest.mark.parametrize(("name", "sections"), KINDS)
def test_own_sampler_is_the_pipeline_from_the_prompt_on(name: str, sections: dict[str, Any], tmp_path: Path) -> None:
    tiny = drawn(name, sections)
    pipeline = called(name).mended(pipeline_of(exported(tiny, tmp_path / "folder"), name))
    pipeline.set_progress_bar_config(disable=True)
    model, oracle = tiny.family.drawer(tiny.parts), called(name)
    if (skip := tiny.family.cfg.model.clip_skip) is not None:
        oracle = called(name, skip - tiny.family.own_skip)
        # diffusers 0.42 looks for the norm where transformers before 5.6 had it
        object.__setattr__(pipeline.text_encoder, "text_model", pipeline.text_encoder)
    noise = torch.randn((1, *model.latent_shape(SIZE, oracle.frames)), generator=torch.Generator().manual_seed(5))
    sampler = "flow_euler" if is_flow(model.scheduler.config) else "euler"
    for scale in oracle.scales:
        conditions = model.conditions([PROMPT], SIZE, oracle.guidance, oracle.references, oracle.frames)
        negative = (
            model.unconditional([NEGATIVE], conditions, SIZE, oracle.guidance, oracle.references) if scale > 1 else None
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = pipeline(
                **oracle.options(conditions, negative, scale), height=SIZE[0], width=SIZE[1], latents=oracle.pack(noise),
                num_inference_steps=STEPS, output_type="latent",
            )  # fmt: skip
        walker = make_sampler(sampler, model.scheduler.config, model.tokens(SIZE, oracle.frames), mu=model.mu)
        ours = walk(model, conditions, negative, noise, sampler=walker, steps=STEPS, guidance=scale)
        # a walk without a terminal signal begins at 4096 times the noise, and rounds there
        rounding = torch.finfo(torch.float32).eps * float(getattr(walker, "init_noise_sigma", 1.0))
        theirs = result.images if hasattr(result, "images") else result.frames
        theirs = oracle.returned(pipeline, oracle.unpack(theirs, SIZE))
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(ours.abs().max()) + rounding)
    with torch.no_grad():
        raw = oracle.raw(ours, pipeline.vae.config) if oracle.pixels is None else None
        decoded = pipeline.vae.decode(raw).sample if oracle.pixels is None else oracle.pixels(pipeline, ours)
    np.testing.assert_allclose(model.decode(ours), (decoded / 2 + 0.5).clamp(0, 1), atol=1e-5)


@pytest.mark.parametrize("sampler", ["ddim", "pndm"])
def test_other_samplers_are_those_of_the_pipeline(sampler: str, tmp_path: Path) -> None:
    """DDIM and PNDM, with which its releases are drawn; Euler is every family's above."""
    import diffusers

    tiny = loaded(config("sd1"))
    pipeline, model = pipeline_of(exported(tiny, tmp_path / "folder"), "sd1"), tiny.family.drawer(tiny.parts)
    pipeline.set_progress_bar_config(disable=True)
    kind, changes = SAMPLERS[sampler]
    pipeline.scheduler = getattr(diffusers, kind).from_config(model.scheduler.config, **changes)
    noise = torch.randn((1, *model.latent_shape(SIZE)), generator=torch.Generator().manual_seed(5))
    theirs = pipeline(
        PROMPT, negative_prompt=NEGATIVE, guidance_scale=3.0, height=SIZE[0], width=SIZE[1], latents=noise,
        num_inference_steps=5, output_type="latent",
    ).images  # fmt: skip
    conditions = model.conditions([PROMPT], SIZE)
    negative = model.unconditional([NEGATIVE], conditions, SIZE)
    walker = make_sampler(sampler, model.scheduler.config, model.tokens(SIZE), mu=model.mu)
    ours = walk(model, conditions, negative, noise, sampler=walker, steps=5, guidance=3.0)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(ours.abs().max()))


def picture() -> Image.Image:
    """Return a picture that is no noise: gradients and a block."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    pixels = np.stack([4 * y % 256, 3 * x % 256, (x + y) % 256], axis=-1).astype(np.uint8)
    pixels[16:32, 24:64] = (250, 20, 90)
    return Image.fromarray(pixels)


def mask() -> Image.Image:
    """Return a mask that is white in the middle, with an edge that is neither."""
    grey = np.zeros(SIZE, dtype=np.uint8)
    grey[16:48, 20:70], grey[16:48, 70:76] = 255, 90
    return Image.fromarray(grey)


def four_channels(name: str, folder: Path) -> dict[str, Any]:
    """Return a model that its pipeline takes: of a UNet the one for inpainting knows latents of 4 or 9 channels."""
    if "unet" not in FAMILIES[name].parts:
        return {}
    sizes = shipped_sizes(drawn(name, {}).family, "tiny")
    sizes["vae"]["latent_channels"] = sizes["unet"]["in_channels"] = sizes["unet"]["out_channels"] = 4
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return {"model": {"init_from_config": str(folder / "sizes.json")}}


def _editing(name: str, title: str) -> Any:
    """Return the class of a family's pipeline that begins at a picture; None where diffusers has none."""
    import diffusers
    from diffusers.pipelines import auto_pipeline

    tables = {
        "AutoPipelineForImage2Image": auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        "AutoPipelineForInpainting": auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
    }
    if title not in tables:
        return getattr(diffusers, title)
    return auto_pipeline._get_task_class(tables[title], FAMILIES[name].pipeline, throw_error_if_not_exist=False)


@pytest.mark.parametrize("kind", ["image", "mask", "mask_whole"])
# diffusers has no pipeline of an editing model that begins at an image as well
@pytest.mark.parametrize(
    "name", [each for each in FAMILIES if not FAMILIES[each].control + FAMILIES[each].shown_frames]
)
def test_a_picture_is_drawn_on_as_the_pipeline_does(name: str, kind: str, tmp_path: Path) -> None:
    oracle = called(name)
    editing = _editing(name, oracle.edits[kind != "image"])
    if editing is None:
        pytest.skip("diffusers has no such pipeline of it")
    if "strength" not in inspect.signature(editing.__call__).parameters:
        pytest.skip("its pipeline takes a picture as one to look at")
    tiny = drawn(name, four_channels(name, tmp_path))
    pipeline = oracle.mended(editing.from_pipe(pipeline_of(exported(tiny, tmp_path / "folder"), name)))
    pipeline.set_progress_bar_config(disable=True)
    model = tiny.family.drawer(tiny.parts)
    sampler = "flow_euler" if is_flow(model.scheduler.config) else "euler"
    strength, steps, scale = {"image": 0.6, "mask": 0.7, "mask_whole": 1.0}[kind], 5, 3.0
    conditions = model.conditions([PROMPT], SIZE, oracle.guidance, oracle.references)
    negative = model.unconditional([NEGATIVE], conditions, SIZE, oracle.guidance, oracle.references)
    shown: dict[str, Any] = {"image": picture(), "strength": strength}
    if kind != "image":
        shown |= {"mask_image": mask()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pipeline(
            **oracle.options(conditions, negative, scale), **shown, height=SIZE[0], width=SIZE[1],
            num_inference_steps=steps, output_type="latent", generator=torch.Generator().manual_seed(5),
        ).images  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    source = SourcePicture(picture(), strength, None if kind == "image" else mask())
    edit = source.edit(model, SIZE, generator)
    noise = torch.randn((1, *model.latent_shape(SIZE)), generator=generator)
    ours = walk(
        model,
        conditions,
        negative,
        noise,
        sampler=make_sampler(sampler, model.scheduler.config, model.tokens(SIZE), mu=model.mu),
        steps=steps,
        guidance=scale,
        edit=edit,
    )
    theirs = oracle.unpack(theirs, SIZE) if theirs.ndim == 3 else theirs
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(ours.abs().max()))
    if kind != "image":
        chosen = edit.mask.expand_as(ours).bool()
        assert torch.equal(ours[~chosen], edit.latents[~chosen]) and not torch.equal(ours[chosen], edit.latents[chosen])


def test_every_family_that_trains_is_drawn_here() -> None:
    assert {name for name, oracle in ORACLES.items() if oracle.drawn} == set(FAMILIES), "say how its pipeline is called"


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
