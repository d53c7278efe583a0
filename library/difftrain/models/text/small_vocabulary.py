"""Which CLIP vocabulary an encoder has: one of files, or a small one learned from words that captions use."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from difftrain.contracts import Fault
from difftrain.models.text.clip_vocabulary import NUM_FIXED, ClipVocabulary
from difftrain.models.text.t5_vocabulary import T5Vocabulary

MAX_BUILT_IN = 2048  # larger vocabularies are CLIP's own, which has to be given or fetched
WORDS = """
a a a a an the the of of and in on with at to by is for from photo photo picture image drawing painting sketch icon
small small large large big little tiny huge red red orange yellow green green blue blue purple violet pink brown black
white gray grey cyan magenta gold silver dark light bright colourful colorful striped dotted round flat tall short wide
circle square triangle star cross ring diamond heart arrow line dot shape shapes object background border frame pattern
face faces smiling smile eyes mouth nose ear hand hands finger thumb person people man woman boy girl child baby family
hair beard hat glasses shirt dress shoe shoes crown bag cat dog horse cow pig sheep goat rabbit mouse bear lion tiger
monkey bird chicken duck eagle owl fish whale shark turtle frog snake insect butterfly bee spider tree flower rose leaf
plant grass forest mountain river lake sea ocean beach island desert sky cloud rain snow sun moon stars night day water
fire wind ice stone sand house building castle tower bridge road street city village garden window door wall roof room
table chair bed lamp clock book paper pen pencil phone computer screen camera key lock tool hammer knife fork spoon cup
bottle glass plate food bread cheese egg rice meat apple banana orange lemon cherry grape strawberry tomato potato cake
ice cream chocolate coffee tea milk wine beer car bus train truck bicycle boat ship plane rocket wheel flag medal ball
game music guitar piano drum bell gift candle balloon letter number sign symbol mark button music sport football tennis
sitting standing running walking holding wearing looking playing happy sad angry sleeping open closed left right up down
"""


@functools.cache
def small_clip(size: int, pad: str) -> ClipVocabulary:
    """Learn a CLIP vocabulary of so many tokens."""
    return ClipVocabulary.learn(WORDS, size - NUM_FIXED, pad)


def clip_vocabulary(path: Path | None, size: int, pad: str) -> ClipVocabulary:
    """Read a vocabulary, or take the built-in one of a small size. Raises ValueError that says what is missing."""
    if path is not None:
        if not path.exists():
            raise ValueError(f"there is no file or folder '{path}'")
        return ClipVocabulary.read(path, pad)
    if size > MAX_BUILT_IN:
        raise ValueError("is needed: the weights come without a tokenizer")
    return small_clip(size, pad)


def clip_misfits(flag: str, vocabulary: ClipVocabulary, size: dict[str, Any]) -> list[Fault]:
    """Say where a vocabulary does not belong to its encoder. eos_token_id 2 is CLIP's old mark for "the largest id"."""
    faults = []
    if len(vocabulary) > size["vocab_size"]:
        faults.append(Fault(flag, f"has {len(vocabulary)} tokens, the text encoder knows {size['vocab_size']}"))
    marked = size.get("eos_token_id", 2)
    if marked not in (2, vocabulary.eos_id) or vocabulary.eos_id != len(vocabulary) - 1:
        faults.append(Fault(flag, f"ends texts with id {vocabulary.eos_id}, the text encoder expects {marked}"))
    return faults


@functools.cache
def small_t5(size: int) -> T5Vocabulary:
    """Make a T5 vocabulary of so many tokens."""
    return T5Vocabulary.learn(WORDS, size)
