"""CLIP vocabularies: learned, read from every form, equal to transformers' tokenizer; chunks as kohya cuts them."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sdxl import config
from vocabularies import transformers_tokenizer

from difftrain.cache.manifest.captions import tokenizer_identity
from difftrain.contracts import ConfigFault
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.text.clip_tokens import ClipTokenize, mended
from difftrain.models.text.clip_vocabulary import BOS, EOS, ClipVocabulary, byte_symbols, learn_merges

TEXT = "a photo of a cat and a photo of a dog, the cat is red; the dog's bone is green"
PLAIN = ClipVocabulary.learn(TEXT, 20)
BANG = ClipVocabulary.learn(TEXT, 20, pad="!")


def test_bytes_are_numbered_as_clip_numbers_them() -> None:
    symbols = byte_symbols()
    assert len(set(symbols)) == 256
    assert symbols[0] == "!" and symbols[93] == "~" and symbols[188] == "\u0100"  # "!" and "~" of ASCII; byte 0
    assert PLAIN.ids["!"] == 0 and PLAIN.ids["!</w>"] == 256
    assert (PLAIN.bos_id, PLAIN.eos_id, len(PLAIN)) == (512 + 20, 512 + 21, 534)


def test_merges_take_the_most_frequent_pair_and_break_ties_by_alphabet() -> None:
    assert learn_merges("ab ab cd", 2) == [("a", "b</w>"), ("c", "d</w>")]
    assert learn_merges("cd ab", 2) == [("a", "b</w>"), ("c", "d</w>")]
    assert learn_merges("aaa", 1) == [("a", "a")]
    with pytest.raises(ValueError, match="yields 2 merges, 3"):
        learn_merges("ab cd", 3)


@pytest.mark.parametrize(
    "text", ["A  photo\tof a CAT", "it's 42 dogs!!", "naïve café — 赤い猫 🐈", "", "   ", "x" * 400]
)
def test_ids_equal_transformers(text: str) -> None:
    ours = PLAIN.backend().encode(text, add_special_tokens=False).ids
    assert [PLAIN.bos_id, *ours, PLAIN.eos_id] == transformers_tokenizer(PLAIN)(text).input_ids


def test_the_pad_token_in_a_caption_is_text() -> None:
    assert BANG.backend().encode("wow !", add_special_tokens=False).ids[-1] == BANG.ids["!</w>"] != BANG.pad_id


def _folder(path: Path) -> Path:
    PLAIN.save(path)
    return path


def _tokenizer_json(path: Path) -> Path:
    transformers_tokenizer(PLAIN).save_pretrained(path)
    assert not (path / "merges.txt").exists() or not (path / "merges.txt").unlink()
    (path / "vocab.json").unlink(missing_ok=True)
    return path


def _old_tokenizer_json(path: Path) -> Path:
    """Merges as "a b", as files were written before tokenizers 0.20."""
    file = _tokenizer_json(path) / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    file.write_text(json.dumps(content), encoding="utf-8")
    return path


def _bpe_file(path: Path) -> Path:
    """As OpenAI ships it: gzip, a comment line, more merges than CLIP uses."""
    path.mkdir()
    merges = "".join(f"{a} {b}\n" for a, b in PLAIN.merges)
    (path / "bpe.txt.gz").write_bytes(gzip.compress(f'"bpe_simple_vocab"\n{merges}'.encode()))
    return path / "bpe.txt.gz"


@pytest.mark.parametrize("write", [_folder, _tokenizer_json, _old_tokenizer_json, _bpe_file])
def test_every_form_reads_back(tmp_path: Path, write) -> None:
    read = ClipVocabulary.read(write(tmp_path / "tokenizer"))
    assert (read.ids, read.merges) == (PLAIN.ids, PLAIN.merges)


def test_folder_loads_in_transformers_with_its_pad_token(tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    BANG.save(tmp_path)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.model_max_length) == ("!", 0, 77)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.txt", None, r"vocab\.json .*merges\.txt .*tokenizer\.json"),
        ("tokenizer.json", '{"model": {"type": "Unigram"}}', r"tokenizer\.json .*CLIP tokenizer"),
        ("tokenizer.json", "not json", "Expecting value"),
        ("vocab.json", '{"a": 0}', r"vocabulary: .*<\|startoftext\|>, <\|endoftext\|>, !"),
    ],
)
def test_other_files_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    (tmp_path / name).write_text(content or "", encoding="utf-8")
    if name == "vocab.json":
        (tmp_path / "merges.txt").write_text("", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        ClipVocabulary.read(tmp_path)
    assert re.search(message, str(error.value))


def kohya(vocabulary: ClipVocabulary, ids: list[int], chunks: int) -> list[list[int]]:
    """Cut one long padded sequence by kohya's rules, which look at values."""
    bos, eos, pad = vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id
    total = 75 * chunks + 2
    row = [bos, *ids[: total - 2], eos]
    row += [pad] * (total - len(row))
    if chunks == 1:
        return [row]
    cut = []
    for i in range(1, total - 77 + 2, 75):
        piece = [row[0], *row[i : i + 75], row[-1]]
        if pad != eos:
            if piece[-2] not in (eos, pad):
                piece[-1] = eos
            if piece[1] == pad:
                piece[1] = eos
        cut.append(piece)
    return cut


@settings(deadline=None)
@given(
    length=st.integers(0, 240) | st.sampled_from([73, 74, 75, 76, 149, 150, 151, 224, 225, 226]),
    max_token_length=st.sampled_from([75, 77, 150, 225]),
    pad=st.sampled_from([EOS, "!"]),
)
def test_chunks_equal_kohya(length: int, max_token_length: int, pad: str) -> None:
    vocabulary = PLAIN if pad == EOS else BANG
    tokenize = ClipTokenize((vocabulary, vocabulary), max_token_length)
    ids = vocabulary.backend().encode("cat " * length, add_special_tokens=False).ids
    assert len(ids) == length
    found = tokenize(["cat " * length, ""])["input_ids_1"]
    assert found.shape == (2, max(1, max_token_length // 75), 77)
    assert found[0].tolist() == kohya(vocabulary, ids, len(found[0]))
    assert found[1].tolist() == kohya(vocabulary, [], len(found[1]))


def test_a_vocabulary_of_another_length_makes_sequences_so_long(tmp_path: Path) -> None:
    short = replace(PLAIN, length=5)
    tokenize = ClipTokenize((short, replace(BANG, length=5)))
    ids = PLAIN.backend().encode("cat cat cat cat", add_special_tokens=False).ids
    assert tokenize(["cat cat cat cat"])["input_ids_1"].tolist() == [[[PLAIN.bos_id, *ids[:3], PLAIN.eos_id]]]
    assert tokenize.limit == 3 and tokenize.identity != ClipTokenize((PLAIN, BANG)).identity
    short.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 5


def test_tokenize_survives_pickling_after_use() -> None:
    tokenize = ClipTokenize((PLAIN, BANG))
    expected = tokenize(["a black cat"])
    found = pickle.loads(pickle.dumps(tokenize))(["a black cat"])
    assert all(found[key].equal(expected[key]) for key in ("input_ids_1", "input_ids_2"))
    assert expected["input_ids_1"][0, 0, -1] == PLAIN.eos_id and expected["input_ids_2"][0, 0, -1] == 0


@pytest.mark.parametrize("text", ["\ud83d half a pair", "\x00 nul", "x" * 10_000, "star " * 10_000])
def test_odd_captions_are_encoded(text: str) -> None:
    found = ClipTokenize((PLAIN, BANG), 225)([text])
    assert found["input_ids_2"].shape == (1, 3, 77) and found["input_ids_2"][0, :, 0].tolist() == [PLAIN.bos_id] * 3


def test_the_built_in_pair_differs_in_size_and_padding() -> None:
    family = SDXLFamily(config())
    parts, (first, second) = family.load(meta=True), family.vocabularies
    assert len(first) == parts.config["text_encoder"]["vocab_size"] != len(second)
    assert (first.pad, second.pad) == (EOS, "!")
    assert first.ids[BOS] == parts.config["text_encoder"]["bos_token_id"]


def test_a_missing_or_foreign_tokenizer_is_a_fault_that_says_what_to_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigFault) as error:
        _ = SDXLFamily(config(init_from_config="base")).vocabularies
    assert len(error.value.faults) == 2
    assert "--tokenizer2_path: is needed" in str(error.value) and "bpe_simple_vocab_16e6.txt.gz" in str(error.value)
    PLAIN.save(tmp_path)
    with pytest.raises(ConfigFault, match=r"--tokenizer1_path: .* id 533, .* 833"):
        _ = SDXLFamily(config(tokenizer1=str(tmp_path))).vocabularies
    with pytest.raises(ConfigFault, match=rf"--tokenizer2_path: .*{tmp_path / 'absent'}"):
        _ = SDXLFamily(config(tokenizer2=str(tmp_path / "absent"))).vocabularies


_PIECES = st.text("abX ,.'!?\t\n\u00a0\u3000\u0301\u0327\u1100\u1161ΣςİßÅ中😀\ud800\u0345\u0085<|>", max_size=24)


@given(st.lists(_PIECES, max_size=4))
@settings(max_examples=200, deadline=None)
@pytest.mark.nightly
def test_words_one_by_one_give_the_ids_of_the_whole_text(texts: list[str]) -> None:
    tokenize = ClipTokenize((PLAIN, ClipVocabulary.learn(TEXT, 8)), 225)
    for text in (*texts, *texts):  # the second time from memory
        found = tokenize([text])
        for i, vocabulary in enumerate(tokenize._vocabularies, start=1):
            plain = mended(text.encode("utf-8", "replace").decode())
            whole = vocabulary.backend().encode(plain, add_special_tokens=False).ids
            rows = found[f"input_ids_{i}"][0, :, 1:-1].flatten().tolist()
            assert rows[: min(len(whole), 225)] == whole[:225]


def test_what_is_kept_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difftrain.models.text.clip_tokens._WORDS", 10)
    tokenize = ClipTokenize((PLAIN, BANG))
    text = " ".join(f"{n}" for n in range(30)) + " " + "x" * 65
    assert tokenize([text])["input_ids_1"].equal(ClipTokenize((PLAIN, BANG))([text])["input_ids_1"])
    assert len(tokenize._known[0]) <= 10 and not tokenize._known[1]  # both cut texts alike: one of them is asked


def test_the_identity_of_a_tokenizer_tells_of_all_that_decides_ids() -> None:
    made = [ClipTokenize((PLAIN, BANG)), ClipTokenize((BANG, PLAIN)), ClipTokenize((PLAIN, BANG), 150),
            ClipTokenize((PLAIN, BANG), weighted=True), ClipTokenize((PLAIN, ClipVocabulary.learn(TEXT, 8)))]  # fmt: skip
    assert len({each.identity for each in made}) == len(made)
    assert pickle.loads(pickle.dumps(made[0])).identity == ClipTokenize((PLAIN, BANG)).identity


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("it\u2019s \u201ccurly\u201d", 'it\'s "curly"'),
        ("\ufb01ligree", "filigree"),
        ("\uff21\uff42\uff43", "abc"),
        ("black &amp; white &lt;3", "black & white <3"),
        ("don\u00e2\u20ac\u2122t", "don't"),
        ("a\x07 bell", "a bell"),
        ("na\u00efve caf\u00e9 \u2014 \u8d64\u3044\u732b", "na\u00efve caf\u00e9 \u2014 \u8d64\u3044\u732b"),
    ],
)
def test_captions_are_read_as_the_reference_mends_them(written: str, read: str) -> None:
    tokenize = ClipTokenize((PLAIN, BANG))
    for name, ids in tokenize([written]).items():
        assert ids.tolist() == tokenize([read])[name].tolist()
    assert tokenize.lengths([written]) == tokenize.lengths([read])


def test_plain_captions_are_not_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert ClipTokenize((PLAIN,))(["a photo, 1:2 (of) 'a' cat"])


def test_lists_of_captions_say_how_they_were_mended_and_entries_keep_their_address() -> None:
    tokenize = ClipTokenize((PLAIN, BANG))
    assert tokenizer_identity(tokenize) == f"{tokenize.identity} ftfy"
    assert "ftfy" not in ClipTokenize.digest((PLAIN, BANG))
