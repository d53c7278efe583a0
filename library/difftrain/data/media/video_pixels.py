"""RGB from a decoded video frame, by the colours, the shape and the turn that its file names.

The matrix and the range are the file's; where it names none, BT.709 above 576 lines or 1279 columns and BT.601 below,
limited range, as players do. Transparency is composited over white. Pixels come out square: the shorter side is
enlarged, none is lost. High dynamic range is not tone mapped.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from difftrain.data.media.media import Unusable

if TYPE_CHECKING:
    from av import VideoFrame

__all__ = ["to_rgb"]

_BT601, _BT709 = 5, 1
_MATRICES = {1: 1, 4: 4, 5: 5, 6: 5, 7: 7, 9: 9, 10: 9}  # AVColorSpace -> swscale's number
_FULL, _LIMITED = 2, 1


def to_rgb(frame: VideoFrame, aspect: Fraction, max_pixels: int) -> np.ndarray:
    """Convert a frame. aspect: width over height of a pixel.

    Shape: (H, W, 3) uint8, upright. Raises: Unusable.
    """
    from av.video.reformatter import Interpolation

    width, height = frame.width, frame.height
    name = frame.format.name
    layered = any(part.is_alpha for part in frame.format.components) or name == "pal8"
    large = height > 576 or width >= 1280
    full = frame.color_range == _FULL or name.startswith("yuvj")
    wide = max(width, round(width * aspect)), max(height, round(height / aspect))
    if wide[0] * wide[1] > max_pixels:
        raise Unusable("too many pixels", f"{wide[0]} x {wide[1]} px in a frame")
    options: dict[str, Any] = {}
    if not frame.format.is_rgb and not name.startswith("gray"):
        options = {
            "src_colorspace": _MATRICES.get(frame.colorspace, _BT709 if large else _BT601),
            "src_color_range": _FULL if full else _LIMITED,
        }
    elif name.startswith("gray") and frame.color_range == _LIMITED:
        options = {"src_color_range": _LIMITED}
    scaled = wide != (width, height)
    method = Interpolation.BICUBIC if scaled else Interpolation.BILINEAR
    pixels = frame.reformat(
        width=wide[0],
        height=wide[1],
        format="rgba" if layered else "rgb24",
        interpolation=method | Interpolation.BITEXACT,
        dst_color_range=_FULL,
        threads=1,
        **options,
    ).to_ndarray()
    if layered:
        pixels = _over_white(pixels)
    return _upright(pixels, frame)


def _over_white(rgba: np.ndarray) -> np.ndarray:
    image = Image.fromarray(rgba)
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image)
    return np.asarray(white)


def _upright(pixels: np.ndarray, frame: VideoFrame) -> np.ndarray:
    """Turn and mirror as the display matrix says: (x, y) is shown at (a x + c y, b x + d y)."""
    from av.sidedata.sidedata import Type

    sides: Any = frame.side_data
    side = sides.get(Type.DISPLAYMATRIX)
    if side is None:
        return pixels
    matrix = np.frombuffer(bytes(side), np.int32)
    if matrix.size < 5:
        return pixels
    a, b, c, d = (int(matrix[k]) for k in (0, 1, 3, 4))
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, across, down = pixels.transpose(1, 0, 2), c, b
    else:
        across, down = a, d
    if across < 0:
        pixels = pixels[:, ::-1]
    if down < 0:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
