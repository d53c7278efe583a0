"""Latents from pixels, by a frozen VAE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.models.vae.adapters import CLASSES

if TYPE_CHECKING:
    from torch import Tensor


def pixels_to_unit(pixels: Tensor) -> Tensor:
    """Map uint8 pixels to [-1, 1] in fp32."""
    return pixels.float().div_(127.5).sub_(1.0)


@torch.no_grad()
def posterior(vae: Any, pixels: Tensor, *, fp32: bool, batch_size: int | None) -> tuple[Tensor, Tensor]:
    """Encode pictures or clips: mean and standard deviation of their raw latents, in fp32.

    Shapes: pixels (B, 3, [F,] H, W) uint8 -> (B, C, [F',] H / f, W / f) each; a picture is a clip of one frame to a VAE
    of clips. fp32 turns autocast off around the VAE, whose activations overflow fp16 in SDXL. batch_size bounds how many
    are encoded at once. The deviation is 0 where the VAE has no posterior.
    """
    row = CLASSES.get(type(vae).__name__)
    if row is not None and row.clips and pixels.ndim == 4:
        pixels = pixels.unsqueeze(2)
    with torch.autocast(pixels.device.type, enabled=False):
        dtype = torch.float32 if fp32 else next(vae.parameters()).dtype
        pieces = pixels.split(batch_size or len(pixels))
        moments = torch.cat([_moments(vae, pixels_to_unit(piece).to(dtype)) for piece in pieces])
    if row is not None and not row.samples:
        mean = moments.float()
        return mean, torch.zeros_like(mean)
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean, logvar.clamp(-30.0, 20.0).mul(0.5).exp()


def _moments(vae: Any, x: Tensor) -> Tensor:
    return vae.encode(x).latent_dist.parameters
