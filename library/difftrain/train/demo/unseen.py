"""Which captions to hold out so that they are new as a whole and old in every word.

A model that has only learnt its captions by heart fails on these; one that has learnt what their words do need not.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from difftrain.train.demo.baselines import words

LEAST = 3  # captions of the training set in which every word of a held-out one stands
SEED = 1
FAMILIES, PEOPLE, THINGS = 20, 60, 60  # groups that are asked for, of each kind
_TONE = re.compile(r"[a-z-]+ skin tone")
_WHO = re.compile(r"(man|woman|men|women|person|people)\b")


class Split:
    """Take captions out of a set, one group after the other, as long as the words of all that are out stay in."""

    def __init__(self, captions: Sequence[str]) -> None:
        self._words = [words(caption) for caption in captions]
        self._left = Counter(word for each in self._words for word in each)
        self._holders: dict[str, set[int]] = {}
        for number, each in enumerate(self._words):
            for word in each:
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
    split, rng = Split(labels), random.Random(SEED)
    numbers = range(len(labels))
    toned = [bool(_TONE.search(label)) for label in labels]
    people = [bool(_WHO.match(label)) for label in labels]
    bases = [n for n in numbers if people[n] and not toned[n] and "," not in labels[n]]
    whole = [[n for n in numbers if labels[n].partition(":")[0] == labels[base]] for base in bases]
    kinds = (
        (FAMILIES, whole),
        (PEOPLE, [[n] for n in numbers if toned[n]]),
        (THINGS, [[n] for n in numbers if not toned[n] and not people[n]]),
    )
    for wanted, groups in kinds:
        rng.shuffle(groups)
        taken = 0
        for group in groups:
            taken += taken < wanted and split.take(group)
    return split.out
