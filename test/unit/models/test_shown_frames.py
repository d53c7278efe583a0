"""Frames that a model is shown: how an image encoder sees them, which are grey, and what the mask says."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from families import Tiny, batch_of, config, exported, loaded, made
from PIL import Image

from difftrain.contracts import Bucket, ConfigFault
from difftrain.models.shown_frames import FRAMES, IMAGE_ENCODERS, SEEN, clip_of, looked_at
from difftrain.models.vae.latents import posterior


@pytest.fixture(scope="module")
def both() -> Tiny:
    return loaded(config("wan_flf2v"))


@pytest.mark.parametrize("size", [(64, 96), (300, 224), (50, 50)])
@pytest.mark.parametrize("kind", IMAGE_ENCODERS)
def test_an_image_is_seen_as_its_processor_makes_it(kind: str, size: tuple[int, int]) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    made = {"CLIPVisionModel": CLIPImageProcessorPil, "SiglipVisionModel": SiglipImageProcessorPil}[kind]
    pixels = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    images = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in pixels]
    theirs = made(size={"height": 56, "width": 56}, resample=3) if kind.startswith("Siglip") else made()
    seen = looked_at(pixels, 56 if kind.startswith("Siglip") else 224, IMAGE_ENCODERS[kind])
    np.testing.assert_allclose(seen, theirs(images=images, return_tensors="np")["pixel_values"], atol=1e-6)


def test_a_frame_that_is_shown_by_itself_is_the_first_latent_and_the_others_are_zeros() -> None:
    tiny = loaded(config("hunyuan_video_15_i2v"))
    batch = batch_of(tiny.family, Bucket(64, 96, 9))
    told = tiny.family.frames(batch, tiny.parts)
    mask, latents = told[FRAMES].split((1, 8), dim=1)
    assert mask[0, 0, :, 0, 0].tolist() == [1, 0, 0] and not latents[:, :, 1:].any()
    first = batch.features["pixels"][:, :, 0]
    mean, _ = posterior(tiny.parts.frozen["vae"], first, fp32=True, batch_size=None)
    torch.testing.assert_close(latents[:, :, :1], tiny.family.vae.scaled(mean))
    batch.features["pixels"] = batch.features["pixels"].clone()
    batch.features["pixels"][:, :, 1:] = 7
    assert all(torch.equal(value, told[name]) for name, value in tiny.family.frames(batch, tiny.parts).items())
    batch.features["pixels"], batch.bucket = first, Bucket(64, 96)  # an image is a clip of one frame
    alone = tiny.family.frames(batch, tiny.parts)
    assert torch.equal(alone[FRAMES][:, :, 0], told[FRAMES][:, :, 0]) and alone[FRAMES].shape[2] == 1


def test_only_what_is_shown_of_a_clip_matters(both: Tiny) -> None:
    family = both.family
    batch = batch_of(family, Bucket(64, 96, 9))
    told = family.frames(batch, both.parts)
    mask, latents = told[FRAMES][:, :4], told[FRAMES][:, 4:]
    assert mask[0, :, :, 0, 0].T.tolist() == [[1] * 4, [0] * 4, [0, 0, 0, 1]]
    pixels = batch.features["pixels"]
    grey = pixels.float() / 127.5 - 1
    grey[:, :, 1:-1] = 0
    mean, _ = posterior(both.parts.frozen["vae"], grey, fp32=True, batch_size=None)
    torch.testing.assert_close(latents, family.vae.scaled(mean))
    batch.features["pixels"] = pixels.clone()
    batch.features["pixels"][:, :, 1:-1] = 7
    assert all(torch.equal(value, told[name]) for name, value in family.frames(batch, both.parts).items())
    batch.features["pixels"][:, :, -1] = 7
    again = family.frames(batch, both.parts)
    assert not torch.equal(again[FRAMES], told[FRAMES])
    assert torch.equal(again[SEEN][:, :5], told[SEEN][:, :5]) and not torch.equal(again[SEEN][:, 5:], told[SEEN][:, 5:])


def test_images_stand_for_the_ends_of_a_clip() -> None:
    first, last = torch.zeros(1, 3, 2, 2), torch.ones(1, 3, 2, 2)
    assert clip_of([first, last], 5)[0, 0, :, 0, 0].tolist() == [0, 0, 0, 0, 1]
    assert clip_of([first], 5).abs().sum() == 0 and clip_of([first, last], 1).abs().sum() == 0


def test_a_folder_of_the_other_kind_or_without_an_image_encoder_is_refused(both: Tiny, tmp_path: Path) -> None:
    folder = exported(both, tmp_path / "folder")
    for name in ("wan_i2v", "wan"):
        with pytest.raises(ConfigFault) as caught:
            made(config(name, pretrained=str(folder))).load(meta=True)
        assert any(str(folder) in str(fault) for fault in caught.value.faults)
    shutil.rmtree(folder / "image_encoder")
    with pytest.raises(ConfigFault) as caught:
        made(config("wan_flf2v", pretrained=str(folder))).load(meta=True)
    assert any("image_encoder" in str(fault) for fault in caught.value.faults)
