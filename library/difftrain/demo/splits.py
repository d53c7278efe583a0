"""The data sets of SD3-Light's demos: what is trained on, and captions that are new as a whole and old in every word."""

from __future__ import annotations

import io
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from difftrain.demo import clips, datasets, pairs, recipe
from difftrain.demo.datasets import DemoPicture
from difftrain.demo.judge import words
from difftrain.demo.make import REFERENCE, TRAIN, UNSEEN

LEAST = 3  # captions of the training set in which every word of a held-out one stands
SEED = 1
FAMILIES, PEOPLE, THINGS = 20, 60, 60  # groups that are asked for, of each kind
_TONE = re.compile(r"[a-z-]+ skin tone")
_WHO = re.compile(r"(man|woman|men|women|person|people)\b")


class DemoSplit:
    """Take captions out of a set, one group after the other, as long as the words of all that are out stay in."""

    def __init__(self, captions: Sequence[str]) -> None:
        self._words = [words(caption) for caption in captions]
        self._left = Counter(word for caption_words in self._words for word in caption_words)
        self._holders: dict[str, set[int]] = {}
        for number, caption_words in enumerate(self._words):
            for word in caption_words:
                self._holders.setdefault(word, set()).add(number)
        self.out: set[int] = set()

    def take(self, group: Iterable[int]) -> bool:
        """Take a group out where it may go; say whether it went."""
        group = {number for number in group if number not in self.out}
        lost = Counter(word for number in group for word in self._words[number])
        if not group or any(self._left[word] - count < LEAST for word, count in lost.items()):
            return False
        out = self.out | group
        if any(self._seen_together(number, out) for number in group):
            return False
        self.out = out
        self._left.subtract(lost)
        return True

    def _seen_together(self, number: int, out: set[int]) -> bool:
        """Say whether some caption of the training set has all words of this one."""
        return len(self._words[number]) < 2 or bool(
            set.intersection(*(self._holders[word] for word in self._words[number])) - out
        )


def unseen(labels: Sequence[str]) -> set[int]:
    """Return the places of the labels that are held out, the same for the same labels.

    Three kinds: all tones of what a man or a woman does ("woman detective", where men and others are detectives), one
    tone of a person or a hand, and things ("green heart").
    """
    split, rng = DemoSplit(labels), random.Random(SEED)
    numbers = range(len(labels))
    toned = [bool(_TONE.search(label)) for label in labels]
    people = [bool(_WHO.match(label)) for label in labels]
    bases = [n for n in numbers if people[n] and not toned[n] and "," not in labels[n]]
    siblings = [[n for n in numbers if labels[n].partition(":")[0] == labels[base]] for base in bases]
    kinds = (
        (FAMILIES, siblings),
        (PEOPLE, [[n] for n in numbers if toned[n]]),
        (THINGS, [[n] for n in numbers if not toned[n] and not people[n]]),
    )
    for count, groups in kinds:
        rng.shuffle(groups)
        taken = 0
        for group in groups:
            taken += taken < count and split.take(group)
    return split.out


OF_EACH_UNSEEN, FEWEST = 24, 4  # pictures of every held-out caption of the shapes; of a shortened demo, as few as this
FEW = 48  # of the tiny set


def shapes_held_out() -> set[str]:
    """Return a caption for each colour, so that every word of it stands in many others."""
    sizes, forms = list(datasets.SIZES), datasets.SHAPES
    return {
        datasets.Scene(sizes[number % len(sizes)], colour, forms[(number // 2) % len(forms)]).caption
        for number, colour in enumerate(datasets.COLOURS)
    }


def write_shapes(folder: Path, count: int) -> dict[str, int]:
    """Draw shapes into tars: of all captions but the held-out ones, and of these."""
    out = shapes_held_out()
    every = (_picture(scene) for scene in datasets.scenes(_plenty(count, len(out)), recipe.SEED))
    kept = itertools.islice((picture for picture in every if picture.caption not in out), count)
    count_each = max(FEWEST, round(OF_EACH_UNSEEN * count / recipe.SIZES["shapes"].pictures))
    news = (_picture(scene) for scene in datasets.scenes(count_each * len(datasets.captions()), recipe.SEED + 1))
    return _write(folder, kept, (picture for picture in news if picture.caption in out))


def _plenty(count: int, out: int) -> int:
    """Return how many scenes hold `count` that are not held out."""
    every = len(datasets.captions())
    return -(-count * every // (every - out)) + every


def _picture(scene: datasets.Scene) -> DemoPicture:
    content = io.BytesIO()
    datasets.draw(scene, recipe.SIDE).save(content, "PNG")
    return DemoPicture(content.getvalue(), "png", scene.caption, recipe.SIDE, recipe.SIDE)


def write_emoji(folder: Path, count: int = 0) -> dict[str, int]:
    """Write every captioned emoji in all skin tones into tars, apart from those whose words never stand together.

    count: 0 is all; else so many of either set, evenly picked.
    """
    every = list(datasets.toned(recipe.cache_root() / "npm"))
    out = unseen([picture.caption for picture in every])
    kept = [picture for number, picture in enumerate(every) if number not in out]
    news = [every[number] for number in sorted(out)]
    return _write(folder, _some(kept, count), _some(news, count))


def _some(pictures: list[DemoPicture], count: int) -> list[DemoPicture]:
    return pictures if not count else pictures[:: max(1, len(pictures) // count)][:count]


def _write(folder: Path, kept: Iterable[DemoPicture], news: Iterable[DemoPicture]) -> dict[str, int]:
    return {TRAIN: datasets.write(folder / TRAIN, kept), UNSEEN: datasets.write(folder / UNSEEN, news)}


def write_few(folder: Path) -> dict[str, int]:
    """Write a few shapes as the plainest data set there is: pictures, each with a .txt of its name."""
    folder_path = folder / TRAIN
    folder_path.mkdir(parents=True)
    for number, picture in enumerate(datasets.shape_pictures(FEW, recipe.SIDE, recipe.SEED)):
        (folder_path / f"{number:03d}.png").write_bytes(picture.content)
        (folder_path / f"{number:03d}.txt").write_text(picture.caption + "\n", encoding="utf-8")
    return {TRAIN: FEW}


def write_references(folder: Path) -> dict[str, int]:
    """Write what the few shapes are edited from: the same shapes in black, which the captions colour."""
    (folder / REFERENCE).mkdir(parents=True)
    for number, scene in enumerate(datasets.scenes(FEW, recipe.SEED)):
        datasets.draw(scene._replace(colour="black"), recipe.SIDE).save(folder / REFERENCE / f"{number:03d}.png")
    return {REFERENCE: FEW}


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
    "pairs": lambda folder, count: pairs.write(folder, recipe.cache_root() / "npm"),
    "clips": lambda folder, count: clips.write(folder, recipe.cache_root() / "npm"),
    "tiny": lambda folder, count: write_few(folder),
}
