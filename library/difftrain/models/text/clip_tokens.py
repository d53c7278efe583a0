"""From captions to the token sequences of one CLIP encoder or two, 77 long or in chunks of 75."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from difftrain.models.text.clip_vocabulary import LENGTH, ClipVocabulary

if TYPE_CHECKING:
    from torch import Tensor


PAD_1, PAD_2 = "<|endoftext|>", "!"  # CLIP-L fills up with EOS, bigG with id 0
CHUNK = LENGTH - 2  # of a caption's tokens in a sequence of CLIP's
CLEANING = "ftfy"  # raise it when mended() makes another text of the same one
_BLANK = re.compile(r"[ \t\r\n]+")
_WORDS, _LONG = 1 << 16, 64  # words that are kept with their ids, and characters of one that is


def mended(text: str) -> str:
    """Return a text as OpenAI's tokenizer of CLIP reads it, which kohya's scripts and diffusers' examples use.

    ftfy makes typographic quotes, ligatures, full-width letters, entities and mojibake what they stand for. Printable ASCII
    without an ampersand is as it is.
    """
    if text.isascii() and text.isprintable() and "&" not in text:
        return text
    from ftfy import fix_text

    return fix_text(text)


def chunks_of(max_token_length: int) -> int:
    """Return how many sequences of 77 a caption becomes."""
    return max(1, max_token_length // CHUNK)


class ClipTokenize:
    """Turn captions into {"input_ids_1"[, "input_ids_2"]}, each (B, N, 77) int64 with N chunks, 77 being the vocabularies' length.

    max_token_length 75 and 77 both mean one sequence of 77; 150 and 225 mean two and three chunks, each with its own
    BOS and EOS. Longer captions are cut. Picklable: a worker builds its tokenizers on first use.
    weighted: read `(a:1.2)` and its like, and add {"token_weights_1"[, "token_weights_2"]}, of the same shapes in fp32.
    """

    def __init__(
        self, vocabularies: tuple[ClipVocabulary, ...], max_token_length: int = LENGTH, *, weighted: bool = False
    ) -> None:
        self.num_chunks = chunks_of(max_token_length)
        self.weighted = weighted
        self._vocabularies = vocabularies
        self._length = vocabularies[0].length
        self._chunk = self._length - 2
        self._backends: list[Any] | None = None
        self._known: list[dict[str, list[int]]] = [{} for _ in vocabularies]

    cleaning = CLEANING  # beside `identity`, by which cached entries are named since before captions were mended

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_backends": None, "_known": [{} for _ in self._vocabularies]}

    def __call__(self, captions: list[str]) -> dict[str, Tensor]:
        import torch

        tokens: dict[str, Tensor] = {}
        shape = (len(captions), self.num_chunks, self._length)
        read: list[tuple[list[int], list[float]]] = []
        for i, vocabulary in enumerate(self._vocabularies):
            if not i or not self._alike:
                read = [self._encode(i, text) for text in captions]
            ids = np.array([self._chunks(vocabulary, numbers) for numbers, _ in read], dtype=np.int64)
            tokens[f"input_ids_{i + 1}"] = torch.from_numpy(ids).view(shape)
            if self.weighted:
                weights = np.array([self._weight_chunks(weights) for _, weights in read], dtype=np.float32)
                tokens[f"token_weights_{i + 1}"] = torch.from_numpy(weights).view(shape)
        return tokens

    @functools.cached_property
    def identity(self) -> str:
        """Return what tells it from others: all that decides the ids of a caption."""
        tables = [[vocabulary.ids, vocabulary.merges, vocabulary.pad] for vocabulary in self._vocabularies]
        facts = [tables, self.num_chunks, self.weighted, *([self._length] if self._length != LENGTH else [])]
        words = json.dumps(facts, sort_keys=True)
        return hashlib.blake2b(words.encode(), digest_size=16).hexdigest()

    @staticmethod
    def digest(vocabularies: Sequence[ClipVocabulary]) -> str:
        """Hash the vocabularies alone."""
        tables = json.dumps(
            [[vocabulary.ids, vocabulary.merges, vocabulary.pad] for vocabulary in vocabularies], sort_keys=True
        )
        return hashlib.blake2b(tables.encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def _alike(self) -> bool:
        """Tell whether two vocabularies cut a text into the same ids, as those of SDXL do: they differ in padding."""
        first, second = self._vocabularies
        return first.ids == second.ids and first.merges == second.merges

    @property
    def limit(self) -> int:
        """Return how many tokens of a caption are kept."""
        return self._chunk * self.num_chunks

    def lengths(self, captions: list[str]) -> list[int]:
        """Count the tokens of captions before they are cut, by the first vocabulary, without BOS and EOS.

        No token of CLIP spans a blank, so each distinct word is looked at once: ten times as fast for many captions.
        """
        texts = (" ".join(mended(_plain(piece)) for piece, _ in self._pieces(text)) for text in captions)
        words = [_BLANK.split(text) for text in texts]
        distinct = list({word for encoded_word in words for word in encoded_word})
        encoded = self._tokenizers()[0].encode_batch_fast(distinct, add_special_tokens=False)
        counts = {word: len(encoded_word.ids) for word, encoded_word in zip(distinct, encoded, strict=True)}
        return [sum(counts[word] for word in encoded_word) for encoded_word in words]

    def _tokenizers(self) -> list[Any]:
        if self._backends is None:
            self._backends = [vocabulary.backend() for vocabulary in self._vocabularies]
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
        for word in _BLANK.split(mended(_plain(text))):
            known_ids = known.get(word)
            if known_ids is None:
                known_ids = self._tokenizers()[which].encode(word, add_special_tokens=False).ids
                if len(known) >= _WORDS:
                    known.clear()
                if len(word) <= _LONG:
                    known[word] = known_ids
            ids += known_ids
        return ids

    def _weight_chunks(self, weights: list[float]) -> list[list[float]]:
        """Lay weights out as _chunks does ids; what is no token of the caption weighs 1."""
        total = self._chunk * self.num_chunks
        filled = weights[:total] + [1.0] * (total - len(weights))
        return [[1.0, *filled[start : start + self._chunk], 1.0] for start in range(0, total, self._chunk)]

    def _chunks(self, vocabulary: ClipVocabulary, ids: list[int]) -> list[list[int]]:
        """Cut one caption's ids into sequences of BOS, 75 ids, and an end.

        The caption's own EOS stands behind its last id. A chunk filled to the brim ends in EOS, one that starts after
        the caption's end is BOS, EOS, padding (kohya's meaning; by position, so that a "!" is never taken for padding).
        """
        bos, eos, pad = vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id
        ids = ids[: self.limit]
        rows = []
        for start in range(0, self.limit, self._chunk):
            body = ids[start : start + self._chunk]
            row = [bos, *body, eos]
            rows.append(row + [pad] * (self._length - len(row)))
        return rows


def _plain(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON lets through and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


# --- Weights in captions as prompts write them, `a (red:1.3) [small] star`: from text to pieces, from weights to states


_UP, _DOWN = 1.1, 1 / 1.1  # of (a) and [a]
_PIECE = re.compile(r"\\(?P<kept>[()\[\]\\]?)|:(?P<weight>[+-]?[.\d]+)\)|(?P<bracket>[()\[\]])|[^\\()\[\]:]+|:")


def weighted_pieces(text: str) -> list[tuple[str, float]]:
    """Cut a text into pieces with their weights; neighbours of one weight are one piece.

    (a) weighs 1.1, (a:1.3) what it says, [a] 1 / 1.1; brackets multiply. A backslash keeps the bracket behind it and
    goes itself. A bracket that is never closed reaches to the end; one that was never opened is text.
    """
    pieces: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    # one pass: an opening bracket is remembered, a closing one weighs all that came since
    for match in _PIECE.finditer(text):
        bracket, weight = match["bracket"], _number(match["weight"])
        if match["kept"] is not None:
            pieces.append((match["kept"], 1.0))
        elif bracket and bracket in opened:
            opened[bracket].append(len(pieces))
        elif weight is not None and opened["("]:
            _multiply(pieces, opened["("].pop(), weight)
        elif bracket == ")" and opened["("]:
            _multiply(pieces, opened["("].pop(), _UP)
        elif bracket == "]" and opened["["]:
            _multiply(pieces, opened["["].pop(), _DOWN)
        else:
            pieces.append((match[0], 1.0))

    # brackets that were never closed
    for bracket, factor in (("(", _UP), ("[", _DOWN)):
        for start in opened[bracket]:
            _multiply(pieces, start, factor)
    return _merged(pieces)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:  # "1.2.3": text like any other
        return None


def _multiply(pieces: list[tuple[str, float]], start: int, factor: float) -> None:
    pieces[start:] = [(text, weight * factor) for text, weight in pieces[start:]]


def _merged(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    merged: list[tuple[str, float]] = []
    for text, weight in pieces:
        if merged and merged[-1][1] == weight:
            merged[-1] = (merged[-1][0] + text, weight)
        else:
            merged.append((text, weight))
    return merged


def weigh(states: Tensor, weights: Tensor) -> Tensor:
    """Multiply the states of each token by its weight, then scale each text so that its mean stays what it was.

    Shapes: states (B, L, D), weights (B, L) -> (B, L, D) of the dtype of states; computed in fp32.
    Source: AUTOMATIC1111's emphasis, which kohya's scripts took over.
    """
    plain = states.float()
    weighed = plain * weights.float().unsqueeze(-1)
    before, after = (value.mean(dim=(-2, -1), keepdim=True) for value in (plain, weighed))
    scale = (before / after).where(after != 0, 1.0)
    return (weighed * scale).to(states.dtype)
