"""Frames of a clip that a model is shown: the first, or the first and the last, made of the clip's own pixels.

1. As latents, under a mask that says which frames are shown: the VAE over a clip whose other frames are grey, or over the
   first frame by itself, with zeros for the others.
2. As an image encoder sees them, where the family has one.

Both can be cached as other features of pixels. What is drawn is shown images that stand for these frames.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ImageEncoder:
    """How a class of image encoders sees a picture, and what of it is read.

    state: which of its hidden states, None: its output. row: it has a token of its own beside the patches. cut: the middle
    of a picture is seen, else all of it, in a square. mean, std: of its pixels. folder, processor: where diffusers'
    pipelines have what does this to pictures, and its class.
    """

    state: int | None
    row: bool
    cut: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    folder: str
    processor: str


IMAGE_ENCODERS = {
    "CLIPVisionModel": ImageEncoder(
        -2, True, True, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711),
        "image_processor", "CLIPImageProcessor",
    ),
    "SiglipVisionModel": ImageEncoder(
        None, False, False, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "feature_extractor", "SiglipImageProcessor"
    ),
}  # fmt: skip


def encoders(family: Any, parts: Parts) -> dict[str, Encoder]:
    """Describe what may be cached of the frames that a family is shown."""
    made = {LATENTS: _latents(family, parts)}
    if family.frames_encoder:
        made[family.frames_encoder] = _sight(family, parts)
    return made


def features(family: Any) -> dict[str, Feature]:
    """Describe what is made of the frames."""
    vae = family.vae
    made = {LATENTS: Feature(vae.raw_channels, vae.raw_factor, frames=0 if family.frame_alone else vae.frames)}
    if family.frames_encoder:
        sizes = family.source.complete(family.frames_encoder)
        rows = (sizes["image_size"] // sizes["patch_size"]) ** 2 + _encoder(family).row
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


def of_batch(family: Any, batch: Batch, parts: Parts) -> dict[str, Tensor]:
    """Return the frames of a batch as conditions."""
    return conditions(family, encoded(family, batch, parts), batch.bucket.frames)


def conditions(family: Any, made: dict[str, Tensor], frames: int) -> dict[str, Tensor]:
    """Turn features into conditions of clips of so many frames: FRAMES (B, k + C, F', h, w), and SEEN (B, L, D).

    k is the frames of a latent, or 1 where a frame is encoded by itself.
    """
    raw, every = made[LATENTS].float(), family.vae.frames
    latents = family.vae.scaled(raw.unsqueeze(2) if family.frame_alone else raw)
    if family.frame_alone:
        latents = torch.nn.functional.pad(latents, (0, 0, 0, 0, 0, (frames - 1) // every))
    mask = latents.new_zeros(latents.shape[0], 1 if family.frame_alone else every, *latents.shape[2:])
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
    """Describe the VAE over the frames: the posterior's mean."""
    last, model, dtype = family.row.shown_frames == 2, family.cfg.model, family.storage_dtype("vae")
    what = "first frame alone" if family.frame_alone else f"first {'and the last ' * last}frame"
    settings = f"mean of the posterior of the {what} in {dtype}"

    @torch.no_grad()
    def encode(batch: Batch) -> dict[str, Tensor]:
        pixels = batch.features["pixels"]
        if family.frame_alone:
            shown = pixels_to_unit(pixels[:, :, 0] if pixels.ndim == 5 else pixels)
        else:
            shown = _others_grey(pixels, last=last)
        mean, _ = posterior(parts.frozen["vae"], shown, fp32=model.vae_fp32, batch_size=model.vae_batch_size)
        return {LATENTS: mean.squeeze(2) if family.frame_alone else mean}

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


def _encoder(family: Any) -> ImageEncoder:
    return IMAGE_ENCODERS[family.parts[family.frames_encoder].partition(":")[2]]


def _sight(family: Any, parts: Parts) -> Encoder:
    """Describe the image encoder over the frames: each one's rows, one behind the other."""
    part, last, seeing = family.frames_encoder, family.row.shown_frames == 2, _encoder(family)
    side = family.source.complete(part)["image_size"]
    which = "output" if seeing.state is None else f"state {seeing.state}"
    settings = f"{which} of the first {'and the last ' * last}frame at {side} px, {family.precision(part)}"

    @torch.no_grad()
    def encode(batch: Batch) -> dict[str, Tensor]:
        pixels, module = batch.features["pixels"], parts.frozen[part]
        clip = pixels if pixels.ndim == 5 else pixels.unsqueeze(2)
        frames = [clip[:, :, 0], clip[:, :, -1]][: family.row.shown_frames]
        dtype = next(module.parameters()).dtype
        states = []
        for frame in frames:
            seen = looked_at(frame, side, seeing).to(dtype)
            out = module(pixel_values=seen, output_hidden_states=seeing.state is not None)
            states.append(out.last_hidden_state if seeing.state is None else out.hidden_states[seeing.state])
        return {SEEN: torch.cat(states, dim=1).to(dtype)}

    return Encoder(
        source=PIXELS,
        features={SEEN: features(family)[SEEN]},
        modules=(part,),
        settings=settings,
        encode=encode,
        fingerprint=partial(family.fingerprint, part, settings),
    )


def looked_at(pixels: Tensor, side: int, seeing: ImageEncoder) -> Tensor:
    """Bring pictures to a square and normalise. Shapes: (B, 3, H, W) uint8 -> (B, 3, side, side) fp32.

    As the encoder's processor does it, by Pillow on the host, so that every device sees the same: the shorter side becomes
    `side` and the middle is cut out, or both sides do.
    """
    return torch.stack([_one(picture, side, seeing) for picture in pixels.cpu()]).to(pixels.device)


def _one(picture: Tensor, side: int, seeing: ImageEncoder) -> Tensor:
    height, width = picture.shape[-2:]
    short = min(height, width)
    size = (int(side * height / short), int(side * width / short)) if seeing.cut else (side, side)
    image = Image.fromarray(picture.permute(1, 2, 0).numpy()).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    cut = np.asarray(image)[top : top + side, left : left + side].astype(np.float32) / 255.0
    normal = (cut - np.array(seeing.mean, dtype=np.float32)) / np.array(seeing.std, dtype=np.float32)
    return torch.from_numpy(normal).permute(2, 0, 1).contiguous()


def write_beside(family: Any, folder: Path) -> dict[str, list[str]]:
    """Write what the pipeline of a folder does to images, and name its class."""
    side, seeing = family.source.complete(family.frames_encoder)["image_size"], _encoder(family)
    square = {"height": side, "width": side}
    how = (
        {"crop_size": square, "size": {"shortest_edge": side}, "do_center_crop": True}
        if seeing.cut
        else {"size": square}
    )
    content = {
        "image_processor_type": seeing.processor, **how, "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "do_resize": True, "image_mean": list(seeing.mean), "image_std": list(seeing.std), "resample": 3,
        "rescale_factor": 1 / 255,
    }  # fmt: skip
    (folder / seeing.folder).mkdir(exist_ok=True)
    (folder / seeing.folder / PROCESSOR).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return {seeing.folder: ["transformers", seeing.processor]}
