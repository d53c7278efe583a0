"""Draw prompts with a diffusers pipeline over the modules in training, which stay as they are."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.sampling import draw
from difftrain.sampling.prompts import UNIT, Prompt
from difftrain.sampling.samplers import make_sampler

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from difftrain.contracts import Drawer

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
    if hasattr(pipeline, "predict"):
        with draw.evaluating(pipeline.modules):
            return [draw_one(pipeline, prompt, sampler=sampler, seed=seed) for prompt in prompts]
    pipeline.set_progress_bar_config(disable=True)
    kept = pipeline.scheduler
    pictures = []
    try:
        with draw.evaluating(modules_of(pipeline)), torch.no_grad():
            for prompt in prompts:
                name, tokens = prompt.sample_sampler or sampler, tokens_of(pipeline, *size_of(pipeline, prompt))
                pipeline.scheduler = make_sampler(name, kept.config, tokens, shift=prompt.flow_shift)
                chosen = prompt.seed if prompt.seed is not None else (seed or 0)
                pictures.append(Picture(_draw(pipeline, prompt, chosen), chosen))
    finally:
        pipeline.scheduler = kept
    return pictures


def draw_one(model: Drawer, prompt: Prompt, *, sampler: str, seed: int | None) -> Picture:
    """Draw one prompt. The caller may hold autocast: the VAE is decoded outside of it, in its own dtype."""
    chosen = prompt.seed if prompt.seed is not None else (seed or 0)
    size = drawn_size(model, prompt)
    generator = torch.Generator("cpu").manual_seed(chosen)
    noise = torch.randn((1, *model.latent_shape(size)), generator=generator)
    negative = [prompt.negative_prompt or ""] if prompt.scale > 1 else None
    name = prompt.sample_sampler or sampler
    stepper = make_sampler(name, model.scheduler.config, model.tokens(size), shift=prompt.flow_shift)
    conditions = model.conditions([prompt.prompt], size, prompt.guidance_scale)
    device = next(iter(conditions.values())).device
    latents = draw.walk(
        model,
        conditions,
        None if negative is None else model.unconditional(negative, size, prompt.guidance_scale),
        noise.to(device),
        sampler=stepper,
        steps=prompt.sample_steps,
        guidance=prompt.scale,
        generator=generator,
    )
    return Picture(image_of(model.decode(latents)[0]), chosen)


def image_of(pixels: Tensor) -> Image:
    """Make a picture of pixels in 0..1, (3, H, W), or of the first frame of a clip."""
    from PIL import Image as images_of

    frame = pixels[:, 0] if pixels.ndim == 4 else pixels
    return images_of.fromarray((frame.movedim(0, -1) * 255).round().byte().cpu().numpy())


def drawn_size(model: Drawer, prompt: Prompt) -> tuple[int, int]:
    """Return (height, width): the prompt's, else the training's or the model's own; multiples of 8 and of the model's."""
    native = model.native_size or (LARGEST_DEFAULT, LARGEST_DEFAULT)
    height, width = prompt.height or native[0], prompt.width or native[1]
    unit = math.lcm(UNIT, model.unit)
    return max(unit, height - height % unit), max(unit, width - width % unit)


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


def modules_of(pipeline: Any) -> list[torch.nn.Module]:
    """Return the modules among a diffusers pipeline's components."""
    return [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]


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
