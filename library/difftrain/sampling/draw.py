"""From noise to pictures: one loop over a diffusers scheduler for every family, flow or not."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import UNTIL
from difftrain.sampling.clips import DrawnClip, sheet_of
from difftrain.sampling.edits import Edit, SourcePicture, reference_image, reference_pixels
from difftrain.sampling.png import facts_of, parameters, png_bytes
from difftrain.sampling.prompts import UNIT, Prompt
from difftrain.sampling.samplers import make_sampler

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from difftrain.contracts import Drawer

ClipWriter = Callable[[Path, DrawnClip, Mapping[str, Any]], None]
FILLER = "#808080"  # between pictures of a grid: neither a light nor a dark page's ground


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
    edit: Edit | None = None,
) -> Tensor:
    """Walk from noise to latents. Shapes: noise and latents (B, C, [F,] h, w).

    unconditional: what guidance starts from; None: no guidance. generator: of what a sampler draws on its way, one or one
    a picture. edit: the picture that the walk begins at. Raises ConfigFault where its strength leaves no step.
    guidance: the scale of with_guidance, 1 for none.
    """
    # the sampler's times, and conditions for both halves of guidance in one batch
    _set_times(model, sampler, steps)
    inputs = dict(conditions) if unconditional is None else _joined(unconditional, conditions)
    options = {"generator": generator} if "generator" in inspect.signature(sampler.step).parameters else {}

    # from the sampler's first noise level down: one prediction and one step at each time
    times = sampler.timesteps
    if edit is None:
        x = noise * getattr(sampler, "init_noise_sigma", 1.0)
    else:
        times = edit.times(sampler, steps)
        x = edit.start(sampler, noise, times[0])
    for number, t in enumerate(times):
        entering = x if unconditional is None else torch.cat([x, x])
        if hasattr(sampler, "scale_model_input"):
            entering = sampler.scale_model_input(entering, t)
        if UNTIL in inputs:
            following = times[number + 1] if number + 1 < len(times) else torch.zeros_like(t)
            inputs[UNTIL] = following.to(inputs[UNTIL]).expand(len(entering))
        output = model.predict(entering, t, inputs)
        if unconditional is not None:
            without, with_text = output.chunk(2)
            output = model.with_guidance(without, with_text, guidance)
        x = sampler.step(output, t, x, **options, return_dict=False)[0]
        if edit is not None:
            x = edit.kept(sampler, x, noise, times[number + 1 : number + 2])
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
    modes = [(module, module.training) for root in modules for module in root.modules()]
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
    sampler: str, seeds: Sequence[int], spacing: str | None = None, references: Sequence[Tensor] = (), frames: int = 1,
) -> Tensor:  # fmt: skip
    """Draw captions from noise that is given, with the model's own unconditional where there is guidance.

    seeds: of what a sampler draws on its way. references: images that it is shown, (B, 3, H, W) uint8 each. spacing: diffusers' timestep_spacing, in place of the model's own. The
    caller may hold autocast: the VAE is decoded outside of it.
    Shapes: noise (B, C, [F,] h, w) on the model's device; (B, 3, [frames,] H, W) in 0..1, fp32.
    """
    config = {**model.scheduler.config, **({"timestep_spacing": spacing} if spacing else {})}
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    with evaluating(model.modules), torch.no_grad():
        conditions = model.conditions(list(captions), size_hw, references=references)
        latents = walk(
            model,
            conditions,
            model.unconditional([""] * len(captions), conditions, size_hw, references=references)
            if guidance > 1
            else None,
            noise,
            sampler=make_sampler(sampler, config, model.tokens(size_hw, frames), mu=model.mu),
            steps=steps,
            guidance=guidance,
            generator=generators,
        )
        return model.decode(latents)


# --- Draw prompts with the modules in training, which stay as they are


@dataclass(frozen=True)
class GridPicture:
    """One drawn prompt, the seed that drew it, and the sampler. is_finite: it was drawn of numbers.

    image: of a clip, some of its frames side by side.
    """

    image: Image
    seed: int
    sampler: str = ""
    is_finite: bool = True
    clip: DrawnClip | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Return (width, height) of what was drawn."""
        return self.clip.size if self.clip is not None else self.image.size

    def facts(self, prompt: Prompt, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return how it was drawn, as JSON."""
        own = self.clip.facts if self.clip is not None else {}
        return facts_of(prompt, self.seed, self.sampler, self.size, own | dict(about or {}))


def draw_grid(
    model: Drawer, prompts: Sequence[Prompt], folder: Path, name: str, when: str, *, sampler: str, seed: int | None,
    about: Mapping[str, Any] | None = None, write_clip: ClipWriter | None = None,
) -> Path:  # fmt: skip
    """Draw every prompt, write each as kohya names it and all as one grid; return the grid's path.

    Files: NAME_WHEN_00_20240131120000_SEED.png, NAME_WHEN_grid.png, which say how they were drawn. Of a clip the .png shows
    some frames, and write_clip writes it beside that. A prompt without a seed takes the run's. about: what else the files are to say (weights, step, version).
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(model, prompts, sampler=sampler, seed=seed)
    stamp = time.strftime("%Y%m%d%H%M%S")
    facts = [picture.facts(prompt, about) for prompt, picture in zip(prompts, pictures, strict=True)]
    for i, (picture, fact) in enumerate(zip(pictures, facts)):
        path = folder / f"{name}_{when}_{i:02d}_{stamp}_{picture.seed}.png"
        path.write_bytes(png_bytes(picture.image, parameters(fact), fact))
        if picture.clip is not None and write_clip is not None:
            write_clip(path, picture.clip, fact)
    path = folder / f"{name}_{when}_grid.png"
    path.write_bytes(png_bytes(grid_of([picture.image for picture in pictures]), parameters(facts[0]), facts))
    return path


def draw_pictures(model: Drawer, prompts: Sequence[Prompt], *, sampler: str, seed: int | None) -> list[GridPicture]:
    """Draw every prompt. The noise comes from the host, so a seed draws the same on every device."""
    with evaluating(model.modules):
        return [draw_one(model, prompt, sampler=sampler, seed=seed) for prompt in prompts]


def draw_one(
    model: Drawer, prompt: Prompt, *, sampler: str, seed: int | None, source: SourcePicture | None = None
) -> GridPicture:
    """Draw one prompt. The caller may hold autocast: the VAE is decoded outside of it, in its own dtype.

    source: a picture to begin at.
    """
    chosen = prompt.seed if prompt.seed is not None else (seed or 0)
    size, frames = drawn_size(model, prompt), 1 if source is not None else model.frames_of(prompt.frame_count)
    # on the host, so that every device draws the same noise; that of the picture's posterior first, as in diffusers
    generator = torch.Generator("cpu").manual_seed(chosen)
    edit = None if source is None else source.edit(model, size, generator)
    noise = torch.randn((1, *model.latent_shape(size, frames)), generator=generator)
    # without guidance the unconditional pass is not needed
    negative = [prompt.negative_prompt or ""] if prompt.scale > 1 else None
    name = prompt.sample_sampler or sampler
    stepper = make_sampler(
        name, model.scheduler.config, model.tokens(size, frames), shift=prompt.flow_shift, mu=model.mu
    )
    shown = [reference_pixels(file, partial(model.reference_size, size)) for file in prompt.control_image]
    conditions = model.conditions([prompt.prompt], size, prompt.guidance_scale, shown, frames)
    device = next(iter(conditions.values())).device
    latents = walk(
        model,
        conditions,
        None if negative is None else model.unconditional(negative, conditions, size, prompt.guidance_scale, shown),
        noise.to(device),
        sampler=stepper,
        steps=prompt.sample_steps,
        guidance=prompt.scale,
        generator=generator,
        edit=edit,
    )
    pixels = model.decode(latents)[0]
    is_finite = bool(torch.isfinite(pixels).all())
    if frames == 1:
        return GridPicture(image_of(pixels), chosen, name, is_finite)
    clip = DrawnClip.of(pixels, model.fps)
    return GridPicture(sheet_of(clip.frames), chosen, name, is_finite, clip)


def image_of(pixels: Tensor) -> Image:
    """Make a picture of pixels in 0..1, (3, H, W), or of the first frame of a clip."""
    from PIL import Image as images_of

    frame = pixels[:, 0] if pixels.ndim == 4 else pixels
    return images_of.fromarray((frame.movedim(0, -1) * 255).round().byte().cpu().numpy())


def drawn_size(model: Drawer, prompt: Prompt) -> tuple[int, int]:
    """Return (height, width): the prompt's, else the training's or the model's own; multiples of 8 and of the model's.

    A prompt with a reference image and without a size has the image's shape, as large as the model's own.
    """
    native, unit = model.native_size, math.lcm(UNIT, model.unit)
    if prompt.control_image and not (prompt.height or prompt.width):
        shown = reference_image(prompt.control_image[0])
        side = math.sqrt(native[0] * native[1] / (shown.width * shown.height))
        native = (_nearest(shown.height * side, unit), _nearest(shown.width * side, unit))
    height, width = prompt.height or native[0], prompt.width or native[1]
    return max(unit, height - height % unit), max(unit, width - width % unit)


def _nearest(length: float, unit: int) -> int:
    return max(unit, round(length / unit) * unit)


def grid_of(images: Sequence[Image]) -> Image:
    """Lay pictures out row by row, in cells of the largest, about as many rows as columns."""
    from PIL import Image as images_of

    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = max(i.width for i in images), max(i.height for i in images)
    grid = images_of.new("RGB", (columns * width, rows * height), FILLER)
    for number, image in enumerate(images):
        grid.paste(image, (number % columns * width, number // columns * height))
    return grid
