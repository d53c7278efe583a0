"""Clips as files: H.264 in .mp4, which every browser plays, and animated .webp. Whole or absent, as other files are."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.io.files import aside_of, fsync_file, fsync_folder, write_bytes

if TYPE_CHECKING:
    import numpy as np

CLIP_SUFFIXES = (".mp4", ".webp")
_CRF = "17"  # hardly told from what was encoded
_WEBP_QUALITY = 90
_BT709, _LIMITED = 1, 1


def write_clip(
    path: Path, frames: np.ndarray, fps: float | Fraction, *, about: Mapping[str, str] | None = None,
    quality: int = _WEBP_QUALITY,
) -> Path:  # fmt: skip
    """Write frames as the suffix says, .mp4 or .webp, in one step. about: texts for the file's header; .mp4 keeps
    "comment". quality: of a .webp.

    An .mp4 has even sides: an odd one gets its last row or column once more. The same frames give the same bytes.
    Shapes: frames (F, H, W, 3) uint8. Raises: OSError; ValueError for another suffix.
    """
    rate = Fraction(fps).limit_denominator(1001)
    suffix = path.suffix.lower()
    if suffix not in CLIP_SUFFIXES:
        raise ValueError(f"{path.name}: a clip is written as {' or '.join(CLIP_SUFFIXES)}")
    if suffix == ".webp":
        return write_bytes(path, _webp(frames, rate, quality))
    aside = aside_of(path)
    try:
        _encode_mp4(aside, frames, rate, dict(about or {}))
        fsync_file(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return path


def _encode_mp4(path: Path, frames: np.ndarray, rate: Fraction, about: dict[str, str]) -> None:
    import av
    import numpy as np

    _, height, width, _ = frames.shape
    padded = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    # the index in front, so that a browser plays while it loads; the muxer reads its own file again for that
    options = {"movflags": "+faststart", "fflags": "+bitexact"}
    with av.open(f"file:{os.fspath(path)}", "w", format="mp4", container_options=options) as output:
        output.metadata.update(about)
        stream: Any = output.add_stream("libx264", rate=rate, options={"crf": _CRF, "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = padded.shape[2], padded.shape[1], "yuv420p"
        context = stream.codec_context
        context.thread_count = 1
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _LIMITED
        for picture in padded:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            converted = frame.reformat(
                format="yuv420p", dst_colorspace=_BT709, dst_color_range=_LIMITED, interpolation="BICUBIC", threads=1
            )
            output.mux(stream.encode(converted))
        output.mux(stream.encode(None))


def _webp(frames: np.ndarray, rate: Fraction, quality: int) -> bytes:
    from PIL import Image

    times = [round(1000 * index / rate) for index in range(len(frames) + 1)]
    pictures = [Image.fromarray(picture) for picture in frames]
    file = io.BytesIO()
    pictures[0].save(
        file,
        "WEBP",
        save_all=True,
        append_images=pictures[1:],
        duration=[end - start for start, end in pairwise(times)],
        loop=0,
        quality=quality,
    )
    return file.getvalue()
