"""T5's vocabularies: a tokenizer.json as it is shipped, or a small one learned from text.

What turns text into ids is the `tokenizers` library on the very tokenizer.json, so every version of T5's rules
(character map, white space, dummy prefix) holds as its file has it. A bare spiece.model is turned into one. T5's own are
Unigram models; Pile-T5 has Llama's, a BPE model, whose folder says by which token texts are filled up.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import shutil
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from difftrain.contracts import ConfigFault, Fault
from difftrain.io.files import read_json_object, read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer


PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2  # of every T5
_MOST_IDS, _MOST_BYTES = 1 << 24, 1 << 27
SENTINELS = 100  # that T5's tokenizers have behind the pieces of their spiece.model
META = "▁"  # stands for the blank before a word
JSON, PIECES = "tokenizer.json", "spiece.model"
BPE = "BPE"  # kind of model
_RULES = ("model", "normalizer", "pre_tokenizer", "added_tokens")  # of a tokenizer.json what decides ids


@dataclass(frozen=True)
class T5Vocabulary:
    """A tokenizer.json of T5, as text. pad: the token that texts are filled up with."""

    content: str
    pad: str = PAD

    @classmethod
    def read(cls, path: Path) -> T5Vocabulary:
        """Read a folder with tokenizer.json or spiece.model, or either file.

        Raises ValueError that says what is missing where neither is there, or what is no vocabulary of T5's kind.
        """
        file = path
        if path.is_dir():
            files = [path / name for name in (JSON, PIECES) if (path / name).is_file()]
            if not files:
                raise ValueError(f"{path} holds neither {JSON} nor {PIECES}")
            file = files[0]
        text = _converted(file) if file.suffix == ".model" else read_regular(file, _MOST_BYTES).decode("utf-8")
        content = _content_of(text, file)
        pad = _pad_of(file.parent) if content["model"].get("type") == BPE else PAD
        missing = [mark for mark in (pad, EOS) if mark not in _ids(content)]
        if missing:
            raise ValueError(f"{file} is not a T5 vocabulary: it has no {', '.join(missing)}")
        return cls(text, pad)

    @classmethod
    def learn(cls, text: str, size: int) -> T5Vocabulary:
        """Make a vocabulary of up to so many tokens: T5's marks, printable ASCII, then words, frequent ones first.

        Raises ValueError where there is no room for marks and signs.
        """
        counts = Counter(text.split())
        signs = [META, *(chr(i) for i in range(33, 127))]
        words = [META + word for word in sorted(counts, key=lambda word: (-counts[word], word))]
        room = size - 3 - len(signs)
        if room < 0:
            raise ValueError(f"a built-in T5 vocabulary has {3 + len(signs)} tokens or more, {size} are allowed")
        total = sum(counts.values())
        likely = [math.log(counts[word.removeprefix(META)] / total) for word in words[:room]]
        rare = min(likely, default=0.0) - 4.0  # a sign costs more than any word that holds it
        pieces = [(PAD, 0.0), (EOS, 0.0), (UNK, 0.0), *((sign, rare) for sign in signs), *zip(words[:room], likely)]
        return cls(json.dumps(_tokenizer_json(pieces), ensure_ascii=False))

    @functools.cached_property
    def _parsed(self) -> dict[str, Any]:
        return json.loads(self.content)

    def __getstate__(self) -> dict[str, Any]:
        return {"content": self.content, "pad": self.pad}

    @property
    def eos_id(self) -> int:
        return self._id(EOS)

    @property
    def pad_id(self) -> int:
        return self._id(self.pad)

    @property
    def tokenizer_class(self) -> str:
        """Name the class of transformers that reads what `save` writes."""
        # Llama's own makes its rules anew, and ends no text
        return "PreTrainedTokenizerFast" if self._parsed["model"].get("type") == BPE else "T5TokenizerFast"

    def _id(self, token: str) -> int:
        return _ids(self._parsed)[token]

    def __len__(self) -> int:
        return max(_ids(self._parsed).values()) + 1

    @functools.cached_property
    def digest(self) -> str:
        """Return what tells it from others: all that decides the ids of a text."""
        decisive = {key: self._parsed.get(key) for key in _RULES} | ({} if self.pad == PAD else {"pad": self.pad})
        rules = json.dumps(decisive, sort_keys=True)
        return hashlib.blake2b(rules.encode(), digest_size=16).hexdigest()

    def backend(self) -> Tokenizer:
        """Build the tokenizer that turns text into ids, without marks, padding and cutting."""
        return bare_tokenizer(self.content)

    def save(self, folder: Path) -> None:
        """Write a folder that transformers' own class loads: without a first token, with EOS behind the text."""
        folder.mkdir(parents=True, exist_ok=True)
        marks = {"eos_token": EOS, "unk_token": UNK, "pad_token": self.pad}
        config: dict[str, Any] = {"tokenizer_class": "T5Tokenizer", "model_max_length": 512}
        content = self.content
        if self._parsed["model"].get("type") == BPE:
            config |= {"tokenizer_class": self.tokenizer_class, "padding_side": "right"}
            content = json.dumps({**self._parsed, "post_processor": _ended(self.eos_id)}, ensure_ascii=False)
        else:
            config["extra_ids"] = sum(token.startswith("<extra_id_") for token in _ids(self._parsed))
        config |= marks
        (folder / JSON).write_text(content, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        (folder / "special_tokens_map.json").write_text(json.dumps(marks, indent=2), encoding="utf-8")


class _Bytes(NamedTuple):
    """What encoding gives, as the library of tokenizers has it."""

    ids: list[int]


class ByteTokenizer:
    """Read the bytes of UTF-8 as tokens behind T5's three marks."""

    def encode(self, text: str, add_special_tokens: bool = False) -> _Bytes:
        """Return the ids of a text, without marks."""
        return _Bytes([byte + 3 for byte in text.encode("utf-8")])

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[_Bytes]:
        """Return the ids of several texts."""
        return [self.encode(text) for text in texts]


@dataclass(frozen=True)
class ByteVocabulary:
    """ByT5's vocabulary, which lies in no file. folder: whose settings are exported."""

    folder: Path | None = None
    digest = "utf-8"
    pad_id, eos_id = PAD_ID, EOS_ID

    @classmethod
    def read(cls, folder: Path | None) -> ByteVocabulary:
        """Take a tokenizer's folder. Raises ValueError where it is none."""
        if folder is not None and not (folder / "tokenizer_config.json").is_file():
            raise ValueError(f"{folder} has no tokenizer_config.json")
        return cls(folder)

    def __len__(self) -> int:
        return 3 + 256

    def backend(self) -> ByteTokenizer:
        """Return what turns text into ids."""
        return ByteTokenizer()

    def save(self, folder: Path) -> None:
        """Write a folder that transformers' ByT5Tokenizer loads."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
            if self.folder is not None and (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        if not (folder / "tokenizer_config.json").is_file():
            marks = {"eos_token": EOS, "unk_token": UNK, "pad_token": PAD}
            config = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0, **marks}
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def bare_tokenizer(content: str) -> Tokenizer:
    """Build the tokenizer of a tokenizer.json, without padding and cutting. Raises ConfigFault where it is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content)
    except BaseException as error:  # the library raises plain exceptions, and its panics are none of Python's
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        what = f"{JSON} makes no tokenizer: {str(error)[:200]}"
        raise ConfigFault([Fault("the text encoder's vocabulary", what, "the file that came with the model")]) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _tokenizer_json(pieces: list[tuple[str, float]], special: Sequence[str] = ()) -> dict[str, Any]:
    """Lay pieces out as T5's tokenizer.json does: white space split, a mark before each word, EOS behind the text."""
    # special tokens: found whole, never cut into pieces
    marks = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, (token, _) in enumerate(pieces) if token in {PAD, EOS, UNK, *special}
    ]  # fmt: skip

    # how spaces are marked
    space = {"type": "Metaspace", "replacement": META, "prepend_scheme": "always", "split": True}

    # the keys are in the order in which tokenizers writes them
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": marks,
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]},
        "post_processor": _ended(next(i for i, (token, _) in enumerate(pieces) if token == EOS)),
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": UNK_ID, "vocab": [list(piece) for piece in pieces]},
    }


def _ended(eos_id: int) -> dict[str, Any]:
    """Return the rule that puts EOS behind one text, and behind both of two."""
    text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": EOS, "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [text, end],
        "pair": [text, end, second, end],
        "special_tokens": {EOS: {"id": EOS, "ids": [eos_id], "tokens": [EOS]}},
    }


def _ids(content: dict[str, Any]) -> dict[str, int]:
    vocab = content["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in content.get("added_tokens") or []}


def _pad_of(folder: Path) -> str:
    """Return the token that the files beside a vocabulary name, to fill texts up with."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        pad = (read_json_object(folder / name) or {}).get("pad_token")
        pad = pad.get("content") if isinstance(pad, dict) else pad
        if isinstance(pad, str):
            return pad
    return PAD


def _content_of(text: str, path: Path) -> dict[str, Any]:
    """Read a tokenizer.json of a kind that T5s have. Raises ValueError that says why it is none."""
    try:
        content: dict[str, Any] = json.loads(text)
        model = content["model"]
        # files of older versions do not name the kind
        kind, vocab = model.get("type", "Unigram"), model["vocab"]
        if kind not in ("Unigram", BPE) or not isinstance(vocab, dict if kind == BPE else list):
            what = f"{path} is not a T5 tokenizer (a Unigram or BPE model), but {model.get('type', 'unnamed')}"
            raise ValueError(what)
        ids = _ids(content)
        if kind == "Unigram" and not all(isinstance(piece, str) and math.isfinite(score) for piece, score in vocab):
            raise TypeError("a piece is not text, or its score is not a number")
        if not all(type(number) is int and 0 <= number < _MOST_IDS for number in ids.values()):
            raise TypeError("an id is not a whole number, or is too large")
    except RecursionError:
        raise ValueError(f"{path} is not a tokenizer.json of T5: of too many levels") from None
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a tokenizer.json of T5: {error!r}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return content


def _converted(path: Path) -> str:
    """Turn a spiece.model into a tokenizer.json, with T5's sentinels behind its pieces.

    Raises ValueError that says why it cannot be.
    """
    try:
        file = read_pieces(read_regular(path, _MOST_BYTES))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a spiece.model of T5: {error}") from None
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(SENTINELS))]
    content = _tokenizer_json([*file.pieces, *((name, 0.0) for name in sentinels)], sentinels)
    content["model"]["unk_id"] = file.unknown
    # as T5's own tokenizer.json: the table of characters, then one blank for several
    table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(file.characters).decode("ascii")}
    steps: list[dict[str, Any]] = [table] if file.characters else []
    steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    content["normalizer"] = {"type": "Sequence", "normalizers": steps}
    content["pre_tokenizer"] = content["decoder"]
    return json.dumps(content, ensure_ascii=False)


# --- Read a SentencePiece model file (spiece.model) without SentencePiece: pieces, scores, and its table of characters
# The file is a protocol buffer, ModelProto of sentencepiece_model.proto: field 1 is a piece (1 text, 2 score as fp32, 3
# kind), field 2 how it was trained (3 kind of model), field 3 how texts are normalised (2 compiled table of characters).


UNIGRAM, UNKNOWN = 1, 2  # kind of model; kind of piece


@dataclass(frozen=True)
class PieceFile:
    """The content of a Unigram model: pieces in the order of their ids. characters: empty where texts stay as they are."""

    pieces: tuple[tuple[str, float], ...]
    unknown: int
    characters: bytes


def read_pieces(content: bytes) -> PieceFile:
    """Read a file's content. Raises ValueError where it is none, or is not a Unigram model."""
    pieces: list[tuple[str, float]] = []
    unknown, model, characters = 0, UNIGRAM, b""
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            if piece.get(3, 1) == UNKNOWN:
                unknown = len(pieces)
            pieces.append((_bytes(piece[1]).decode("utf-8"), _score(piece.get(2))))
        elif number == 2:
            model = dict(_fields(_bytes(value))).get(3, UNIGRAM)
        elif number == 3:
            characters = _bytes(dict(_fields(_bytes(value))).get(2, b""))
    if not pieces:
        raise ValueError("holds no pieces")
    if model != UNIGRAM:
        raise ValueError("is not a Unigram model")
    return PieceFile(tuple(pieces), unknown, characters)


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a message: whole numbers, or bytes of texts, messages and numbers of fixed width."""
    offset = 0
    while offset < len(content):
        tag, offset = _varint(content, offset)
        kind = tag & 7
        if kind == 0:
            value: Any
            value, offset = _varint(content, offset)
        else:
            if kind == 2:
                size, offset = _varint(content, offset)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise ValueError("is not a protocol buffer")
            value, offset = content[offset : offset + size], offset + size
            if offset > len(content):
                raise ValueError("ends too early")
        yield tag >> 3, value


def _varint(content: bytes, offset: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        if offset >= len(content) or shift > 63:
            raise ValueError("ends too early")
        byte = content[offset]
        value |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return value, offset


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("is not a SentencePiece model")
    return value


def _score(value: Any) -> float:
    return float(struct.unpack("<f", value)[0]) if value is not None else 0.0
