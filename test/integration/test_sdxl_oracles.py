"""SDXL against lists that others made: the names and shapes of the released file, the ids of CLIP's tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

import ftfy
import pytest
import torch
from packages import wheel
from sdxl import config

from difftrain.models.export import single_file_shapes
from difftrain.models.families.sdxl import LOGIT_SCALE, POSITION_IDS, SDXLFamily
from difftrain.models.text.clip_tokens import ClipTokenize

ROW = re.compile(r"\s+(\S+): \{shape: \[(.*?)\], dtype: (\w+)(, optional: true)?\}")


@pytest.fixture(scope="module")
def released() -> dict[str, tuple[int, ...]]:
    """Names and shapes of sd_xl_base_1.0.safetensors, and of marks that mergers add."""
    with wheel("sd_mecha==1.1.8") as package:
        text = package.read("sd_mecha/extensions/builtin/model_configs/sdxl-sgm.yaml").decode()
    found = {m[1]: tuple(int(n) for n in m[2].split(",") if n.strip()) for m in map(ROW.match, text.splitlines()) if m}
    assert len(found) > 2500
    return {key: shape for key, shape in found.items() if "." in key and not key.startswith("edm_")}


def test_base_has_the_names_and_shapes_of_the_release(released: dict[str, tuple[int, ...]]) -> None:
    family = SDXLFamily(config(init_from_config="base"))
    _, ours = single_file_shapes(family, family.load(meta=True), None, {})
    beside = (POSITION_IDS, LOGIT_SCALE)
    assert {key: shape for key, (_, shape) in ours.items()} == {k: s for k, s in released.items() if k not in beside}


def test_an_export_of_base_has_nothing_else(released: dict[str, tuple[int, ...]]) -> None:
    """What the writers are told, without writing seven gigabytes; as a release's sizes they are in no header."""
    family = SDXLFamily(config(init_from_config="base"))
    parts = family.load(meta=True)
    assert family.is_released and not SDXLFamily(config()).is_released
    _, shapes = single_file_shapes(family, parts, torch.float16, family.beside(parts))
    assert {key: shape for key, (_, shape) in shapes.items()} == released
    assert {key for key, (dtype, _) in shapes.items() if dtype != torch.float16} == {POSITION_IDS}


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "bpe_simple_vocab_16e6.txt.gz"
    with wheel("open_clip_torch") as package:
        path.write_bytes(package.read(f"open_clip/{path.name}"))
    return path


def test_clips_own_vocabulary(bpe_file: Path) -> None:
    """The published ids of a caption, and the padding of each encoder."""
    cfg = config(init_from_config="base", tokenizer1=str(bpe_file), tokenizer2=str(bpe_file))
    pair = SDXLFamily(cfg).vocabularies
    assert [len(vocabulary) for vocabulary in pair] == [49408, 49408]
    found = ClipTokenize(pair)(["a photo of a cat", "Hello, World! 123 it's"])
    expected = [49406, 320, 1125, 539, 320, 2368, 49407]
    first, second = found["input_ids_1"][0, 0].tolist(), found["input_ids_2"][0, 0].tolist()
    assert first == expected + [49407] * 70 and second == expected + [0] * 70
    marked = found["input_ids_2"][1, 0].tolist()
    assert marked[:12] == [49406, 3306, 267, 1002, 256, 272, 273, 274, 585, 568, 49407, 0]  # "!" is 256, never padding


def test_our_folder_of_it_is_transformers_tokenizer(bpe_file: Path, tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    cfg = config(init_from_config="base", tokenizer1=str(bpe_file), tokenizer2=str(bpe_file))
    vocabulary = SDXLFamily(cfg).vocabularies[0]
    vocabulary.save(tmp_path)
    theirs = CLIPTokenizer.from_pretrained(tmp_path)
    texts = ["a photo of a cat", "Ünïcödé  and 3.14 e-mail’s <tags> #1", "赤い猫", "don't you'll we've I'm", "\n\t x"]
    tokenize = ClipTokenize((vocabulary, vocabulary))
    for text in texts:  # transformers' own leaves out ftfy, which OpenAI's tokenizer and kohya's run first
        expected = theirs(ftfy.fix_text(text), padding="max_length").input_ids
        assert tokenize([text])["input_ids_1"][0, 0].tolist() == expected
