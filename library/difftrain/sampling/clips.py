"""Clips that were drawn, and sheets of some of their frames, which stand for them in a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

SHEET_FRAMES = 5  # of a clip that stand side by side in a grid
_GAP = 2  # px between frames of a sheet


class DrawnClip(NamedTuple):
    """Frames, and how many of them are shown a second. frames: (F, H, W, 3) uint8."""

    frames: np.ndarray
    fps: float

    @classmethod
    def of(cls, pixels: Tensor, fps: float) -> DrawnClip:
        """Take what a VAE decodes. Shapes: (3, F, H, W) in 0..1."""
        return cls((pixels.movedim(0, -1) * 255).round().byte().cpu().numpy(), fps)

    @property
    def size(self) -> tuple[int, int]:
        """Return (width, height)."""
        return self.frames.shape[2], self.frames.shape[1]

    @property
    def facts(self) -> dict[str, Any]:
        """Return what files say of it beside what they say of a picture."""
        return {"frames": len(self.frames), "fps": self.fps}


def sheet_of(frames: np.ndarray, most: int = SHEET_FRAMES) -> Image:
    """Lay some frames side by side, evenly spaced, the first and the last among them."""
    from PIL import Image as images_of

    chosen = frames[np.linspace(0, len(frames) - 1, min(most, len(frames))).round().astype(int)]
    count, height, width, _ = chosen.shape
    sheet = images_of.new("RGB", (count * width + (count - 1) * _GAP, height), "white")
    for number, frame in enumerate(chosen):
        sheet.paste(images_of.fromarray(frame), (number * (width + _GAP), 0))
    return sheet
