"""Small video files made with PyAV, whose frames carry their number in black and white squares."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

BITS = 12
SIDE = 16  # of a square
SIZE_WH = (64, 48)


def numbered(number: int, size_wh: tuple[int, int] = SIZE_WH) -> np.ndarray:
    """Draw a picture that carries its number in squares, whatever a codec does to it."""
    width, height = size_wh
    picture = np.full((height, width, 3), 90, np.uint8)
    for bit in range(BITS):
        top, left = bit // 4 * SIDE, bit % 4 * SIDE
        picture[top : top + SIDE, left : left + SIDE] = 235 if number >> bit & 1 else 20
    return picture


def number_of(picture: np.ndarray) -> int:
    """Read the number of a picture made by `numbered`; squares of a doubtful grey are an error."""
    number = 0
    for bit in range(BITS):
        top, left = bit // 4 * SIDE + 4, bit % 4 * SIDE + 4
        grey = float(picture[top : top + SIDE - 8, left : left + SIDE - 8].mean())
        assert grey < 70 or grey > 180, f"square {bit} is {grey}"
        number |= (grey > 125) << bit
    return number


def numbers_of(clip: np.ndarray) -> list[int]:
    """Read the numbers of a clip's frames."""
    return [number_of(picture) for picture in clip]


def video_bytes(
    pictures: Iterable[np.ndarray],
    *,
    form: str = "mp4",
    codec: str = "libx264",
    fps: Fraction | int = 24,
    ticks: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    prepare: Callable[[Any], None] | None = None,
    to_frame: Callable[[np.ndarray], Any] | None = None,
) -> bytes:
    """Encode pictures. ticks: the presentation time of each, in time_base, where they are not even."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form, container_options=container or {}) as output:
        stream = output.add_stream(codec, rate=fps, options=options or {"g": "12"})
        for index, picture in enumerate(pictures):
            frame = to_frame(picture) if to_frame else av.VideoFrame.from_ndarray(picture, format="rgb24")
            if index == 0:
                stream.width, stream.height, stream.pix_fmt = frame.width, frame.height, pixels
                stream.codec_context.thread_count = 1
                if time_base is not None:
                    stream.codec_context.time_base = time_base
                if prepare is not None:
                    prepare(stream)
            if ticks is not None:
                frame.pts, frame.time_base = ticks[index], time_base
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def numbered_bytes(count: int, **options: Any) -> bytes:
    """Encode the pictures 0 to count - 1."""
    return video_bytes((numbered(number) for number in range(count)), **options)
