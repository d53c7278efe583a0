"""Pictures beside those that a model drew for their captions, with the captions, as one PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

COLUMNS, ZOOM, GAP = 8, 2, 4
LINES, LINE_HEIGHT, WRAP = 3, 11, 22  # of a caption
COLOURS = 128  # a palette keeps the file small


def write_pairs(
    path: Path, captions: Sequence[str], real: Sequence[NDArray[np.uint8]], drawn: Sequence[NDArray[np.uint8]]
) -> None:
    """Write rows of captions, real pictures above and drawn ones below. Shapes: each picture (H, W, 3), all equal."""
    height, width = (ZOOM * side for side in real[0].shape[:2])
    cell = width + GAP, 2 * height + LINES * LINE_HEIGHT + 2 * GAP
    rows = -(-len(captions) // COLUMNS)
    image = Image.new("RGB", (min(COLUMNS, len(captions)) * cell[0], rows * cell[1]), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=10)
    for number, (caption, above, below) in enumerate(zip(captions, real, drawn, strict=True)):
        x, y = (number % COLUMNS) * cell[0], (number // COLUMNS) * cell[1]
        for line, text in enumerate(textwrap.wrap(caption, WRAP)[:LINES]):
            pen.text((x + 2, y + line * LINE_HEIGHT), text, fill="black", font=font)
        for place, picture in enumerate((above, below)):
            zoomed = Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS)
            image.paste(zoomed, (x, y + LINES * LINE_HEIGHT + GAP + place * height))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
