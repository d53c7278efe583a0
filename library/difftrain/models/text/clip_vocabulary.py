"""CLIP's byte-level BPE vocabularies: read from every form they are shipped in, learned from text, written as folders.

Captions are cut by the rules of CLIP's tokenizer (NFC, lower case, white space joined, its word pattern, then BPE with
"</w>" at the end of a word). The padding token stays an ordinary piece of text here: a "!" in a caption is "!</w>",
never the padding token that bigG writes as id 0.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.io.files import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
NUM_FIXED = 514  # 256 bytes, the same at the end of a word, and two marks
LENGTH = 77
_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
_MOST_IDS, _MOST_BYTES = 1 << 24, 1 << 26
_MERGES_OF_CLIP = 49152 - 256 - 2  # the released BPE file holds more merges than CLIP uses


def byte_symbols() -> list[str]:
    """Return one printable character a byte, in the order of CLIP's ids ("!" is 0)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(unprintable))]


@dataclass(frozen=True)
class ClipVocabulary:
    """A vocabulary and its merges. pad: the token that fills up a sequence (EOS for CLIP-L, "!" for bigG).

    length: tokens of a sequence, its two marks included; as many as the encoder has positions.
    """

    ids: dict[str, int]
    merges: tuple[tuple[str, str], ...]
    pad: str = EOS
    length: int = LENGTH
    tokenizer_class = "CLIPTokenizer"  # of transformers, that reads what `save` writes

    @classmethod
    def from_merges(cls, merges: Iterable[tuple[str, str]], pad: str = EOS) -> ClipVocabulary:
        """Number bytes, bytes at a word's end, merges and marks as CLIP does."""
        merges = tuple(merges)
        symbols = byte_symbols()
        names = [*symbols, *(s + "</w>" for s in symbols), *(a + b for a, b in merges), BOS, EOS]
        return cls({name: i for i, name in enumerate(names)}, merges, pad)

    @classmethod
    def learn(cls, text: str, num_merges: int, pad: str = EOS) -> ClipVocabulary:
        """Learn merges from a text (see `learn_merges`)."""
        return cls.from_merges(learn_merges(text, num_merges), pad)

    @classmethod
    def read(cls, path: Path, pad: str = EOS) -> ClipVocabulary:
        """Read a folder with vocab.json + merges.txt or tokenizer.json, or a bare BPE file (.txt, .txt.gz).

        Raises ValueError that says what is missing where neither is there.
        """
        try:
            if path.is_file():
                return cls.from_merges(_parse_merges(_read_text(path))[:_MERGES_OF_CLIP], pad)
            if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
                ids = json.loads(_read_text(path / "vocab.json"))
                merges = tuple(_parse_merges(_read_text(path / "merges.txt")))
                return cls(_checked(ids, merges, path), merges, pad)
            if (path / "tokenizer.json").is_file():
                return cls._from_json(json.loads(_read_text(path / "tokenizer.json")), path, pad)
        except (TypeError, KeyError, AttributeError, RecursionError, EOFError) as error:
            raise ValueError(f"{path} is not a CLIP vocabulary: {error!r}") from None
        raise ValueError(f"{path} holds neither vocab.json and merges.txt nor tokenizer.json")

    @classmethod
    def _from_json(cls, content: dict[str, Any], path: Path, pad: str) -> ClipVocabulary:
        model = content.get("model", {})
        if model.get("type", "BPE") != "BPE" or model.get("end_of_word_suffix") != "</w>":
            raise ValueError(f"{path / 'tokenizer.json'} is not a CLIP tokenizer (byte-level BPE with </w>)")
        ids = dict(model["vocab"])
        for token in content.get("added_tokens", []):
            ids.setdefault(token["content"], token["id"])
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        merges = tuple((a, b) for a, b in pairs)
        return cls(_checked(ids, merges, path), merges, pad)

    @property
    def bos_id(self) -> int:
        return self.ids[BOS]

    @property
    def eos_id(self) -> int:
        return self.ids[EOS]

    @property
    def pad_id(self) -> int:
        return self.ids[self.pad]

    def __len__(self) -> int:
        return max(self.ids.values()) + 1

    def backend(self) -> Tokenizer:
        """Build the tokenizer that turns text into ids, without marks and without padding."""
        from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
        from tokenizers.models import BPE

        model = BPE(self.ids, list(self.merges), continuing_subword_prefix="", end_of_word_suffix="</w>", unk_token=EOS)
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        return tokenizer

    def save(self, folder: Path) -> None:
        """Write a folder that transformers' CLIPTokenizer loads."""
        folder.mkdir(parents=True, exist_ok=True)
        marks = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": self.pad}
        config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": self.length, "do_lower_case": True} | marks
        merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in self.merges)
        (folder / "vocab.json").write_text(json.dumps(self.ids, ensure_ascii=False), encoding="utf-8")
        (folder / "merges.txt").write_text(merges, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        (folder / "special_tokens_map.json").write_text(json.dumps(marks, indent=2), encoding="utf-8")


def learn_merges(text: str, num_merges: int) -> list[tuple[str, str]]:
    """Learn byte-pair merges from the words of a text: the most frequent pair first, ties in alphabetical order.

    Raises ValueError where the text has fewer pairs than asked for.
    """
    symbol = dict(zip(_bytes_in_order(), byte_symbols()))
    counts = Counter(text.lower().split())
    words = [([*(symbol[b] for b in w.encode()[:-1]), symbol[w.encode()[-1]] + "</w>"], n) for w, n in counts.items()]
    merges = list(itertools.islice(merges_of(words), num_merges))
    if len(merges) < num_merges:
        raise ValueError(f"the text yields {len(merges)} merges, {num_merges} were requested")
    return merges


def merges_of(words: Iterable[tuple[list[str], int]]) -> Iterator[tuple[str, str]]:
    """Yield byte-pair merges until every word is one piece. words: pieces of each, and how often it occurs."""
    words = list(words)
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for pieces, n in words:
            for pair in itertools.pairwise(pieces):
                pairs[pair] += n
        if not pairs:
            return
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        yield best
        words = [(_merge(pieces, best), n) for pieces, n in words]


def _bytes_in_order() -> list[int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [b for b in range(256) if b not in printable]


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for piece in pieces:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out


def _read_text(path: Path) -> str:
    content = read_regular(path, _MOST_BYTES)
    if path.suffix == ".gz":
        with gzip.open(io.BytesIO(content)) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"{path} unpacks to more than {_MOST_BYTES:,} bytes")
    return content.decode("utf-8")


def _parse_merges(text: str) -> list[tuple[str, str]]:
    """Read the pairs of a merges file, whose first line may be a version or a comment."""
    lines = text.split("\n")
    if lines and (lines[0].startswith("#version") or lines[0].startswith('"')):
        lines = lines[1:]
    pairs = [tuple(line.split()) for line in lines if line.strip()]
    wrong = next((p for p in pairs if len(p) != 2), None)
    if wrong is not None:
        raise ValueError(f"not a BPE merges file: a line holds {len(wrong)} pieces instead of 2")
    return pairs  # type: ignore[return-value]


def _checked(ids: dict[str, int], merges: tuple[tuple[str, str], ...], path: Path) -> dict[str, int]:
    if not isinstance(ids, dict) or not all(type(number) is int and 0 <= number < _MOST_IDS for number in ids.values()):
        wrong = next((key for key, number in ids.items() if type(number) is not int or not 0 <= number < _MOST_IDS), "")
        raise ValueError(f"{path} is not a CLIP vocabulary: the id of {wrong!r} is {ids[wrong]!r}"[:300])
    if len(merges) > len(ids) or any(a not in ids or b not in ids or a + b not in ids for a, b in merges):
        lost = next((p for p in merges if p[0] not in ids or p[1] not in ids or p[0] + p[1] not in ids), None)
        what = (
            f"{len(merges):,} merges for {len(ids):,} tokens"
            if lost is None
            else f"it has no token for the merge {lost}"
        )
        raise ValueError(f"{path} is not a CLIP vocabulary: {what}"[:300])
    missing = [mark for mark in (BOS, EOS, "!") if mark not in ids]
    if missing:
        raise ValueError(f"{path} is not a CLIP vocabulary: it lacks {', '.join(missing)}")
    return ids
