"""Flux.1 Kontext: FluxTransformer2DModel and FluxKontextPipeline, which is shown an image; further ones are numbered on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from oracle import Conditions, Drawn, Oracle
from PIL import Image

from difftrain.contracts import control_name
from difftrain.models import passes

from . import flux

SIZE = (64, 96)  # of the image that is shown while one is drawn


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    from diffusers import FluxKontextPipeline

    (count, _, height, width), tokens = x.shape, told["tokens"]
    packed, places = [FluxKontextPipeline._pack_latents(x, *x.shape)], []
    places.append(FluxKontextPipeline._prepare_latent_image_ids(count, height // 2, width // 2, x.device, x.dtype))
    for number in range(3):
        if (shown := told.get(control_name(number))) is not None:
            packed.append(FluxKontextPipeline._pack_latents(shown, *shown.shape))
            rows, columns = shown.shape[-2] // 2, shown.shape[-1] // 2
            ids = FluxKontextPipeline._prepare_latent_image_ids(count, rows, columns, x.device, x.dtype)
            ids[..., 0] = number + 1
            places.append(ids)
    out = net(
        hidden_states=torch.cat(packed, dim=1),
        timestep=t / 1000,
        guidance=torch.full_like(t, guidance) if net.config.guidance_embeds else None,
        pooled_projections=told["pooled"],
        encoder_hidden_states=tokens,
        txt_ids=torch.zeros(tokens.shape[1], 3),
        img_ids=torch.cat(places),
        return_dict=False,
    )[0]
    return FluxKontextPipeline._unpack_latents(out[:, : packed[0].shape[1]], 8 * height, 8 * width, 8)


def reference() -> np.ndarray:
    """Return the image that is shown: gradients and a block."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    pixels = np.stack([3 * x % 256, 5 * y % 256, (2 * x + y) % 256], axis=-1).astype(np.uint8)
    pixels[8:40, 30:50] = (20, 200, 90)
    return pixels


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    own = {"image": Image.fromarray(reference()), "max_area": SIZE[0] * SIZE[1], "_auto_resize": False}
    return flux.options(ours, negative, scale) | own


ORACLE = Oracle(
    forward,
    flux.prompts,
    "convert_flux_transformer_checkpoint_to_diffusers",
    released={"dev": ({"guidance_embeds": True}, 1160)},
    small="max_area=64 * 64, _auto_resize=False, ",  # it brings what it is shown, and what it makes, to a size of its own
    drawn=Drawn(
        options,
        lambda x: passes.pack(x, 2),
        lambda x, size_hw: passes.unpack(x, 2, (size_hw[0] // 16, size_hw[1] // 16)),
        guidance=3.5,
        t5_length=32,
        references=(torch.from_numpy(reference()).movedim(-1, 0)[None],),
    ),
)
