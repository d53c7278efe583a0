"""Draw prompts with the modules in training, which stay as they are."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from difftrain.sampling import draw
from difftrain.sampling.prompts import UNIT, Prompt
from difftrain.sampling.samplers import make_sampler

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from difftrain.contracts import Drawer


@dataclass(frozen=True)
class GridPicture:
    """One drawn prompt, and the seed that drew it."""

    image: Image
    seed: int


def draw_grid(
    model: Drawer, prompts: Sequence[Prompt], folder: Path, name: str, when: str, *, sampler: str, seed: int | None
) -> Path:
    """Draw every prompt, write each as kohya names it and all as one grid; return the grid's path.

    Files: NAME_WHEN_00_20240131120000_SEED.png, NAME_WHEN_grid.png. A prompt without a seed takes the run's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(model, prompts, sampler=sampler, seed=seed)
    stamp = time.strftime("%Y%m%d%H%M%S")
    for i, picture in enumerate(pictures):
        picture.image.save(folder / f"{name}_{when}_{i:02d}_{stamp}_{picture.seed}.png")
    path = folder / f"{name}_{when}_grid.png"
    grid_of([picture.image for picture in pictures]).save(path)
    return path


def draw_pictures(model: Drawer, prompts: Sequence[Prompt], *, sampler: str, seed: int | None) -> list[GridPicture]:
    """Draw every prompt. The noise comes from the host, so a seed draws the same on every device."""
    with draw.evaluating(model.modules):
        return [draw_one(model, prompt, sampler=sampler, seed=seed) for prompt in prompts]


def draw_one(model: Drawer, prompt: Prompt, *, sampler: str, seed: int | None) -> GridPicture:
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
        None if negative is None else model.unconditional(negative, conditions, size, prompt.guidance_scale),
        noise.to(device),
        sampler=stepper,
        steps=prompt.sample_steps,
        guidance=prompt.scale,
        generator=generator,
    )
    return GridPicture(image_of(model.decode(latents)[0]), chosen)


def image_of(pixels: Tensor) -> Image:
    """Make a picture of pixels in 0..1, (3, H, W), or of the first frame of a clip."""
    from PIL import Image as images_of

    frame = pixels[:, 0] if pixels.ndim == 4 else pixels
    return images_of.fromarray((frame.movedim(0, -1) * 255).round().byte().cpu().numpy())


def drawn_size(model: Drawer, prompt: Prompt) -> tuple[int, int]:
    """Return (height, width): the prompt's, else the training's or the model's own; multiples of 8 and of the model's."""
    height, width = prompt.height or model.native_size[0], prompt.width or model.native_size[1]
    unit = math.lcm(UNIT, model.unit)
    return max(unit, height - height % unit), max(unit, width - width % unit)


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
