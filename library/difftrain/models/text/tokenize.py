"""The one picklable function from captions to the ids that all text encoders of a family read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.models.facts import Text
from difftrain.models.text.clip_tokens import CLEANING, PAD_1, PAD_2, ClipTokenize, mended
from difftrain.models.text.clip_vocabulary import NUM_FIXED, ClipVocabulary
from difftrain.models.text.llm_vocabulary import LlmVocabulary
from difftrain.models.text.t5_vocabulary import ByteVocabulary, T5Vocabulary

if TYPE_CHECKING:
    from torch import Tensor


_CLIP_REMEDY = (
    "give a folder with CLIP's vocab.json and merges.txt ({folder} of any {title} folder of diffusers), "
    "one with tokenizer.json, or OpenAI's file bpe_simple_vocab_16e6.txt.gz"
)
_T5_REMEDY = "give T5's tokenizer.json, or a folder with it or with spiece.model ({folder} of any {title} folder)"
_LLM_REMEDY = "give the folder of the language model's tokenizer, with tokenizer.json ({folder} of any {title} folder)"
_REMEDIES = {"clip": _CLIP_REMEDY, "t5": _T5_REMEDY, "llm": _LLM_REMEDY}


def mask_name(texts: Sequence[Text], position: int) -> str:
    """Return what the mask of a text encoder is called among features; places count from 1."""
    return texts[position - 1].mask or f"mask_{position}"


def vocabularies(
    texts: Sequence[Text], dirs: Mapping[str, Path], sizes: Mapping[str, Mapping[str, Any]], title: str
) -> tuple[Any, ...]:
    """Read the vocabulary of each text encoder, or take the built-in one of a small size.

    dirs: tokenizer folder -> where it is. sizes: encoder -> its complete sizes. Raises ConfigFault with every fault.
    """
    made: list[Any] = []
    problems: list[Fault] = []
    for position, text in enumerate(texts, start=1):
        where, size = option(f"model.tokenizer{position}"), sizes[text.part]
        size = size.get("text_config") or size
        try:
            vocabulary, misfits = _vocabulary(text, dirs.get(text.tokenizer), size, where)
            made.append(vocabulary)
            problems += misfits
        except (OSError, ValueError, KeyError) as error:
            remedy = _REMEDIES[text.kind].format(folder=text.tokenizer, title=title)
            problems.append(Fault(where, str(error), remedy))
    if problems:
        raise ConfigFault(problems)
    return tuple(made)


def _vocabulary(text: Text, path: Path | None, size: Mapping[str, Any], where: str) -> tuple[Any, list[Fault]]:
    """Return a vocabulary, and where it does not belong to its encoder. Raises ValueError."""
    if text.kind == "clip":
        # the encoder decides what texts are filled up with, whatever files say
        clip = clip_vocabulary(path, size["vocab_size"], PAD_2 if text.pads_zero else PAD_1)
        length = min(text.length, size.get("max_position_embeddings", clip.length))
        return dataclasses.replace(clip, length=length), clip_misfits(where, clip, dict(size))
    if path is not None and not path.exists():
        raise ValueError(f"no such file or folder: '{path}'")
    if path is None and size["vocab_size"] > MAX_BUILT_IN:
        raise ValueError("is needed: the weights do not include a tokenizer")
    if text.raw_bytes:
        return ByteVocabulary.read(path), []
    if text.kind == "t5":
        t5 = T5Vocabulary.read(path) if path is not None else small_t5(size["vocab_size"])
        return t5, _too_many(where, t5, text, size) + _other_marks(where, t5, text, size)
    llm = LlmVocabulary.read(path, text) if path is not None else LlmVocabulary.small(text, size["vocab_size"])
    absent = [Fault(where, f"has no token {mark}, which {text.part}'s template holds", "the tokenizer of that model")
              for mark in llm.lacks(text.template)]  # fmt: skip
    return llm, _too_many(where, llm, text, size) + absent


def _too_many(where: str, vocabulary: Any, text: Text, size: Mapping[str, Any]) -> list[Fault]:
    if len(vocabulary) <= size["vocab_size"]:
        return []
    return [Fault(where, f"has {len(vocabulary)} tokens, {text.part} knows {size['vocab_size']}")]


def _other_marks(where: str, vocabulary: T5Vocabulary, text: Text, size: Mapping[str, Any]) -> list[Fault]:
    rows = [("ends", vocabulary.eos_id, "eos_token_id", 1)]
    if not (text.masked and text.reads_mask):  # else nobody sees what texts are filled up with
        rows.append(("fills up", vocabulary.pad_id, "pad_token_id", 0))
    return [
        Fault(where, f"{what} texts with id {ours}, {text.part} expects {size.get(key, usual)}")
        for what, ours, key, usual in rows
        if ours != size.get(key, usual)
    ]


class Tokenize:
    """Turn captions into {"input_ids_1": (B, L1), "mask_1": (B, L1), "input_ids_2": ...}, int64 and bool. Picklable.

    Each in its template, cut to its length. CLIP's: BOS, the caption, EOS, padding; T5's: the caption, EOS, padding;
    a language model's: the template around the caption as its tokenizer reads it, and padding behind or before it. Masks
    are of what the encoder reads, the template's head included.
    """

    def __init__(self, texts: Sequence[Text], vocabularies: Sequence[Any], lengths: Sequence[int]) -> None:
        self.texts, self.vocabularies, self.kept = tuple(texts), tuple(vocabularies), tuple(lengths)
        self._backends: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "identity"} | {"_backends": {}}

    def __call__(self, captions: list[str]) -> dict[str, Tensor]:
        import torch

        made: dict[str, Tensor] = {}
        for position, (text, vocabulary, length) in enumerate(zip(self.texts, self.vocabularies, self.kept), start=1):
            if text.kind == "clip":
                made[f"input_ids_{position}"] = self._backend(position)(captions)["input_ids_1"][:, 0]
                continue
            ids = np.full((len(captions), length + text.drop), vocabulary.pad_id, dtype=np.int64)
            mask = np.zeros(ids.shape, dtype=bool)
            for row, caption in enumerate(captions):
                numbers = self._ids(position, caption, ids.shape[1])
                first = ids.shape[1] - len(numbers) if text.pads_left else 0
                ids[row, first : first + len(numbers)], mask[row, first : first + len(numbers)] = numbers, True
            made[f"input_ids_{position}"] = torch.from_numpy(ids)
            if text.masked:
                made[mask_name(self.texts, position)] = torch.from_numpy(mask)
        return made

    def _ids(self, position: int, caption: str, limit: int) -> list[int]:
        text, plain = self.texts[position - 1], self._read(position, caption)
        if text.kind == "t5":
            if text.quoted and not plain:
                return []
            ids = self._backend(position).encode(plain, add_special_tokens=False).ids
            return [*ids[: limit - 1], self.vocabularies[position - 1].eos_id]
        template = text.template if plain or not text.bare else text.bare
        read = template.replace("{}", plain or text.blank)
        return list(self._backend(position).encode(read, add_special_tokens=not text.marked).ids[:limit])

    def _read(self, position: int, caption: str) -> str:
        """Return a caption as an encoder that is not CLIP's reads it; CLIP's tokenizer mends by itself."""
        plain = _plain(caption)
        for mark in self.texts[position - 1].strips:
            plain = plain.replace(mark, "")
        if self.texts[position - 1].quoted:
            return quotations(plain)
        return html.unescape(html.unescape(mended(plain))).strip() if self.texts[position - 1].mends else plain

    @property
    def cleaning(self) -> str:
        """Return what is done to captions before they are cut into tokens."""
        return CLEANING if any(text.kind == "clip" or text.mends for text in self.texts) else ""

    def _backend(self, position: int) -> Any:
        if position not in self._backends:
            vocabulary, is_clip = self.vocabularies[position - 1], self.texts[position - 1].kind == "clip"
            self._backends[position] = ClipTokenize((vocabulary, vocabulary)) if is_clip else vocabulary.backend()
        return self._backends[position]

    @functools.cached_property
    def identity(self) -> str:
        """Return what tells it from others: all that decides the ids of a caption. Lists in a cache are named by it."""
        parts: list[Any] = []
        for position, text in enumerate(self.texts, start=1):
            if text.kind != "clip":
                template = [] if text.template == "{}" else [text.template]
                template += ["in front"] if text.pads_left else []
                template += ["filled up with", self.vocabularies[position - 1].pad] if text.pads_end else []
                template += ["blank", text.blank] if text.blank else []
                template += ["bare", text.bare] if text.bare else []
                template += ["quoted"] if text.quoted else []
                parts += [self.vocabularies[position - 1].digest, self.kept[position - 1], text.masked, *template]
            elif (clip := self._clip_identity(position)) not in parts:
                parts.append(clip)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def describe(self, position: int) -> str:
        """Return what decides the ids of one encoder, in words."""
        text, vocabulary = self.texts[position - 1], self.vocabularies[position - 1]
        if text.kind == "clip":
            return f"tokens {self._clip_identity(position)}"
        read = "read with their mask" if text.masked and text.reads_mask else "read with the padding"
        read += ", which is in front" if text.pads_left else ""
        read += f" of {vocabulary.pad}" if text.pads_end else ""
        template = "" if text.template == "{}" else f" in {text.template!r}"
        template += f", none as {text.blank!r}" if text.blank else ""
        template += f", none in {text.bare!r}" if text.bare else ""
        return f"tokens {vocabulary.digest}{template} up to {self.kept[position - 1]}, {read}"

    def _clip_identity(self, position: int) -> str:
        """Return what decides the ids of a CLIP encoder; two are told together."""
        clips = [known for text, known in zip(self.texts, self.vocabularies, strict=True) if text.kind == "clip"]
        vocabulary = self.vocabularies[position - 1]
        return ClipTokenize((clips[0], clips[1]) if len(clips) == 2 else (vocabulary, vocabulary)).identity

    @property
    def _longest(self) -> int:
        """Return the place of the encoder that reads furthest: CLIP only where there is no other."""
        later = [position for position, text in enumerate(self.texts, start=1) if text.kind != "clip"]
        return max(later or range(1, len(self.texts) + 1), key=lambda position: (self.kept[position - 1], -position))

    @property
    def limit(self) -> int:
        """Return how many tokens of a caption are kept, as `lengths` counts them."""
        if self.texts[self._longest - 1].kind == "clip":
            return int(self._backend(self._longest).limit)
        return self.kept[self._longest - 1] - (self.texts[self._longest - 1].kind == "t5")

    def lengths(self, captions: list[str]) -> list[int]:
        """Count the tokens of captions before they are cut, without marks, by the encoder that reads furthest."""
        backend = self._backend(self._longest)
        if self.texts[self._longest - 1].kind == "clip":
            return list(backend.lengths(captions))
        plain = [self._read(self._longest, text) for text in captions]
        encoded = backend.encode_batch(plain, add_special_tokens=False)
        return [len(encoding.ids) for encoding in encoded]


_QUOTED = (r"'(.*?)'", r'"(.*?)"', "\N{LEFT SINGLE QUOTATION MARK}(.*?)\N{RIGHT SINGLE QUOTATION MARK}",
           "\N{LEFT DOUBLE QUOTATION MARK}(.*?)\N{RIGHT DOUBLE QUOTATION MARK}")  # fmt: skip


def quotations(caption: str) -> str:
    """Return what a caption quotes, kind of quotation mark by kind, as an encoder of glyphs was trained to read it."""
    texts = [text for pattern in _QUOTED for text in re.findall(pattern, caption)]
    return ". ".join(f'Text "{text}"' for text in texts) + ". " if texts else ""


def _plain(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON lets through and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


# --- Which CLIP vocabulary an encoder has: one of files, or a small one learned from words that captions use


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
            raise ValueError(f"no such file or folder: '{path}'")
        return ClipVocabulary.read(path, pad)
    if size > MAX_BUILT_IN:
        raise ValueError("is needed: the weights do not include a tokenizer")
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
