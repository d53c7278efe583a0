"""Clips: frames of video files, animated pictures and folders of pictures, at the frames a second that are asked for.

Frame i of a clip at `fps` is what is shown i / fps seconds after the file's first frame, in exact fractions of a second:
files with uneven frame times come out right, and a file at exactly that rate gives its frames one by one. A frame that is
late by less than a twentieth of 1 / fps (or by a tick of the file's clock) counts as shown: Matroska rounds times to
milliseconds, and 29.97 is not 30000/1001. Decoding begins at the key frame before and ends with the last frame wanted,
so that a window is, bit by bit, a slice of the whole file; one full frame and the cut clip are in memory. Frames that are
JPEG files are decoded at 1/2, 1/4 or 1/8 where that is enough, as other pictures are; what video is coded in now offers
no such thing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from difftrain.data.media.containers import container_of, is_animated, read_animation
from difftrain.data.media.media import (
    MAX_PIXELS,
    Decoded,
    Unusable,
    check_size,
    decode_animation,
    decode_for,
    full_size,
    probe,
)
from difftrain.data.media.video import Video, lateness, opened
from difftrain.io.files import open_regular

__all__ = [
    "CLIP_VERSION",
    "ClipHeader",
    "FramesFolder",
    "MediaFile",
    "decode_clip",
    "decode_first",
    "frames_in",
    "is_clip",
    "probe_clip",
]

CLIP_VERSION = 2  # part of what names cached features; raise it when any pixel or any time of any clip changes

Cut = Callable[[Decoded], np.ndarray]
_Shown = Iterator[tuple[int, Decoded]]
_PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif"}
_HEAD = 64
_TICK = Fraction(1, 1000)  # of animated pictures


class ClipHeader(NamedTuple):
    """What a clip is, without decoding it. size_wh is upright and with square pixels."""

    size_wh: tuple[int, int]
    format: str  # such as "mp4 h264"
    duration_ms: int  # from the first frame's time to the end of the last, rounded up
    frames: int  # of the file
    fps: float  # on average
    is_constant: bool  # frame times are even


def is_clip(head: bytes) -> bool:
    """Tell a video container, or an animated GIF or WebP, by its first bytes.

    64 bytes tell a video; of a GIF that ends behind them, a sign of timing is taken for more than one frame.
    """
    return container_of(head[:_HEAD]) is not None or is_animated(head)


def frames_in(duration_ms: int, fps: Fraction) -> int:
    """Return how many frames at `fps` are shown to their end within a duration."""
    return math.floor(duration_ms * fps / 1000)


def probe_clip(file: BinaryIO | bytes | Path | FramesFolder) -> ClipHeader:
    """Read size, times and number of frames. Of a video one frame is decoded, which alone tells how it is turned.

    Raises: Unusable; OSError where a file cannot be read.
    """
    if isinstance(file, FramesFolder):
        return file.probe()
    with opened(file) as stream:
        head = _head(stream)
        return _probe_animation(stream) if _is_animation(head) else _probe_video(stream)


def _head(stream: BinaryIO) -> bytes:
    head = stream.read(_HEAD)
    if not head:
        raise Unusable("empty", "0 bytes")
    return head


def _is_animation(head: bytes) -> bool:
    """Tell an animated picture from a video. Raises: Unusable where it is neither."""
    if container_of(head) is not None:
        return False
    if head[:4] == b"GIF8" or is_animated(head):
        return True
    raise Unusable("not a video", f"no known container (starts with {head[:8].hex(' ')})")


def _probe_animation(stream: BinaryIO) -> ClipHeader:
    form, durations = read_animation(stream)
    size_wh = probe(_rewound(stream)).size_wh
    total = sum(durations)
    return ClipHeader(size_wh, form, total, len(durations), 1000 * len(durations) / total, len(set(durations)) == 1)


def _rewound(stream: BinaryIO) -> BinaryIO:
    stream.seek(0)
    return stream


def _probe_video(stream: BinaryIO) -> ClipHeader:
    video = Video(stream, MAX_PIXELS)
    try:
        times = video.timeline()
        height, width, _ = video.first_picture().shape
        check_size(width, height)
        if times.end <= 0:
            raise Unusable("broken", "it is shown for no time")
        fps = float(times.frames / times.end)
        form = f"{video.container_name} {video.codec_name}"
        return ClipHeader((width, height), form, math.ceil(times.end * 1000), times.frames, fps, times.is_constant)
    finally:
        video.close()


def decode_clip(
    file: BinaryIO | bytes | Path | FramesFolder,
    *,
    first: int,
    frames: int,
    fps: Fraction,
    start_ms: int = 0,
    cut: Cut | None = None,
    resized_wh: tuple[int, int] | None = None,
    interpolation: str | None = None,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decode what is shown at start_ms / 1000 + (first + i) / fps seconds after the file's first frame.

    cut: resizes and crops a frame; its results must be of one shape. resized_wh, interpolation: what it resizes to and how;
    frames may come smaller than they are then, as decode_for says.
    Shape: (F, H, W, 3) uint8. Raises: Unusable, also where the clip ends early; OSError where a file cannot be read.
    """
    times = _times(first, frames, fps, start_ms)
    if isinstance(file, FramesFolder):
        return _stack(file.shown_at(times, fps, max_pixels, resized_wh, interpolation), times, cut)
    with opened(file) as stream:
        return _stack(_shown(stream, times, fps, max_pixels), times, cut)


def decode_first(
    file: BinaryIO | bytes | Path | FramesFolder,
    *,
    start_ms: int = 0,
    cut: Cut | None = None,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decode one frame, the first or the one at start_ms. Shape: (H, W, 3) uint8. Raises: as decode_clip."""
    return decode_clip(file, first=0, frames=1, fps=Fraction(24), start_ms=start_ms, cut=cut, max_pixels=max_pixels)[0]


def _times(first: int, frames: int, fps: Fraction, start_ms: int) -> list[Fraction]:
    if frames < 1 or first < 0 or start_ms < 0 or fps <= 0:
        raise ValueError(f"no window of a clip: first={first}, frames={frames}, fps={fps}, start_ms={start_ms}")
    start = Fraction(start_ms, 1000)
    return [start + Fraction(first + index) / Fraction(fps) for index in range(frames)]


def _stack(pictures: _Shown, times: Sequence[Fraction], cut: Cut | None) -> np.ndarray:
    clip: np.ndarray | None = None
    size, done = None, 0
    for count, frame in pictures:
        if size is not None and frame.size_wh != size:
            raise Unusable("changing size", "frames of {} x {} and {} x {} px".format(*size, *frame.size_wh))
        size = frame.size_wh
        picture = frame.pixels if cut is None else cut(frame)
        if clip is None:
            clip = np.empty((len(times), *picture.shape), np.uint8)
        clip[done : done + count] = picture
        done += count
    if clip is None or done < len(times):
        missing = f"frame {done + 1} of {len(times)} would be shown at {float(times[done]):.3f} s"
        raise Unusable("truncated", f"{done} of {len(times)} frames are in the file: it ends early, {missing}")
    return clip


def _shown(stream: BinaryIO, times: Sequence[Fraction], fps: Fraction, max_pixels: int) -> _Shown:
    """Iterate over (how many of the times in a row, the picture that is shown at them)."""
    if _is_animation(_head(stream)):
        durations = read_animation(stream).durations_ms
        late = lateness(fps, _TICK)
        yield from _pictures_at(times, durations, late, decode_animation(stream, max_pixels=max_pixels))
        return
    video = Video(stream, max_pixels)
    try:
        for count, frame in video.shown_at(times, video.lateness(fps)):
            yield count, full_size(video.to_rgb(frame))
    finally:
        video.close()


def _pictures_at(
    times: Sequence[Fraction], durations_ms: Sequence[int], late: Fraction, pictures: Iterator[np.ndarray]
) -> _Shown:
    at, last = 0, len(durations_ms) - 1
    ends = [Fraction(end, 1000) for end in accumulate(durations_ms)]
    for index, pixels in zip(range(last + 1), pictures):
        until = ends[index] - (late if index < last else 0)  # the next one may come too late for its time
        count = sum(1 for moment in times[at:] if moment < until)
        if count:
            yield count, full_size(pixels)
            at += count
        if at == len(times):
            return


@dataclass(frozen=True)
class FramesFolder:
    """A folder of pictures as a clip, in the natural order of their names, so many a second.

    Raises: Unusable, of everything; OSError where a file cannot be read.
    """

    folder: Path
    fps: Fraction

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The pictures in order: 2.png comes before 10.png."""
        names = [
            path.name
            for path in self.folder.iterdir()
            if path.suffix.lower() in _PICTURES and not path.name.startswith(".")
        ]
        if not names:
            raise Unusable("no frames", "no picture is in the folder")
        return tuple(self.folder / name for name in sorted(names, key=_natural))

    def probe(self) -> ClipHeader:
        """Read the first picture's size and count them."""
        with open_regular(self.paths[0]) as file:
            header = probe(file)  # type: ignore[arg-type]
        duration_ms = math.ceil(1000 * len(self.paths) / self.fps)
        form = f"frames {header.format.lower()}"
        return ClipHeader(header.size_wh, form, duration_ms, len(self.paths), float(self.fps), True)

    def shown_at(
        self,
        times: Sequence[Fraction],
        fps: Fraction,
        max_pixels: int,
        resized_wh: tuple[int, int] | None = None,
        interpolation: str | None = None,
    ) -> _Shown:
        """Iterate over (how many of the times in a row, the picture that is shown at them). fps: of the times."""
        late = lateness(fps, Fraction(0))
        indices = [int((moment + late) * self.fps) for moment in times]
        known = [index for index in indices if index < len(self.paths)]
        for index in dict.fromkeys(known):
            with open_regular(self.paths[index]) as file:
                data = file.read()
            yield known.count(index), decode_for(data, resized_wh, interpolation, max_pixels=max_pixels)


MediaFile = BinaryIO | Path | FramesFolder  # what is read in place


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    parts = re.findall(r"\d+|\D+", name.lower())
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], name
