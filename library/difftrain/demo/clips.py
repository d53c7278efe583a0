"""Clips for models that make them: emoji under a camera that pans or zooms, with captions that name the motion."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from difftrain.data.media.clips import decode_clip
from difftrain.demo import datasets
from difftrain.demo.datasets import DemoPicture
from difftrain.demo.make import TRAIN, UNSEEN
from difftrain.io.clip_files import write_clip

SIDE, FRAMES, RATE = 64, 17, 16  # pixels; frames, and how many of them a second
HELD_OUT_EVERY = 4  # emoji: one in so many is not trained on with one of the motions
COUNT = 512  # clips to train on, about: a minute of a VAE on a CPU
NUM_SHOWN = 4  # clips that samples are drawn of
_SCENE = 512  # px of the ground that the camera looks at
_GROUNDS = ("#f4d9c6", "#cfe3f5", "#d8ecd0", "#ece3f4", "#f7efc3")


class Motion(NamedTuple):
    """A caption's end, and what the camera sees at the start and at the end: its middle and side, as shares of the scene."""

    caption: str
    start: tuple[float, float, float]
    end: tuple[float, float, float]


MOTIONS = (
    Motion("the camera pans left", (0.66, 0.5, 0.62), (0.34, 0.5, 0.62)),
    Motion("the camera zooms in", (0.5, 0.5, 0.95), (0.5, 0.5, 0.45)),
    Motion("the camera pans up", (0.5, 0.66, 0.62), (0.5, 0.34, 0.62)),
    Motion("the camera pans right", (0.34, 0.5, 0.62), (0.66, 0.5, 0.62)),
    Motion("the camera zooms out", (0.5, 0.5, 0.45), (0.5, 0.5, 0.95)),
    Motion("the camera pans down", (0.5, 0.34, 0.62), (0.5, 0.66, 0.62)),
)


class EmojiClip(NamedTuple):
    """One clip to be made."""

    picture: DemoPicture
    ground: str
    motion: Motion

    @property
    def caption(self) -> str:
        """Return what is to be seen, and how the camera moves."""
        return f"{self.picture.caption.partition(', ')[0]}, {self.motion.caption}"


def write(folder: Path, npm: Path, count: int = COUNT) -> dict[str, int]:
    """Write clips as .mp4 files with a .txt each: to train on, and of emoji with a motion that they do not have there.

    count: of those to train on, about. Returns how many clips each folder has.
    """
    emoji = list(datasets.emoji_pictures(npm))
    emoji = emoji[:: max(1, len(MOTIONS) * len(emoji) // count)]
    return {
        TRAIN: _write(folder / TRAIN, _seen(emoji)),
        UNSEEN: _write(folder / UNSEEN, _unseen(emoji)),
    }


def _seen(emoji: Iterable[DemoPicture]) -> Iterator[EmojiClip]:
    """Yield a clip of each with every motion, but for what is held out: the words alone tell which it is."""
    for number, picture in enumerate(emoji):
        for motion in MOTIONS:
            if motion is not _unseen_motion(number):
                yield EmojiClip(picture, _GROUNDS[number % len(_GROUNDS)], motion)


def _unseen(emoji: Iterable[DemoPicture]) -> Iterator[EmojiClip]:
    for number, picture in enumerate(emoji):
        if (motion := _unseen_motion(number)) is not None:
            yield EmojiClip(picture, _GROUNDS[number % len(_GROUNDS)], motion)


def _unseen_motion(number: int) -> Motion | None:
    """Return the motion of an emoji that is not trained on: all motions in turn."""
    return MOTIONS[number // HELD_OUT_EVERY % len(MOTIONS)] if number % HELD_OUT_EVERY == 0 else None


def _write(folder: Path, clips: Iterable[EmojiClip]) -> int:
    folder.mkdir(parents=True)
    number = -1
    for number, clip in enumerate(clips):
        write_clip(folder / f"{number:05d}.mp4", frames_of(clip), RATE)
        (folder / f"{number:05d}.txt").write_text(clip.caption + "\n", encoding="utf-8")
    return number + 1


def frames_of(clip: EmojiClip) -> np.ndarray:
    """Draw a clip. Shape: (F, H, W, 3) uint8."""
    scene = Image.new("RGB", (_SCENE, _SCENE), clip.ground)
    with Image.open(io.BytesIO(clip.picture.content), formats=("WEBP",)) as image:
        emoji = image.convert("RGBA").resize((_SCENE // 2, _SCENE // 2), Image.Resampling.LANCZOS)
    scene.paste(emoji, (_SCENE // 4, _SCENE // 4), emoji)
    frames = []
    for share in np.linspace(0, 1, FRAMES):
        x, y, side = (_SCENE * (1 - share) * a + _SCENE * share * b for a, b in zip(clip.motion.start, clip.motion.end))
        box = tuple(
            min(max(0.0, edge), float(_SCENE)) for edge in (x - side / 2, y - side / 2, x + side / 2, y + side / 2)
        )
        frames.append(np.asarray(scene.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)))  # type: ignore[arg-type]
    return np.stack(frames)


def captions_of(folder: Path) -> list[str]:
    """Return the captions of a folder of clips, by name."""
    return [file.read_text(encoding="utf-8").strip() for file in sorted(folder.glob("*.txt"))]


def some_frames(folder: Path) -> np.ndarray:
    """Return every fourth frame of the clips of a folder. Shape: (N, 3, H, W) uint8."""
    frames = []
    for file in sorted(folder.glob("*.mp4")):
        frames.append(decode_clip(file, first=0, frames=FRAMES, fps=Fraction(RATE))[::4])
    return np.ascontiguousarray(np.concatenate(frames).transpose(0, 3, 1, 2))


def prompts(folder: Path) -> list[str]:
    """Return some captions of a folder of clips, evenly spaced."""
    captions = captions_of(folder)
    return captions[:: max(1, len(captions) // NUM_SHOWN)][:NUM_SHOWN]
