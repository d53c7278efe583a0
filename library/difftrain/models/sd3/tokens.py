"""From captions to the three token sequences of SD3: two of CLIP's, 77 long where it is CLIP, and one of T5's."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.parts.clip_tokens import PAD_1, PAD_2, ClipTokenize
from difftrain.models.parts.clip_vocabulary import ClipVocabulary
from difftrain.models.parts.small_vocabulary import MAX_BUILT_IN, clip_misfits, clip_vocabulary, small_t5
from difftrain.models.parts.t5_vocabulary import T5Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.models.sd3.sources import Source

HUB_IDS = ("openai/clip-vit-large-patch14", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k", "google/t5-v1_1-xxl")
_CLIP_REMEDY = (
    "give a folder with CLIP's vocab.json and merges.txt (tokenizer and tokenizer_2 of any SD3 folder of diffusers), "
    "one with tokenizer.json, or OpenAI's file bpe_simple_vocab_16e6.txt.gz"
)
_T5_REMEDY = "give T5's tokenizer.json, or a folder with it or with spiece.model (tokenizer_3 of any SD3 folder)"


class Vocabularies(NamedTuple):
    """The three vocabularies of a model."""

    first: ClipVocabulary
    second: ClipVocabulary
    third: T5Vocabulary

    def by_name(self) -> dict[str, Any]:
        """Name them as Parts holds them."""
        return {f"tokenizer_{i}": vocabulary for i, vocabulary in enumerate(self, start=1)}


def vocabularies(cfg: TrainConfig, source: Source) -> Vocabularies:
    """Read all three: those that are given, else the folder's own, else the built-in of the small sizes.

    Raises ConfigFault that says what to place where; the padding rule is the encoder's, whatever files say.
    """
    found: list[Any] = []
    faults: list[Fault] = []
    for i, (pad, given) in enumerate(zip((PAD_1, PAD_2, None), _given(cfg), strict=True), start=1):
        size, flag = getattr(source.architecture, f"text_encoder_{i}"), f"--tokenizer{i}_path"
        path = Path(given).expanduser() if given else source.tokenizer_dirs.get(i)
        try:
            if pad is None:
                vocabulary: Any = _t5(path, size["vocab_size"])
                faults += _t5_misfits(flag, vocabulary, size)
            else:
                vocabulary = dataclasses.replace(
                    clip_vocabulary(path, size["vocab_size"], pad), length=source.architecture.clip_length
                )
                faults += clip_misfits(flag, vocabulary, size)
            found.append(vocabulary)
        except (OSError, ValueError, KeyError) as error:
            faults.append(Fault(flag, str(error), _CLIP_REMEDY if pad else _T5_REMEDY))
    if faults:
        raise ConfigFault(faults)
    return Vocabularies(*found)


def comes_without(cfg: TrainConfig, source: Source) -> dict[str, str]:
    """Name the vocabularies that are neither given nor beside the weights nor built in, and the hub ids that have them."""
    return {
        f"model.tokenizer{i}": HUB_IDS[i - 1]
        for i, given in enumerate(_given(cfg), start=1)
        if i not in source.tokenizer_dirs
        and not given
        and getattr(source.architecture, f"text_encoder_{i}")["vocab_size"] > MAX_BUILT_IN
    }


def _given(cfg: TrainConfig) -> tuple[str | None, ...]:
    return cfg.model.tokenizer1, cfg.model.tokenizer2, cfg.model.tokenizer3


def _t5(path: Path | None, size: int) -> T5Vocabulary:
    if path is not None:
        if not path.exists():
            raise ValueError(f"there is no file or folder '{path}'")
        return T5Vocabulary.read(path)
    if size > MAX_BUILT_IN:
        raise ValueError("is needed: the weights come without a tokenizer")
    return small_t5(size)


def _t5_misfits(flag: str, vocabulary: T5Vocabulary, size: Mapping[str, Any]) -> list[Fault]:
    faults = []
    if len(vocabulary) > size["vocab_size"]:
        faults.append(Fault(flag, f"has {len(vocabulary)} tokens, text_encoder_3 knows {size['vocab_size']}"))
    for what, ours, key, usual in (
        ("ends", vocabulary.eos_id, "eos_token_id", 1),
        ("fills up", vocabulary.pad_id, "pad_token_id", 0),
    ):
        expected = size.get(key, usual)
        if ours != expected:
            faults.append(Fault(flag, f"{what} texts with id {ours}, text_encoder_3 expects {expected}"))
    return faults


class SD3Tokenize:
    """Turn captions into ids: "input_ids_1" and "input_ids_2" (B, 77), "input_ids_3" (B, L), all int64.

    CLIP's: BOS, the caption, EOS, padding. T5's: the caption, EOS, padding; with masked also "t5_mask" (B, L) bool,
    true up to EOS. Longer captions are cut before their EOS. Picklable: a worker builds its tokenizers on first use.
    """

    def __init__(self, three: Vocabularies, t5_length: int, *, masked: bool = False) -> None:
        self.t5_length, self.masked = t5_length, masked
        self._t5 = three.third
        self._clip = ClipTokenize((three.first, three.second))
        self._backend: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "identity"} | {"_backend": None}

    def __call__(self, captions: list[str]) -> dict[str, Tensor]:
        import torch

        found = {name: ids[:, 0] for name, ids in self._clip(captions).items()}
        rows = [self._t5_ids(text) for text in captions]
        ids = np.full((len(rows), self.t5_length), self._t5.pad_id, dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=bool)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, True
        found["input_ids_3"] = torch.from_numpy(ids)
        if self.masked:
            found["t5_mask"] = torch.from_numpy(mask)
        return found

    @functools.cached_property
    def identity(self) -> str:
        """Return what tells it from others: all that decides the ids of a caption."""
        parts = [self._clip.identity, self._t5.digest, self.t5_length, self.masked]
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    @property
    def limit(self) -> int:
        """Return how many tokens of a caption are kept, as `lengths` counts them."""
        return self.t5_length - 1

    def lengths(self, captions: list[str]) -> list[int]:
        """Count the tokens of captions before they are cut, by T5's vocabulary, which reads furthest, without EOS."""
        return [
            len(each.ids)
            for each in self._tokenizer().encode_batch([_plain(text) for text in captions], add_special_tokens=False)
        ]

    def _t5_ids(self, text: str) -> list[int]:
        ids = self._tokenizer().encode(_plain(text), add_special_tokens=False).ids
        return [*ids[: self.t5_length - 1], self._t5.eos_id]

    def _tokenizer(self) -> Any:
        if self._backend is None:
            self._backend = self._t5.backend()
        return self._backend


def _plain(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON lets through and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
