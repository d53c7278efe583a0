"""Frames of a clip that a model is shown: the first, or the first and the last, made of the clip's own pixels.

1. As latents: the VAE over a clip whose other frames are grey, under a mask that says which frames are shown.
2. As an image encoder sees them, where the family has one: the states before its last layer.

Both can be cached as other features of pixels. What is drawn is shown images that stand for these frames.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from difftrain.contracts import PIXELS, Batch, Encoder, Feature, Parts
from difftrain.models.placeholder import DTYPES
from difftrain.models.text.see import PROCESSOR
from difftrain.models.vae.latents import pixels_to_unit, posterior

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


LATENTS, SEEN = "frame_latents", "frame_states"  # features; SEEN is a condition, too
FRAMES = "frames"  # condition: mask and latents, one behind the other
STATE = -2  # of the image encoder's hidden states
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


def encoders(family: Any, parts: Parts) -> dict[str, Encoder]:
    """Describe what may be cached of the frames that a family is shown."""
    made = {LATENTS: _latents(family, parts)}
    if family.frames_encoder:
        made[family.frames_encoder] = _sight(family, parts)
    return made


def features(family: Any) -> dict[str, Feature]:
    """Describe what is made of the frames."""
    vae = family.vae
    made = {LATENTS: Feature(vae.raw_channels, vae.raw_factor, frames=vae.frames)}
    if family.frames_encoder:
        sizes = family.source.complete(family.frames_encoder)
        rows = (sizes["image_size"] // sizes["patch_size"]) ** 2 + 1
        dtype = str(DTYPES[family.cfg.training.mixed_precision]).removeprefix("torch.")
        made[SEEN] = Feature(sizes["hidden_size"], length=rows * family.row.shown_frames, dtype=dtype)
    return made


def encoded(family: Any, batch: Batch, parts: Parts) -> dict[str, Tensor]:
    """Return what is made of the frames, from the cache or encoded now."""
    made: dict[str, Tensor] = {}
    for encoder in encoders(family, parts).values():
        names = list(encoder.features)
        stored = all(name in batch.features for name in names)
        made |= {name: batch.features[name] for name in names} if stored else encoder.encode(batch)
    return made


def conditions(family: Any, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn features into conditions: FRAMES (B, k + C, F', h, w) for a VAE of k frames a latent, and SEEN (B, L, D)."""
    latents = family.vae.scaled(made[LATENTS].float())
    mask = latents.new_zeros(latents.shape[0], family.vae.frames, *latents.shape[2:])
    mask[:, :, 0] = 1.0  # the first latent frame is one frame, and counts as all of it
    if family.row.shown_frames == 2:
        mask[:, -1, -1] = 1.0
    seen = {SEEN: made[SEEN].float()} if SEEN in made else {}
    return {FRAMES: torch.cat((mask, latents), dim=1), **seen}


def clip_of(images: Sequence[Tensor], frames: int) -> Tensor:
    """Lay images that stand for the first and the last frame into a clip. Shapes: (B, 3, H, W) each -> (B, 3, F, H, W)."""
    clip = images[0].unsqueeze(2).repeat(1, 1, frames, 1, 1)
    clip[:, :, -1] = images[-1] if frames > 1 else images[0]
    return clip


# --- Latents


def _latents(family: Any, parts: Parts) -> Encoder:
    """Describe the VAE over a clip whose other frames are grey: the posterior's mean."""
    last, model, dtype = family.row.shown_frames == 2, family.cfg.model, family.storage_dtype("vae")
    settings = f"mean of the posterior of the first {'and the last ' * last}frame in {dtype}"

    @torch.no_grad()
    def encode(batch: Batch) -> dict[str, Tensor]:
        clip = _others_grey(batch.features["pixels"], last=last)
        mean, _ = posterior(parts.frozen["vae"], clip, fp32=model.vae_fp32, batch_size=model.vae_batch_size)
        return {LATENTS: mean}

    return Encoder(
        source=PIXELS,
        features={LATENTS: features(family)[LATENTS]},
        modules=("vae",),
        settings=settings,
        encode=encode,
        fingerprint=partial(family.fingerprint, "vae", settings),
    )


def _others_grey(pixels: Tensor, *, last: bool) -> Tensor:
    """Keep the frames that are shown. Shapes: (B, 3, [F,] H, W) uint8 -> (B, 3, F, H, W) in -1..1."""
    clip = pixels_to_unit(pixels if pixels.ndim == 5 else pixels.unsqueeze(2))
    kept = torch.zeros_like(clip)
    kept[:, :, 0] = clip[:, :, 0]
    if last:
        kept[:, :, -1] = clip[:, :, -1]
    return kept


# --- An image encoder


def _sight(family: Any, parts: Parts) -> Encoder:
    """Describe the image encoder over the frames: each one's rows, one behind the other."""
    part, last = family.frames_encoder, family.row.shown_frames == 2
    side = family.source.complete(part)["image_size"]
    settings = f"state {STATE} of the first {'and the last ' * last}frame at {side} px, {family.precision(part)}"

    @torch.no_grad()
    def encode(batch: Batch) -> dict[str, Tensor]:
        pixels, module = batch.features["pixels"], parts.frozen[part]
        clip = pixels if pixels.ndim == 5 else pixels.unsqueeze(2)
        frames = [clip[:, :, 0], clip[:, :, -1]][: family.row.shown_frames]
        dtype = next(module.parameters()).dtype
        states = [
            module(pixel_values=looked_at(frame, side).to(dtype), output_hidden_states=True).hidden_states[STATE]
            for frame in frames
        ]
        return {SEEN: torch.cat(states, dim=1).to(dtype)}

    return Encoder(
        source=PIXELS,
        features={SEEN: features(family)[SEEN]},
        modules=(part,),
        settings=settings,
        encode=encode,
        fingerprint=partial(family.fingerprint, part, settings),
    )


def looked_at(pixels: Tensor, side: int) -> Tensor:
    """Bring the shorter side to `side`, cut the middle out, normalise. Shapes: (B, 3, H, W) uint8 -> (B, 3, side, side) fp32.

    As CLIP's processor does it, by Pillow on the host, so that every device sees the same.
    """
    return torch.stack([_one(picture, side) for picture in pixels.cpu()]).to(pixels.device)


def _one(picture: Tensor, side: int) -> Tensor:
    height, width = picture.shape[-2:]
    short = min(height, width)
    size = (int(side * height / short), int(side * width / short))
    image = Image.fromarray(picture.permute(1, 2, 0).numpy()).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    cut = np.asarray(image)[top : top + side, left : left + side].astype(np.float32) / 255.0
    normal = (cut - np.array(MEAN, dtype=np.float32)) / np.array(STD, dtype=np.float32)
    return torch.from_numpy(normal).permute(2, 0, 1).contiguous()


def write_beside(family: Any, folder: Path) -> dict[str, list[str]]:
    """Write what the pipeline of a folder does to images, and name its class."""
    side = family.source.complete(family.frames_encoder)["image_size"]
    content = {
        "image_processor_type": "CLIPImageProcessor", "crop_size": {"height": side, "width": side},
        "size": {"shortest_edge": side}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "do_resize": True, "image_mean": list(MEAN), "image_std": list(STD), "resample": 3,
        "rescale_factor": 1 / 255,
    }  # fmt: skip
    (folder / "image_processor").mkdir(exist_ok=True)
    (folder / "image_processor" / PROCESSOR).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return {"image_processor": ["transformers", "CLIPImageProcessor"]}
