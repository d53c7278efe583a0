"""HunyuanVideo-1.5 from an image: the transformer beside a frame that is shown, HunyuanVideo15ImageToVideoPipeline."""

from __future__ import annotations

from typing import Any

import torch
from family_oracles import hunyuan_video_15 as text_to_video
from family_oracles.hunyuan_video_15 import LENGTH, called, prompts, raw
from family_oracles.wan_i2v import FIRST, FRAMES, image_of
from oracle import Conditions, Drawn, Oracle


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    """Call it as the pipeline does: latents of the frame, then the mask."""
    mask, latents = told["frames"].split((1, x.shape[1]), dim=1)
    return called(net, torch.cat([x, latents, mask], dim=1), t, told, told["frame_states"])


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Name how a clip is drawn from its first frame."""
    return text_to_video.options(ours, negative, scale) | {"num_frames": FRAMES, "image": image_of(FIRST)}


def of_the_images_size(pipe: Any) -> Any:
    """Let the pipeline be told a size, which it takes from the image; the tiny one's is that of 64 x 96 px."""
    told = text_to_video.told_a_scale(pipe)

    class Sized(type(told)):
        def __call__(self, *, height: int, width: int, **given: Any) -> Any:
            return super().__call__(**given)

    told.__class__ = Sized
    return told


ORACLE = Oracle(
    forward,
    prompts,
    drawn=Drawn(options, raw=raw, mended=of_the_images_size, references=(FIRST,), frames=FRAMES),
    captions=text_to_video.ORACLE.captions,
    text_length=LENGTH,
    frame_times=False,
    sized=False,
)
