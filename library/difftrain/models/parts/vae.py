"""Latents from pixels, by a frozen AutoencoderKL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def pixels_to_unit(pixels: Tensor) -> Tensor:
    """Map uint8 pixels to [-1, 1] in fp32."""
    return pixels.float().div_(127.5).sub_(1.0)


@torch.no_grad()
def posterior(vae: Any, pixels: Tensor, *, fp32: bool, batch_size: int | None) -> tuple[Tensor, Tensor]:
    """Encode pictures: mean and standard deviation of their latents, in fp32.

    Shapes: pixels (B, 3, H, W) uint8 -> (B, C, H / f, W / f) each. fp32 turns autocast off around the VAE, whose
    activations overflow fp16 in SDXL. batch_size bounds how many pictures are encoded at once.
    """
    with torch.autocast(pixels.device.type, enabled=False):
        dtype = torch.float32 if fp32 else next(vae.parameters()).dtype
        pieces = pixels.split(batch_size or len(pixels))
        moments = torch.cat([_moments(vae, pixels_to_unit(piece).to(dtype)) for piece in pieces])
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean, logvar.clamp(-30.0, 20.0).mul(0.5).exp()


def _moments(vae: Any, x: Tensor) -> Tensor:
    return vae.encode(x).latent_dist.parameters
