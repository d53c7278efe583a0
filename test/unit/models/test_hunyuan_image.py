"""What the contract suite cannot see of HunyuanImage: quotations, and the release that is not distilled."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from families import Tiny, batch_of, bucket_of, config, diffusers_forward, exported, loaded, own_pass, pipeline_of
from family_oracles.hunyuan_image import LENGTH
from oracle import NEGATIVE, PROMPT

from difftrain.models.text.tokenize import quotations
from difftrain.sampling.draw import walk
from difftrain.sampling.samplers import make_sampler

SIZE = (64, 96)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny model without guidance and without the time that a step goes to."""
    shipped = resources.files("difftrain.models").joinpath("sizes_shipped", "hunyuan_image.tiny.json")
    sizes = json.loads(shipped.read_text("utf-8"))
    sizes["transformer"] |= {"guidance_embeds": False, "use_meanflow": False}
    file = tmp_path_factory.mktemp("sizes") / "sizes.json"
    file.write_text(json.dumps(sizes))
    return loaded(config("hunyuan_image", init_from_config=str(file)))


@pytest.mark.parametrize("caption", ["", "two dogs", "a \"b\" and 'c d'", '“你好” on a wall, ‘x’, "open, 24 hours"'])
def test_quotations_are_the_pipelines(caption: str) -> None:
    from diffusers.pipelines.hunyuan_image.pipeline_hunyuanimage import extract_glyph_text

    assert quotations(caption) == (extract_glyph_text(caption) or "")


def test_the_pass_of_the_release_is_diffusers_forward(plain: Tiny) -> None:
    for captions in (('a "sign"', "two dogs"), ("a cat", ""), ('"a" and "b"' * 9, '"c" ' * 40)):
        inputs = plain.family.inputs(batch_of(plain.family, bucket_of("hunyuan_image"), captions), plain.parts)
        with torch.no_grad():
            assert torch.equal(own_pass(plain, inputs), diffusers_forward(plain, inputs))


def test_its_folder_has_the_pipelines_own_guidance(plain: Tiny, tmp_path: Path) -> None:
    """Six steps and fewer are plain classifier-free guidance there, too."""
    pipe = pipeline_of(exported(plain, tmp_path / "folder"), "hunyuan_image")
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe.guider).__name__ == "AdaptiveProjectedMixGuidance" and pipe.guider.guidance_scale == 3.5
    pipe.tokenizer_max_length = LENGTH
    model = plain.family.drawer(plain.parts)
    noise = torch.randn((1, *model.latent_shape(SIZE)), generator=torch.Generator().manual_seed(5))
    theirs = pipe(
        PROMPT, negative_prompt=NEGATIVE, height=SIZE[0], width=SIZE[1], latents=noise, num_inference_steps=3,
        output_type="latent",
    ).images  # fmt: skip
    conditions = model.conditions([PROMPT], SIZE)
    walker = make_sampler("flow_euler", model.scheduler.config, model.tokens(SIZE))
    negative = model.unconditional([NEGATIVE], conditions, SIZE)
    ours = walk(model, conditions, negative, noise, sampler=walker, steps=3, guidance=3.5)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(ours.abs().max()))
