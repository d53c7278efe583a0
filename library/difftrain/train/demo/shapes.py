"""Procedural pictures with exact captions: coloured shapes on white.

Obedience to such a caption can be scored, which real pictures do not allow. The position is random and is not
in the caption: at this size no model learns it.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from PIL import Image, ImageDraw

from difftrain.train.demo.tars import Picture

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 40),
    "orange": (255, 140, 0),
    "yellow": (245, 220, 30),
    "green": (30, 160, 60),
    "cyan": (0, 190, 210),
    "blue": (40, 70, 220),
    "purple": (145, 40, 180),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "star")
SIZES: dict[str, float] = {"small": 0.17, "large": 0.34}  # radius of the enclosing circle, as a share of the side
_OVERSAMPLING = 4


class Scene(NamedTuple):
    """One picture: what its caption says, and where the shape stands (centre as shares of the side)."""

    size: str
    colour: str
    shape: str
    x: float = 0.5
    y: float = 0.5

    @property
    def caption(self) -> str:
        """Return the exact caption, e.g. "a large red star"."""
        return f"a {self.size} {self.colour} {self.shape}"


def captions() -> list[str]:
    """Return every caption once, in a fixed order."""
    return [Scene(size, colour, shape).caption for size in SIZES for colour in COLOURS for shape in SHAPES]


def parse(caption: str) -> Scene:
    """Return the scene of a caption. Raises ValueError for a caption that none of ours is."""
    words = caption.split()
    if len(words) != 4 or words[0] != "a" or words[1] not in SIZES or words[2] not in COLOURS or words[3] not in SHAPES:
        raise ValueError(f"not a caption of the shapes demo: {caption!r}")
    return Scene(words[1], words[2], words[3])


def _outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    if shape == "star":
        points = [(radius if i % 2 == 0 else 0.45 * radius, math.pi * i / 5) for i in range(10)]
    elif shape == "triangle":
        points = [(radius, 2 * math.pi * i / 3) for i in range(3)]
    else:
        points = [(radius, math.pi / 4 + math.pi * i / 2) for i in range(4)]
    return [(x + r * math.sin(a), y - r * math.cos(a)) for r, a in points]


def draw(scene: Scene, side: int) -> Image.Image:
    """Draw a scene, smoothed at its edges.

    Shapes: a square RGB picture of `side` pixels.
    """
    big = side * _OVERSAMPLING
    image = Image.new("RGB", (big, big), "white")
    pen = ImageDraw.Draw(image)
    x, y, radius = scene.x * big, scene.y * big, SIZES[scene.size] * big
    colour = COLOURS[scene.colour]
    if scene.shape == "circle":
        pen.ellipse((x - 0.85 * radius, y - 0.85 * radius, x + 0.85 * radius, y + 0.85 * radius), fill=colour)
    else:
        pen.polygon(_outline(scene.shape, x, y, radius), fill=colour)
    return image.resize((side, side), Image.Resampling.BOX)


def scenes(count: int, seed: int) -> Iterator[Scene]:
    """Yield scenes, every caption equally often, at random places that keep the shape inside the picture."""
    generator = random.Random(seed)
    every = [parse(text) for text in captions()]
    for number in range(count):
        if number % len(every) == 0:
            generator.shuffle(every)
        scene = every[number % len(every)]
        margin = SIZES[scene.size] + 0.02
        x, y = (margin + (1 - 2 * margin) * generator.random() for _ in range(2))
        yield scene._replace(x=x, y=y)


def pictures(count: int, side: int, seed: int) -> Iterator[Picture]:
    """Yield drawn scenes as PNG files with their captions."""
    for scene in scenes(count, seed):
        content = io.BytesIO()
        draw(scene, side).save(content, "PNG")
        yield Picture(content.getvalue(), "png", scene.caption, side, side)
