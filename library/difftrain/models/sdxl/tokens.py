"""From captions to the two token sequences of SDXL, 77 long or in chunks of 75."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.models.parts.clip_vocabulary import LENGTH, NUM_FIXED, ClipVocabulary

if TYPE_CHECKING:
    from torch import Tensor

PAD_1, PAD_2 = "<|endoftext|>", "!"  # CLIP-L fills up with EOS, bigG with id 0
CHUNK = LENGTH - 2

# What the built-in vocabularies of the small sizes are learned from: words that captions of pictures use.
_TEXT = """
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


def built_in(vocab_sizes: tuple[int, int]) -> tuple[ClipVocabulary, ClipVocabulary]:
    """Build the two vocabularies of the small sizes from code; each has as many merges as its size asks for."""
    first, second = (size - NUM_FIXED for size in vocab_sizes)
    return ClipVocabulary.learn(_TEXT, first, PAD_1), ClipVocabulary.learn(_TEXT, second, PAD_2)


def read_pair(first: Path, second: Path) -> tuple[ClipVocabulary, ClipVocabulary]:
    """Read both vocabularies; the padding rule is the encoder's, whatever the files say."""
    return ClipVocabulary.read(first, PAD_1), ClipVocabulary.read(second, PAD_2)


class SDXLTokenize:
    """Turn captions into {"input_ids_1", "input_ids_2"}, each (B, N, 77) int64 with N chunks.

    max_token_length 75 and 77 both mean one sequence of 77; 150 and 225 mean two and three chunks, each with its own
    BOS and EOS. Longer captions are cut. Picklable: a worker builds its tokenizers on first use.
    """

    def __init__(self, pair: tuple[ClipVocabulary, ClipVocabulary], max_token_length: int = LENGTH) -> None:
        self.num_chunks = max(1, max_token_length // CHUNK)
        self._pair = pair
        self._backends: list[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_backends": None}

    def __call__(self, captions: list[str]) -> dict[str, Tensor]:
        import torch

        if self._backends is None:
            self._backends = [vocabulary.backend() for vocabulary in self._pair]
        ids: dict[str, Tensor] = {}
        for i, (vocabulary, backend) in enumerate(zip(self._pair, self._backends), start=1):
            rows = [self._chunks(vocabulary, backend.encode(text, add_special_tokens=False).ids) for text in captions]
            ids[f"input_ids_{i}"] = torch.tensor(rows, dtype=torch.int64).view(len(captions), self.num_chunks, LENGTH)
        return ids

    def _chunks(self, vocabulary: ClipVocabulary, ids: list[int]) -> list[list[int]]:
        """Cut one caption's ids into sequences of BOS, 75 ids, and an end.

        The caption's own EOS stands behind its last id. A chunk filled to the brim ends in EOS, one that starts after
        the caption's end is BOS, EOS, padding (kohya's meaning; by position, so that a "!" is never taken for padding).
        """
        bos, eos, pad = vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id
        ids = ids[: CHUNK * self.num_chunks]
        rows = []
        for start in range(0, CHUNK * self.num_chunks, CHUNK):
            body = ids[start : start + CHUNK]
            row = [bos, *body, eos]
            rows.append(row + [pad] * (LENGTH - len(row)))
        return rows
