"""Pairs for models that edit: the same emoji in two styles, each made from the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from difftrain.demo import datasets
from difftrain.demo.datasets import DemoPicture
from difftrain.demo.make import MISMATCHED, SHOWN, TRAIN, UNSEEN

FLAT = "emoji-datasource-google@16.0.0"  # MIT; its images are Noto Emoji, Apache-2.0
SOLID, DRAWN = "the same emoji as a solid thing", "the same emoji drawn flat"
HELD_OUT_EVERY = 16  # emoji: one in so many is not trained on
NUM_SHOWN = 3  # emoji that samples are drawn of, both ways
SIDE = 64  # of its smallest images
EmojiStyles = tuple[DemoPicture, DemoPicture]  # solid, flat


def write(folder: Path, npm: Path) -> dict[str, int]:
    """Write pairs into tars: to train on, of emoji that are held out, and of these with references of one another.

    Returns how many pairs each folder has.
    """
    emoji = both_styles(npm)
    unseen = emoji[::HELD_OUT_EVERY]
    kept = [one for number, one in enumerate(emoji) if number % HELD_OUT_EVERY]
    far = len(unseen) // 2  # neighbours in the order of codes are alike
    others = unseen[far:] + unseen[:far]
    _write_prompts(folder / SHOWN, _pairs(shown := unseen[:: max(1, len(unseen) // NUM_SHOWN)][:NUM_SHOWN], shown))
    return {
        TRAIN: datasets.write(folder / TRAIN, _pairs(kept, kept)),
        UNSEEN: datasets.write(folder / UNSEEN, _pairs(unseen, unseen)),
        MISMATCHED: datasets.write(folder / MISMATCHED, _pairs(unseen, others)),
    }


def both_styles(npm: Path) -> list[EmojiStyles]:
    """Return every emoji that both styles draw, without its skin tones, in the order of codes."""
    solid = datasets.emoji_by_code(npm)
    flat = datasets.contents_of(datasets.fetch(FLAT, npm), lambda path: path.match(f"img/google/{SIDE}/*.png"))
    return [
        (solid[code], DemoPicture(flat[code], "png", solid[code].caption, SIDE, SIDE)) for code in solid if code in flat
    ]


def _pairs(emoji: Iterable[EmojiStyles], others: Iterable[EmojiStyles]) -> Iterator[DemoPicture]:
    """Yield both edits of each emoji, whose references are its partner's."""
    for (solid, flat), (other_solid, other_flat) in zip(emoji, others, strict=True):
        yield solid._replace(caption=SOLID, reference=other_flat)
        yield flat._replace(caption=DRAWN, reference=other_solid)


def _write_prompts(folder: Path, pairs: Iterable[DemoPicture]) -> None:
    """Write references as files, and beside each its caption and the picture that is to be made of it."""
    folder.mkdir(parents=True)
    for number, picture in enumerate(pairs):
        assert picture.reference is not None
        (folder / f"{number}.{picture.reference.suffix}").write_bytes(picture.reference.content)
        (folder / f"{number}_target.{picture.suffix}").write_bytes(picture.content)
        (folder / f"{number}.txt").write_text(picture.caption + "\n", encoding="utf-8")


def prompts(folder: Path) -> list[str]:
    """Return the prompts of a folder of references: `caption --ci file`."""
    captions = sorted(folder.glob("*.txt"))
    images = [next(file for file in folder.glob(f"{text.stem}.*") if file != text) for text in captions]
    return [f"{text.read_text(encoding='utf-8').strip()} --ci {file}" for text, file in zip(captions, images)]
