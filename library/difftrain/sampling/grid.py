"""Draw prompts with a diffusers pipeline over the modules in training, which stay as they are."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.sampling.prompts import UNIT, Prompt
from difftrain.sampling.samplers import make_sampler

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

LARGEST_DEFAULT = 512  # kohya's size where a prompt names none; smaller models draw their own


@dataclass(frozen=True)
class Picture:
    """One drawn prompt, and the seed that drew it."""

    image: Image
    seed: int


def draw_grid(
    pipeline: Any, prompts: Sequence[Prompt], folder: Path, name: str, when: str, *, sampler: str, seed: int | None
) -> Path:
    """Draw every prompt, write each as kohya names it and all as one grid; return the grid's path.

    Files: NAME_WHEN_00_20240131120000_SEED.png, NAME_WHEN_grid.png. A prompt without a seed takes the run's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(pipeline, prompts, sampler=sampler, seed=seed)
    stamp = time.strftime("%Y%m%d%H%M%S")
    for i, picture in enumerate(pictures):
        picture.image.save(folder / f"{name}_{when}_{i:02d}_{stamp}_{picture.seed}.png")
    path = folder / f"{name}_{when}_grid.png"
    grid_of([picture.image for picture in pictures]).save(path)
    return path


def draw_pictures(pipeline: Any, prompts: Sequence[Prompt], *, sampler: str, seed: int | None) -> list[Picture]:
    """Draw every prompt. The noise comes from the host, so a seed draws the same on every device."""
    pipeline.set_progress_bar_config(disable=True)
    kept = pipeline.scheduler
    pictures = []
    try:
        with evaluating(pipeline), torch.no_grad():
            for prompt in prompts:
                name, tokens = prompt.sample_sampler or sampler, tokens_of(pipeline, *size_of(pipeline, prompt))
                pipeline.scheduler = make_sampler(name, kept.config, tokens, shift=prompt.flow_shift)
                chosen = prompt.seed if prompt.seed is not None else (seed or 0)
                pictures.append(Picture(_draw(pipeline, prompt, chosen), chosen))
    finally:
        pipeline.scheduler = kept
    return pictures


def _draw(pipeline: Any, prompt: Prompt, seed: int) -> Image:
    """Draw one prompt. The caller may hold autocast: the VAE is decoded outside of it, in its own dtype."""
    height, width = size_of(pipeline, prompt)
    generator = torch.Generator("cpu").manual_seed(seed)
    factor, channels = pipeline.vae_scale_factor, denoiser_of(pipeline).config.in_channels
    noise = torch.randn((1, channels, height // factor, width // factor), generator=generator)
    latents = pipeline(
        prompt.prompt,
        negative_prompt=prompt.negative_prompt,
        height=height,
        width=width,
        num_inference_steps=prompt.sample_steps,
        guidance_scale=prompt.scale,
        generator=generator,
        latents=noise,
        output_type="latent",
    ).images
    return decode(pipeline, latents)


def denoiser_of(pipeline: Any) -> Any:
    """Return the network of a pipeline that is trained."""
    return pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer


def patch_of(pipeline: Any) -> int:
    """Return how many latent pixels lie along the side of one token; 1 for a UNet."""
    return int(getattr(denoiser_of(pipeline).config, "patch_size", None) or 1)


def tokens_of(pipeline: Any, height: int, width: int) -> int:
    """Count the tokens of a picture."""
    unit = pipeline.vae_scale_factor * patch_of(pipeline)
    return (height // unit) * (width // unit)


def decode(pipeline: Any, latents: Tensor) -> Image:
    """Turn scaled latents (1, C, h, w) into a picture."""
    vae = pipeline.vae
    with torch.autocast(latents.device.type, enabled=False):
        dtype = next(vae.parameters()).dtype
        raw = latents / vae.config.scaling_factor + (getattr(vae.config, "shift_factor", None) or 0.0)
        pixels = vae.decode(raw.to(dtype), return_dict=False)[0].float()
    return pipeline.image_processor.postprocess(pixels, output_type="pil")[0]


def size_of(pipeline: Any, prompt: Prompt) -> tuple[int, int]:
    """Return (height, width): the prompt's, else that of the training where the pipeline knows it, else the model's own.

    The model's own size counts up to 512. Sides are multiples of 8 (kohya), or of what the model needs.
    """
    factor = pipeline.vae_scale_factor
    own = min(LARGEST_DEFAULT, denoiser_of(pipeline).config.sample_size * factor)
    native = getattr(pipeline, "native_size", None) or (own, own)
    height, width = prompt.height or native[0], prompt.width or native[1]
    unit = math.lcm(UNIT, factor * patch_of(pipeline)) if patch_of(pipeline) > 1 else max(UNIT, factor)
    return max(unit, height - height % unit), max(unit, width - width % unit)


@contextmanager
def evaluating(pipeline: Any) -> Iterator[None]:
    """Put a pipeline's modules into eval mode, and every submodule back into the mode that it had."""
    modules = [m for part in pipeline.components.values() if isinstance(part, torch.nn.Module) for m in part.modules()]
    modes = [(module, module.training) for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def grid_of(images: Sequence[Image]) -> Image:
    """Lay pictures out row by row on white, in cells of the largest, about as many rows as columns."""
    from PIL import Image as images_of

    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = max(i.width for i in images), max(i.height for i in images)
    grid = images_of.new("RGB", (columns * width, rows * height), "white")
    for place, image in enumerate(images):
        grid.paste(image, (place % columns * width, place // columns * height))
    return grid
