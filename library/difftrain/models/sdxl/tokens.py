"""From captions to the two token sequences of SDXL, 77 long or in chunks of 75."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.parts.clip_vocabulary import LENGTH, NUM_FIXED, ClipVocabulary
from difftrain.models.parts.prompt_weights import weighted_pieces

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.models.sdxl.sources import Source

PAD_1, PAD_2 = "<|endoftext|>", "!"  # CLIP-L fills up with EOS, bigG with id 0
CHUNK = LENGTH - 2
_BLANK = re.compile(r"[ \t\r\n]+")
_WORDS, _LONG = 1 << 16, 64  # words that are kept with their ids, and characters of one that is
MAX_BUILT_IN = 2048  # larger vocabularies are CLIP's own, which has to be given or fetched
HUB_IDS = ("openai/clip-vit-large-patch14", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k")  # kohya's

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


def vocabularies(cfg: TrainConfig, source: Source) -> tuple[ClipVocabulary, ClipVocabulary]:
    """Read both vocabularies: --tokenizer1_path and 2, else the folder's own, else the built-in of the small sizes.

    Raises ConfigFault that says what to place where; the padding rule is the encoder's, whatever files say.
    """
    sizes = (source.architecture.text_encoder_1, source.architecture.text_encoder_2)
    given = (cfg.model.tokenizer1, cfg.model.tokenizer2)
    beside = source.tokenizer_dirs or (None, None)
    faults: list[Fault] = []
    pair = []
    for i, (size, path, pad) in enumerate(zip(sizes, given, (PAD_1, PAD_2))):
        flag = f"--tokenizer{i + 1}_path"
        try:
            vocabulary = _vocabulary(Path(path).expanduser() if path else beside[i], size["vocab_size"], pad)
            faults += _misfits(flag, vocabulary, size)
            pair.append(vocabulary)
        except (OSError, ValueError, KeyError) as error:
            faults.append(Fault(flag, str(error), _REMEDY))
    if faults:
        raise ConfigFault(faults)
    return pair[0], pair[1]


_REMEDY = (
    "give a folder with CLIP's vocab.json and merges.txt (tokenizer and tokenizer_2 of any SDXL folder of diffusers), "
    "one with tokenizer.json, or OpenAI's file bpe_simple_vocab_16e6.txt.gz"
)


def comes_without(cfg: TrainConfig, source: Source) -> dict[str, str]:
    """Name the vocabularies that are neither given nor beside the weights nor built in, and the hub ids that have them."""
    sizes = (source.architecture.text_encoder_1, source.architecture.text_encoder_2)
    given = (cfg.model.tokenizer1, cfg.model.tokenizer2)
    if source.tokenizer_dirs:
        return {}
    return {
        f"model.tokenizer{i}": HUB_IDS[i - 1]
        for i, (size, path) in enumerate(zip(sizes, given), start=1)
        if not path and size["vocab_size"] > MAX_BUILT_IN
    }


def _vocabulary(path: Path | None, size: int, pad: str) -> ClipVocabulary:
    if path is not None:
        if not path.exists():
            raise ValueError(f"there is no file or folder '{path}'")
        return ClipVocabulary.read(path, pad)
    if size > MAX_BUILT_IN:
        raise ValueError("is needed: the weights come without a tokenizer")
    return _built_in(size, pad)


@functools.cache
def _built_in(size: int, pad: str) -> ClipVocabulary:
    return ClipVocabulary.learn(_TEXT, size - NUM_FIXED, pad)


def _misfits(flag: str, vocabulary: ClipVocabulary, size: dict[str, Any]) -> list[Fault]:
    """Say where a vocabulary does not belong to its encoder. eos_token_id 2 is CLIP's old mark for "the largest id"."""
    faults = []
    if len(vocabulary) > size["vocab_size"]:
        faults.append(Fault(flag, f"has {len(vocabulary)} tokens, the text encoder knows {size['vocab_size']}"))
    marked = size.get("eos_token_id", 2)
    if marked not in (2, vocabulary.eos_id) or vocabulary.eos_id != len(vocabulary) - 1:
        faults.append(Fault(flag, f"ends texts with id {vocabulary.eos_id}, the text encoder expects {marked}"))
    return faults


def chunks_of(max_token_length: int) -> int:
    """Return how many sequences of 77 a caption becomes."""
    return max(1, max_token_length // CHUNK)


class SDXLTokenize:
    """Turn captions into {"input_ids_1", "input_ids_2"}, each (B, N, 77) int64 with N chunks.

    max_token_length 75 and 77 both mean one sequence of 77; 150 and 225 mean two and three chunks, each with its own
    BOS and EOS. Longer captions are cut. Picklable: a worker builds its tokenizers on first use.
    weighted: read `(a:1.2)` and its like, and add {"token_weights_1", "token_weights_2"}, of the same shapes in fp32.
    """

    def __init__(
        self, pair: tuple[ClipVocabulary, ClipVocabulary], max_token_length: int = LENGTH, *, weighted: bool = False
    ) -> None:
        self.num_chunks = chunks_of(max_token_length)
        self.weighted = weighted
        self._pair = pair
        self._backends: list[Any] | None = None
        self._known: list[dict[str, list[int]]] = [{}, {}]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_backends": None, "_known": [{}, {}]}

    def __call__(self, captions: list[str]) -> dict[str, Tensor]:
        import torch

        found: dict[str, Tensor] = {}
        shape = (len(captions), self.num_chunks, LENGTH)
        read: list[tuple[list[int], list[float]]] = []
        for i, vocabulary in enumerate(self._pair):
            if not i or not self._alike:
                read = [self._encode(i, text) for text in captions]
            ids = np.array([self._chunks(vocabulary, numbers) for numbers, _ in read], dtype=np.int64)
            found[f"input_ids_{i + 1}"] = torch.from_numpy(ids).view(shape)
            if self.weighted:
                weights = np.array([self._weight_chunks(weights) for _, weights in read], dtype=np.float32)
                found[f"token_weights_{i + 1}"] = torch.from_numpy(weights).view(shape)
        return found

    @functools.cached_property
    def identity(self) -> str:
        """Return what tells it from others: all that decides the ids of a caption."""
        tables = [[vocabulary.ids, vocabulary.merges, vocabulary.pad] for vocabulary in self._pair]
        words = json.dumps([tables, self.num_chunks, self.weighted], sort_keys=True)
        return hashlib.blake2b(words.encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def _alike(self) -> bool:
        """Tell whether both vocabularies cut a text into the same ids, as those of SDXL do: they differ in padding."""
        first, second = self._pair
        return first.ids == second.ids and first.merges == second.merges

    @property
    def limit(self) -> int:
        """Return how many tokens of a caption are kept."""
        return CHUNK * self.num_chunks

    def lengths(self, captions: list[str]) -> list[int]:
        """Count the tokens of captions before they are cut, by the first vocabulary, without BOS and EOS.

        No token of CLIP spans a blank, so each distinct word is looked at once: ten times as fast for many captions.
        """
        words = [_BLANK.split(_plain(" ".join(piece for piece, _ in self._pieces(text)))) for text in captions]
        distinct = list({word for found in words for word in found})
        encoded = self._tokenizers()[0].encode_batch_fast(distinct, add_special_tokens=False)
        counts = {word: len(found.ids) for word, found in zip(distinct, encoded, strict=True)}
        return [sum(counts[word] for word in found) for found in words]

    def _tokenizers(self) -> list[Any]:
        if self._backends is None:
            self._backends = [vocabulary.backend() for vocabulary in self._pair]
        return self._backends

    def _pieces(self, text: str) -> list[tuple[str, float]]:
        return weighted_pieces(text) if self.weighted else [(text, 1.0)]

    def _encode(self, which: int, text: str) -> tuple[list[int], list[float]]:
        """Return ids and weights of a caption's tokens, without BOS and EOS; pieces are encoded one by one."""
        ids: list[int] = []
        weights: list[float] = []
        for piece, weight in self._pieces(text):
            encoded = self._ids(which, piece)
            ids += encoded
            weights += [weight] * len(encoded)
        return ids, weights

    def _ids(self, which: int, text: str) -> list[int]:
        """Return the ids of a text. No token of CLIP spans a blank, so each word is encoded when it first comes."""
        known, ids = self._known[which], list[int]()
        for word in _BLANK.split(_plain(text)):
            found = known.get(word)
            if found is None:
                found = self._tokenizers()[which].encode(word, add_special_tokens=False).ids
                if len(known) >= _WORDS:
                    known.clear()
                if len(word) <= _LONG:
                    known[word] = found
            ids += found
        return ids

    def _weight_chunks(self, weights: list[float]) -> list[list[float]]:
        """Lay weights out as _chunks does ids; what is no token of the caption weighs 1."""
        total = CHUNK * self.num_chunks
        filled = weights[:total] + [1.0] * (total - len(weights))
        return [[1.0, *filled[start : start + CHUNK], 1.0] for start in range(0, total, CHUNK)]

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


def _plain(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON lets through and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
