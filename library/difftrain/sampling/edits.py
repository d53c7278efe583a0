"""Pictures drawn from pictures: a walk that begins at a noised picture, and keeps what a mask leaves.

1. A `SourcePicture` is brought to the size that is drawn; its latents are those of the family's own VAE.
2. `Edit.times` leaves out the steps before the strength's noise level, and `start` noises the latents to that level.
3. After each step `kept` puts the picture, at that step's noise level, where the mask is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from difftrain.contracts import ConfigFault, Fault
from difftrain.sampling.prompts import Prompt
from difftrain.sampling.samplers import is_flow

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from difftrain.contracts import Drawer

MASK_FROM = 0.5  # of white: from here on a pixel is drawn anew


@dataclass(frozen=True)
class Edit:
    """Begin a walk at a picture. Source: Meng et al. 2022, SDEdit; the mask as in Lugmayr et al. 2022, RePaint, once a step.

    latents: of the picture, as the denoiser takes them, (B, C, h, w). strength: share of the steps that are walked, above
    0 and up to 1. mask: (1, 1, h, w), 1 where the picture is drawn anew, 0 where it stays; None: all is drawn.
    """

    latents: Tensor
    strength: float
    mask: Tensor | None = None

    def times(self, sampler: Any, steps: int) -> Tensor:
        """Return the times that are walked, and tell the sampler at which it begins.

        A flow rounds the number of steps that are left out down, the others that of those which are walked, as their
        pipelines in diffusers do. Raises ConfigFault where none is left.
        """
        if is_flow(sampler.config):
            first = int(max(steps - min(steps * self.strength, steps), 0))
        else:
            first = max(steps - min(int(steps * self.strength), steps), 0)
        times: Tensor = sampler.timesteps[first * sampler.order :]
        if not len(times):
            what = f"{self.strength:g} of {steps} steps leaves no step to sample"
            raise ConfigFault([Fault("strength", what, f"from {1 / steps:.3g} up, or more steps")])
        if hasattr(sampler, "set_begin_index"):
            sampler.set_begin_index(first * sampler.order)
        return times

    def start(self, sampler: Any, noise: Tensor, t: Tensor) -> Tensor:
        """Return the latents at the first time's noise level; with a mask and the whole strength, noise alone."""
        if self.mask is not None and self.strength == 1.0:
            return noise * getattr(sampler, "init_noise_sigma", 1.0)
        return _noised(sampler, self.latents.to(noise.device), noise, t)

    def kept(self, sampler: Any, x: Tensor, noise: Tensor, following: Tensor) -> Tensor:
        """Put the picture where the mask is 0, at the noise level of the following time; after the last one without noise."""
        if self.mask is None:
            return x
        mask, own = self.mask.to(x.device), self.latents.to(x.device)
        if len(following):
            own = _noised(sampler, own, noise, following[0])
        return (1 - mask) * own + mask * x


def _noised(sampler: Any, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Bring latents to the noise level of a time, by the sampler's own formula."""
    add = sampler.scale_noise if hasattr(sampler, "scale_noise") else None
    times = t.reshape(1)
    return add(latents, times, noise) if add is not None else sampler.add_noise(latents, noise, times)


LARGEST_SIDE = 16384  # of an image that is read
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")


def read_image_file(path: Path, flag: str) -> Image:
    """Read an image to draw from, upright. flag: what messages call it. Raises ConfigFault."""
    from PIL import Image as images
    from PIL import ImageOps

    images.init()  # registers every format, of which a few are read
    try:
        if not path.is_file():  # a pipe would be waited for
            raise OSError("it is no regular file")
        with images.open(path, formats=FORMATS) as opened:
            if max(opened.size) > LARGEST_SIDE:
                what = f"{path} is {opened.width} x {opened.height} px"
                raise ConfigFault([Fault(flag, what, f"sides up to {LARGEST_SIDE} px")])
            return ImageOps.exif_transpose(opened).copy()
    except (OSError, ValueError, SyntaxError, images.DecompressionBombError) as error:
        raise ConfigFault([Fault(flag, f"{path} cannot be read as an image: {error}", "give a PNG or JPEG")]) from None


def reference_image(file: str) -> Image:
    """Read a reference image of a prompt as training sees images: over white. Raises ConfigFault."""
    from PIL import Image as images

    rgba = read_image_file(Path(file).expanduser(), "--ci").convert("RGBA")
    return images.alpha_composite(images.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def check_references(prompts: Sequence[Prompt]) -> None:
    """Read the reference images of prompts once, before anything is drawn. Raises ConfigFault with all that cannot be read."""
    faults: list[Fault] = []
    for file in dict.fromkeys(file for prompt in prompts for file in prompt.control_image):
        try:
            reference_image(file)
        except ConfigFault as error:
            faults += error.faults
    if faults:
        raise ConfigFault(faults)


def reference_pixels(file: str, size_of: Callable[[tuple[int, int]], tuple[int, int]]) -> Tensor:
    """Bring a reference image to the size that one of its shape is shown in, its middle where that has another shape.

    Shapes: size_of (height, width) -> (height, width); (1, 3, H, W) uint8. Raises ConfigFault.
    """
    from PIL import Image as images
    from PIL import ImageOps

    image = reference_image(file)
    height, width = size_of((image.height, image.width))
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), images.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(image).copy()).movedim(-1, 0)[None]


@dataclass(frozen=True)
class SourcePicture:
    """A picture that others are drawn from. strength: see Edit. mask: white where it is drawn anew."""

    image: Image
    strength: float
    mask: Image | None = None

    def edit(self, model: Drawer, size_hw: tuple[int, int], generator: torch.Generator) -> Edit:
        """Encode the picture in the size that is drawn. generator: of the VAE's posterior."""
        height, width = size_hw
        pixels = torch.from_numpy(np.asarray(_fitted(self.image.convert("RGB"), width, height)).copy())
        latents = model.encode(pixels.movedim(-1, 0)[None], generator)
        if self.mask is None:
            return Edit(latents, self.strength)
        grey = torch.from_numpy(np.asarray(_fitted(self.mask.convert("L"), width, height)).copy()).float() / 255
        chosen = (grey >= MASK_FROM).float()[None, None]
        return Edit(latents, self.strength, interpolate(chosen, size=latents.shape[-2:]))


def _fitted(image: Image, width: int, height: int) -> Image:
    """Resize to a size, as diffusers' image processor does."""
    from PIL import Image as images_of

    return image if image.size == (width, height) else image.resize((width, height), images_of.Resampling.LANCZOS)
