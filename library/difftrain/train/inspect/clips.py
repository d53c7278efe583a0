"""Clips of a data set: how many frames they have, what of their videos they leave out, and sheets of their frames."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from difftrain.contracts import Record
from difftrain.data.media.clips import decode_clip, probe_clip

if TYPE_CHECKING:
    from difftrain.train.inspect.facts import Look

MOST = 20_000  # clips that are looked up one by one; of more, every so-manyth
SHEET_FRAMES, SHEET_COLUMNS = 8, 4
SHORT = 0.5  # of a video, that is used by fewer than so much of it
MOST_NAMED = 5


def clips(look: Look) -> dict[str, Any] | None:
    """Count clips by their frames, and compare them with what there is of their videos; None where there are none."""
    index = look.data.index
    frames = np.asarray(index.columns().frames)
    ids = np.flatnonzero(frames > 1)
    if not len(ids):
        return None
    every = -(-len(ids) // MOST)
    records = [index.record(int(i)) for i in ids[::every]]

    # several clips of one video share what is used of it
    used: dict[object, int] = {}
    lengths: dict[object, tuple[int, str]] = {}
    for record in records:
        assert record.clip is not None
        video = (record.media, record.clip.start_ms)
        used[video] = used.get(video, 0) + record.clip.frames
        lengths[video] = (record.clip.available, record.name)
    shares = {video: min(1.0, used[video] / max(1, lengths[video][0])) for video in used}
    short = sorted((share, *lengths[video]) for video, share in shares.items() if share < SHORT)
    counts = np.unique(frames, return_counts=True)
    return {
        "clips": len(ids),
        "looked_up": len(records),
        "videos": len(used),
        "frames": [{"frames": int(count), "samples": int(many)} for count, many in zip(*counts)],
        "seconds": sum(record.clip.frames / float(Fraction(record.clip.fps)) for record in records if record.clip)
        * every,
        "rates": sorted({record.clip.fps for record in records if record.clip}, key=Fraction),
        "used": sum(used.values()) / max(1, sum(available for available, _ in lengths.values())),
        "short": len(short),
        "shortest": [
            {"share": share, "available": available, "name": name} for share, available, name in short[:MOST_NAMED]
        ],
    }


def about(look: Look, record: Record) -> dict[str, Any] | None:
    """Say which part of its video a clip is, and how its rate differs from the file's. Raises: Unusable, OSError."""
    clip = record.clip
    if clip is None:
        return None
    header = probe_clip(look.data.index.open_media(record.media))
    rate = Fraction(clip.fps)
    return {
        "frames": clip.frames,
        "available": clip.available,
        "fps": float(rate),
        "from_s": clip.start_ms / 1000 + float(clip.first / rate),
        "file_fps": header.fps,
        "is_constant": header.is_constant,
        "format": header.format,
    }


def first_frame(look: Look, record: Record) -> np.ndarray:
    """Decode the first frame of a clip, uncut. Shape: (H, W, 3) uint8. Raises: Unusable, OSError."""
    clip = record.clip
    assert clip is not None
    file = look.data.index.open_media(record.media)
    return decode_clip(file, first=clip.first, frames=1, fps=Fraction(clip.fps), start_ms=clip.start_ms)[0]


def sheet(pixels: np.ndarray) -> Image.Image:
    """Lay some frames out in rows, evenly spaced, the first and the last among them. Shape: (3, F, H, W) uint8."""
    chosen = np.linspace(0, pixels.shape[1] - 1, min(SHEET_FRAMES, pixels.shape[1])).round().astype(int)
    frames = pixels[:, chosen].transpose(1, 2, 3, 0)
    columns = min(SHEET_COLUMNS, len(frames))
    rows = -(-len(frames) // columns)
    _, height, width, _ = frames.shape
    image = Image.new("RGB", (columns * (width + 2) - 2, rows * (height + 2) - 2), "white")
    for number, frame in enumerate(frames):
        image.paste(Image.fromarray(frame), (number % columns * (width + 2), number // columns * (height + 2)))
    return image
