"""The data sets of SD3-Light's demos: what is trained on, and beside it captions that are new as a whole."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from difftrain.train.demo import emoji, recipe, shapes, tars
from difftrain.train.demo.make import TRAIN, UNSEEN
from difftrain.train.demo.tars import Picture
from difftrain.train.demo.unseen import unseen

OF_EACH_UNSEEN, FEWEST = 24, 4  # pictures of every held-out caption of the shapes; of a shortened demo, as few as this
FEW = 48  # of the tiny set


def shapes_held_out() -> set[str]:
    """Return a caption for each colour, so that every word of it stands in many others."""
    sizes, forms = list(shapes.SIZES), shapes.SHAPES
    return {
        shapes.Scene(sizes[number % len(sizes)], colour, forms[(number // 2) % len(forms)]).caption
        for number, colour in enumerate(shapes.COLOURS)
    }


def write_shapes(folder: Path, count: int) -> dict[str, int]:
    """Draw shapes into tars: of all captions but the held-out ones, and of these."""
    out = shapes_held_out()
    every = (_picture(scene) for scene in shapes.scenes(_plenty(count, len(out)), recipe.SEED))
    kept = itertools.islice((picture for picture in every if picture.caption not in out), count)
    each = max(FEWEST, round(OF_EACH_UNSEEN * count / recipe.SIZES["shapes"].pictures))
    news = (_picture(scene) for scene in shapes.scenes(each * len(shapes.captions()), recipe.SEED + 1))
    return _write(folder, kept, (picture for picture in news if picture.caption in out))


def _plenty(count: int, out: int) -> int:
    """Return how many scenes hold `count` that are not held out."""
    every = len(shapes.captions())
    return -(-count * every // (every - out)) + every


def _picture(scene: shapes.Scene) -> Picture:
    content = io.BytesIO()
    shapes.draw(scene, recipe.SIDE).save(content, "PNG")
    return Picture(content.getvalue(), "png", scene.caption, recipe.SIDE, recipe.SIDE)


def write_emoji(folder: Path, count: int = 0) -> dict[str, int]:
    """Write every captioned emoji in all skin tones into tars, apart from those whose words never stand together.

    count: 0 is all; else so many of either set, evenly picked.
    """
    every = list(emoji.toned(recipe.cache_root() / "npm"))
    out = unseen([each.caption for each in every])
    kept = [each for number, each in enumerate(every) if number not in out]
    news = [every[number] for number in sorted(out)]
    return _write(folder, _some(kept, count), _some(news, count))


def _some(pictures: list[Picture], count: int) -> list[Picture]:
    return pictures if not count else pictures[:: max(1, len(pictures) // count)][:count]


def _write(folder: Path, kept: Iterable[Picture], news: Iterable[Picture]) -> dict[str, int]:
    return {TRAIN: tars.write(folder / TRAIN, kept), UNSEEN: tars.write(folder / UNSEEN, news)}


def write_few(folder: Path) -> dict[str, int]:
    """Write a few shapes as the plainest data set there is: pictures, each with a .txt of its name."""
    place = folder / TRAIN
    place.mkdir(parents=True)
    for number, each in enumerate(shapes.pictures(FEW, recipe.SIDE, recipe.SEED)):
        (place / f"{number:03d}.png").write_bytes(each.content)
        (place / f"{number:03d}.txt").write_text(each.caption + "\n", encoding="utf-8")
    return {TRAIN: FEW}


def captions_of(folder: Path) -> Iterator[str]:
    """Yield the captions of a folder of tars that we wrote."""
    import tarfile

    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".txt"):
                    stream = tar.extractfile(member)
                    assert stream is not None
                    yield stream.read().decode()


WRITERS: dict[str, Callable[[Path, int], dict[str, int]]] = {
    "shapes": write_shapes,
    "emoji": write_emoji,
    "tiny": lambda folder, count: write_few(folder),
}
