"""T5's vocabularies: the real one word for word, the built-in one by the same rules, and files that are neither."""

from __future__ import annotations

import base64
import json
import pickle
import struct
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fetched import clip_bpe, t5_tokenizer

from difftrain.models.facts import Text
from difftrain.models.text.clip_tokens import PAD_1, PAD_2
from difftrain.models.text.clip_vocabulary import ClipVocabulary
from difftrain.models.text.t5_vocabulary import EOS_ID, UNK_ID, T5Vocabulary
from difftrain.models.text.tokenize import Tokenize, small_clip, small_t5

HOUSE = "translate English to German: The house is wonderful."
HOUSE_IDS = [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5]
CAPTIONS = [
    "a photo of a cat",
    "",
    "Two  red\nhouses, 3 trees!",
    "ﬁne Ünïcödé ①",
    "</s> <extra_id_0>",
    "\ud800",
    "x" * 900,
]


T5_MASKED = Text("text_encoder", "tokenizer", "t5", 256, masked=True, mask="t5_mask")


class Vocabularies(NamedTuple):
    first: ClipVocabulary
    second: ClipVocabulary
    third: T5Vocabulary


@pytest.fixture(scope="module")
def real() -> T5Vocabulary:
    """T5's own vocabulary."""
    return T5Vocabulary.read(t5_tokenizer())


def tokens_of(three: Vocabularies, t5_length: int, *, masked: bool = False) -> Tokenize:
    texts = (
        Text("text_encoder_1", "tokenizer", "clip", 77),
        Text("text_encoder_2", "tokenizer_2", "clip", 77, pads_zero=True),
        Text("text_encoder_3", "tokenizer_3", "t5", 256, masked=masked, mask="t5_mask"),
    )
    return Tokenize(texts, three, (77, 77, t5_length))


def small() -> Vocabularies:
    return Vocabularies(small_clip(834, PAD_1), small_clip(674, PAD_2), small_t5(384))


def test_the_real_one_reads_as_published(real: T5Vocabulary) -> None:
    assert real.backend().encode(HOUSE, add_special_tokens=False).ids == HOUSE_IDS
    assert (real.eos_id, real.pad_id, len(real)) == (1, 0, 32100)


def test_the_real_ones_together_and_as_transformers_has_them(real: T5Vocabulary, tmp_path: Path) -> None:
    """What a diffusers pipeline reads from the folder that we write is what training reads."""
    merges = clip_bpe()
    three = Vocabularies(ClipVocabulary.read(merges, PAD_1), ClipVocabulary.read(merges, PAD_2), real)
    ids = tokens_of(three, 12)(["a photo of a cat", HOUSE])
    cat = [49406, 320, 1125, 539, 320, 2368, 49407]
    assert ids["input_ids_1"][0].tolist() == cat + [49407] * 70
    assert ids["input_ids_2"][0].tolist() == cat + [0] * 70
    assert ids["input_ids_3"][1].tolist() == [*HOUSE_IDS, 1, 0]
    real.save(tmp_path)
    from transformers import T5TokenizerFast

    theirs = T5TokenizerFast.from_pretrained(tmp_path)
    plain = [text for text in CAPTIONS if text.isprintable() and "<" not in text]
    for length in (8, 32):
        expected = theirs(plain, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        found = Tokenize((T5_MASKED,), (real,), (length,))(plain)
        assert torch.equal(found["input_ids_1"], expected.input_ids)
        assert torch.equal(found["t5_mask"].long(), expected.attention_mask)


def test_the_built_in_one_ends_fills_up_and_cuts_as_t5_does() -> None:
    found = tokens_of(small(), 6, masked=True)(["a cat red", "", "a photo of a cat and a dog"])
    ids = found["input_ids_3"]
    assert ids[0, 3:].tolist() == [EOS_ID, 0, 0] and found["t5_mask"].sum(1).tolist() == [4, 1, 6]
    assert ids[1].tolist() == [EOS_ID, 0, 0, 0, 0, 0]
    assert ids[2, -1] == EOS_ID and (ids[2] > UNK_ID).sum() == 5


@pytest.mark.parametrize("caption", CAPTIONS)
def test_every_caption_becomes_ids_of_the_right_shape(caption: str) -> None:
    found = tokens_of(small(), 16)([caption])
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "input_ids_1": (1, 77), "input_ids_2": (1, 77), "input_ids_3": (1, 16),
    }  # fmt: skip
    assert all(value.dtype == torch.int64 for value in found.values())
    assert found["input_ids_3"].max() < 384 and EOS_ID in found["input_ids_3"]


def test_a_tokenizer_is_picklable_and_known_by_what_decides_ids() -> None:
    one = tokens_of(small(), 16)
    one(["a"])
    other = pickle.loads(pickle.dumps(one))
    assert other.identity == one.identity and torch.equal(
        other(["a cat"])["input_ids_3"], one(["a cat"])["input_ids_3"]
    )
    assert tokens_of(small(), 17).identity != one.identity
    assert tokens_of(small(), 16, masked=True).identity != one.identity
    shorter = small()._replace(third=small_t5(300))
    assert tokens_of(shorter, 16).identity != one.identity


def test_captions_are_counted_before_they_are_cut() -> None:
    tokens = tokens_of(small(), 4)
    assert tokens.lengths(["a cat red", "", "a cat red and a dog"]) == [3, 0, 6] and tokens.limit == 3


def test_a_folder_is_written_and_read(tmp_path: Path) -> None:
    small_t5(384).save(tmp_path)
    assert T5Vocabulary.read(tmp_path) == small_t5(384) == T5Vocabulary.read(tmp_path / "tokenizer.json")
    other = json.loads((tmp_path / "tokenizer.json").read_text()) | {"truncation": {"max_length": 3}}
    assert T5Vocabulary(json.dumps(other)).digest == small_t5(384).digest


def llama_like(folder: Path, pad: str) -> None:
    """Write a small tokenizer of the kind that Pile-T5 has, Llama's: BPE over blanks, bytes for what is unknown."""
    letters = "▁acdehorst"
    merges = ["▁ c", "a t", "▁c at", "▁ r", "e d", "▁r ed"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *letters,
        *(m.replace(" ", "") for m in merges),
    ]
    marks = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i in range(3)
    ]  # fmt: skip
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": marks,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad, "add_eos_token": True}))


def test_a_bpe_vocabulary_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    llama_like(tmp_path / "own", "<s>")
    found = T5Vocabulary.read(tmp_path / "own")
    assert (found.eos_id, found.pad_id, len(found)) == (
        2,
        1,
        275,
    ) and found.tokenizer_class == "PreTrainedTokenizerFast"
    found.save(tmp_path / "written")
    assert T5Vocabulary.read(tmp_path / "written").digest == found.digest and pickle.loads(pickle.dumps(found)) == found
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "written")
    tokens = Tokenize((T5_MASKED,), (found,), (12,))
    captions = ["a red cat", "", "red", "é cats  there", "cat " * 20]
    made = tokens(captions)
    other = theirs(captions, truncation=True, max_length=12, padding="max_length", return_tensors="pt")
    assert torch.equal(made["input_ids_1"], other["input_ids"])
    assert torch.equal(made["t5_mask"], other["attention_mask"].bool())

    llama_like(tmp_path / "other", "<pad>")
    with pytest.raises(ValueError, match=r"has no <pad>"):
        T5Vocabulary.read(tmp_path / "other")


def message(number: int, data: bytes) -> bytes:
    """Write one field of a protocol buffer."""
    size = len(data)
    return bytes([number << 3 | 2]) + (bytes([size]) if size < 128 else varint(size)) + data


def varint(number: int) -> bytes:
    low = bytes([number & 127 | (128 if number > 127 else 0)])
    return low + varint(number >> 7) if number > 127 else low


def test_a_spiece_model_reads_as_its_tokenizer_json(real: T5Vocabulary, tmp_path: Path) -> None:
    """The file is written here from the real tokenizer.json: pieces, scores and the table of characters."""
    content = json.loads(real.content)
    parts = []
    for i, (piece, score) in enumerate(content["model"]["vocab"][:32000]):
        kind = {0: 3, 1: 3, 2: 2}.get(i, 1)
        parts.append(message(1, message(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + bytes([24, kind])))
    table = base64.b64decode(content["normalizer"]["normalizers"][0]["precompiled_charsmap"])
    parts += [message(2, bytes([24, 1])), message(3, message(1, b"nmt_nfkc") + message(2, table))]
    written = b"".join(parts)
    (tmp_path / "spiece.model").write_bytes(written)
    found = T5Vocabulary.read(tmp_path)
    assert len(found) == len(real) and (found.eos_id, found.pad_id) == (1, 0)
    ours, theirs = found.backend(), real.backend()
    for text in [HOUSE, *(text for text in CAPTIONS if text != "\ud800")]:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids, (
            text
        )
    broken = tmp_path / "broken.model"
    broken.write_bytes(written[:-7])
    with pytest.raises(ValueError, match=r"broken\.model"):
        T5Vocabulary.read(broken)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "is not JSON"),
        ("tokenizer.json", "[]", r"tokenizer\.json of T5"),
        ("tokenizer.json", json.dumps({"model": {"type": "WordLevel", "vocab": {}}}), "not a T5 tokenizer"),
        ("tokenizer.json", json.dumps({"model": {"type": "BPE", "vocab": {"</s>": 0}}}), " no <pad>"),
        ("tokenizer.json", json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}), " no <pad>, </s>"),
        ("spiece.model", "nothing", r"spiece\.model of T5"),
        ("other.txt", "", r"tokenizer\.json .*spiece\.model"),
    ],
)
def test_what_is_no_vocabulary_is_said(name: str, content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=says):
        T5Vocabulary.read(tmp_path)
