"""Files of clips that were drawn: an .mp4, and a small animated .webp that a page shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.io.clip_files import write_clip
from difftrain.sampling.clips import DrawnClip
from difftrain.sampling.png import OURS

PREVIEW_SIDE = 256  # px, of the longer side of what pages show
PREVIEW_FRAMES = 48


def write_drawn(path: Path, clip: DrawnClip, facts: Mapping[str, Any]) -> Path:
    """Write a clip as its suffix says; an .mp4 says how it was drawn, as the PNG of a picture does. Raises: OSError."""
    comment = json.dumps({OURS: dict(facts)}, ensure_ascii=False)
    return write_clip(path, clip.frames, clip.fps, about={"comment": comment})


def write_preview(path: Path, clip: DrawnClip) -> Path:
    """Write a small animated .webp. Raises: OSError."""
    from PIL import Image as images_of

    step = -(-len(clip.frames) // PREVIEW_FRAMES)
    small = []
    for frame in clip.frames[::step]:
        image = images_of.fromarray(frame)
        image.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE), images_of.Resampling.BICUBIC)
        small.append(np.asarray(image))
    return write_clip(path, np.stack(small), clip.fps / step, quality=70)


def write_beside(picture: Path, clip: DrawnClip, facts: Mapping[str, Any]) -> None:
    """Write both beside the .png of a sample. Raises: OSError."""
    write_drawn(picture.with_suffix(".mp4"), clip, facts)
    write_preview(picture.with_suffix(".webp"), clip)
