"""What a user can get wrong of any family is named: what, where, what would be right."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, ON_KIT, Tiny, config, exported, loaded, made
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault
from difftrain.models.text.llm_vocabulary import marks_of


def faults_of(name: str, **model: Any) -> list[Any]:
    """Load what must not load; return its faults, all of them."""
    with pytest.raises(ConfigFault) as caught:
        loaded(config(name, **model))
    return list(caught.value.faults)


def text(faults: list[Any]) -> str:
    return "\n".join(f"{fault.where} {fault.what} {fault.remedy}" for fault in faults)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the exported folder, to spoil."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def test_a_folder_of_another_family_is_named(name: str, copy: Path) -> None:
    other = next(each for each in FAMILIES if each != name)
    change(copy / "model_index.json", _class_name=FAMILIES[other].pipeline)
    (fault,) = faults_of(name, pretrained=str(copy))
    assert FAMILIES[other].pipeline in fault.what and FAMILIES[name].pipeline in fault.remedy
    assert f"type = {other!r}" in fault.remedy


def test_a_folder_of_a_family_that_is_unknown_is_named(name: str, copy: Path) -> None:
    change(copy / "model_index.json", _class_name="PaintBoxPipeline")
    (fault,) = faults_of(name, pretrained=str(copy))
    assert "PaintBoxPipeline" in fault.what and FAMILIES[name].pipeline in fault.remedy


def test_every_two_families_are_told_apart(name: str, folder: Path) -> None:
    for other in set(ON_KIT) - {name}:
        (fault,) = faults_of(other, pretrained=str(folder))
        assert f"type = {name!r}" in fault.remedy, other


def test_a_folder_that_is_no_folder(name: str, tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    whole, file = tiny.family.one_file, next(folder.rglob("*.safetensors"))
    absent = f"folder: '{tmp_path / 'nowhere'}'"
    assert absent in text(faults_of(name, pretrained=str(tmp_path / "nowhere")))
    said = "a file" if whole is None else whole.layout
    assert said in text(faults_of(name, pretrained=str(file)))
    (tmp_path / "empty").mkdir()
    assert "model_index.json" in text(faults_of(name, pretrained=str(tmp_path / "empty")))


def test_weights_from_two_places_and_from_none(name: str, tiny: Tiny, folder: Path) -> None:
    assert "init_from_config" in text(faults_of(name, pretrained=str(folder), init_from_config="tiny"))
    asked = tiny.family.where("pretrained").removeprefix("[model] ")
    assert asked in text(faults_of(name, init_from_config=None))
    assert "tiny" in text(faults_of(name, init_from_config="enormous"))


def test_all_misfits_are_named_before_a_weight_is_read(name: str, tiny: Tiny, copy: Path) -> None:
    rows = tiny.family.agree
    assert rows, "its parts must agree in something"
    whole = {part: dict(tiny.family.source.complete(part)) for part in tiny.family.parts}
    spoiled: dict[str, dict[str, int]] = {}
    for part, _, argument in (row.where.partition(".") for row in rows):
        if isinstance(whole[part][argument], int):
            spoiled.setdefault(part, {})[argument] = whole[part][argument] + 1
    changed = {part: {**sizes, **spoiled.get(part, {})} for part, sizes in whole.items()}
    places = [row.where.partition(".") for row in rows if row.misfit(changed)]
    wrong = [f"[{tiny.family.folder(part)}] {argument}" for part, _, argument in places]
    assert len(wrong) > 1
    for part, keys in spoiled.items():
        change(copy / tiny.family.folder(part) / "config.json", **keys)
    for file in copy.rglob("*.safetensors"):
        file.write_bytes(b"not read")
    faults = faults_of(name, pretrained=str(copy))
    found = "\n".join(fault.where for fault in faults)
    assert [each for each in wrong if each not in found] == []


def test_missing_foreign_and_misshapen_tensors_are_named(name: str, tiny: Tiny, copy: Path) -> None:
    part = tiny.family.denoiser
    file = next((copy / tiny.family.folder(part)).glob("*.safetensors"))
    tensors = load_file(file)
    first, second = sorted(tensors)[:2]
    other = tensors.pop(second)
    tensors |= {"stranger.weight": torch.zeros(2), first: torch.zeros(3, 5, 7)}
    save_file(tensors, file)
    said = text(faults_of(name, pretrained=str(copy)))
    assert all(each in said for each in (second, "stranger.weight", first, "(3, 5, 7)")) and other is not None


def test_a_single_file_with_missing_or_foreign_keys(name: str, tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    if "safetensors" not in FAMILIES[name].layouts:
        pytest.skip("it has no layout in one file")
    file = exported(tiny, tmp_path / "one", "safetensors")
    is_whole = tiny.family.one_file is not None
    given = {"pretrained": str(file)} if is_whole else {"pretrained": str(folder), "transformer": str(file)}
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    tensors = load_file(file)
    lost = sorted(key for key in tensors if re.search(r"(blocks|layers)\.1\.", key))[-1]  # no sizes are read off it
    tensors.pop(lost)
    save_file({**tensors, "stranger.weight": torch.zeros(2)}, file, header)
    said = text(faults_of(name, **given))
    assert lost in said and "stranger.weight" in said

    save_file({"lora_unet_a.lora_up.weight": torch.zeros(2, 2)}, file)
    assert "a LoRA" in text(faults_of(name, **given))
    save_file({"a.b": torch.zeros(2)}, file)
    assert "keys are a.b" in text(faults_of(name, **given))
    file.write_bytes(b"\x00" * 100)
    assert str(file) in text(faults_of(name, **given))


def test_a_folder_without_weights_or_sizes(name: str, tiny: Tiny, copy: Path) -> None:
    place = copy / tiny.family.folder(tiny.family.denoiser)
    next(place.glob("*.safetensors")).unlink()
    assert f"{place} has no " in text(faults_of(name, pretrained=str(copy)))
    (place / "config.json").unlink()
    assert "config.json" in text(faults_of(name, pretrained=str(copy)))


def test_vocabularies_that_are_not_there_or_do_not_fit(name: str, tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    for number, each in enumerate(tiny.family.texts, start=1):
        (tmp_path / str(number)).mkdir()
        faults = faults_of(name, pretrained=str(folder), **{f"tokenizer{number}": str(tmp_path / str(number))})
        assert [fault.where for fault in faults] == [option(f"model.tokenizer{number}")]
        assert each.tokenizer in faults[0].remedy


def llm_of(tiny: Tiny) -> int:
    for number, each in enumerate(tiny.family.texts, start=1):
        if each.kind == "llm":
            return number
    pytest.skip("it reads with no language model")


def test_a_language_model_without_tokenizer_json(name: str, tiny: Tiny, copy: Path) -> None:
    number = llm_of(tiny)
    (copy / tiny.family.texts[number - 1].tokenizer / "tokenizer.json").unlink()
    (fault,) = faults_of(name, pretrained=str(copy))
    assert "tokenizer.json" in fault.what and fault.where == option(f"model.tokenizer{number}")


def test_a_vocabulary_without_the_marks_of_the_template(name: str, tiny: Tiny, copy: Path) -> None:
    number = llm_of(tiny)
    if not any(mark.startswith("<|") for mark in marks_of(tiny.family.texts[number - 1].template)):
        pytest.skip("its template has no marks that a vocabulary must know")
    file = copy / tiny.family.texts[number - 1].tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    mark = next(iter(marks_of(tiny.family.texts[number - 1].template)))
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] != mark]
    for place, each in enumerate(content["added_tokens"]):
        each["id"] = 256 + place
    file.write_text(json.dumps(content))
    (fault,) = faults_of(name, pretrained=str(copy))
    assert mark in fault.what and "template" in fault.what


def test_sizes_that_make_no_model(name: str, tiny: Tiny, tmp_path: Path) -> None:
    part = tiny.family.folder(tiny.family.denoiser)
    whole = tiny.parts.config

    def faults(content: dict[str, Any]) -> str:
        file = tmp_path / "sizes.json"
        file.write_text(json.dumps(content))
        return text(faults_of(name, init_from_config=str(file)))

    assert "unknown key 'colour'" in faults({**whole, part: {**whole[part], "colour": 1}})
    assert "unknown section 'audio'" in faults({**whole, "audio": {}})
    assert f"no section {part!r}" in faults({key: value for key, value in whole.items() if key != part})
    assert "one of: adaln_zero, fan_in" in faults({**whole, "init": "zeros"})
    depth = next(key for key in whole[part] if re.search(r"(^|_)layers(_|$)", key))
    said = faults({**whole, part: {**whole[part], depth: "many"}})
    assert f"sizes of {part} " in said or depth in said
    file = tmp_path / "sizes.json"
    file.write_text("not JSON")
    assert "is not JSON" in text(faults_of(name, init_from_config=str(file)))


def test_a_pattern_that_finds_nothing(name: str) -> None:
    if "model.train_only" not in FAMILIES[name].takes:
        pytest.skip("the family trains all of its denoiser")
    (fault,) = faults_of(name, train_only=("no_such_layer", "."))
    assert "no_such_layer" in fault.what and fault.where == "[model] train_only"


def test_a_folder_without_a_tokenizer_whose_encoder_is_small_is_read_with_ours_and_it_is_said(
    name: str, tiny: Tiny, copy: Path
) -> None:
    each = tiny.family.texts[-1]
    shutil.rmtree(copy / each.tokenizer)
    found = loaded(config(name, pretrained=str(copy))).parts.notes
    assert any(note.startswith(f"{each.tokenizer}: ") and each.part in note for note in found), found
    assert not any(note.startswith(f"{each.tokenizer}: ") for note in loaded(config(name)).parts.notes)


def test_a_rate_of_zero_trains_nothing(name: str) -> None:
    with pytest.raises(ConfigFault, match=r"--learning_rate: is 0 "):
        loaded(config(name, {"optimizer": {"learning_rate": 0.0}}))


def test_a_layout_that_it_has_not(name: str, tiny: Tiny, tmp_path: Path) -> None:
    if "ckpt" in FAMILIES[name].layouts:
        pytest.skip("it has every layout")
    with pytest.raises(ConfigFault, match="ckpt"):
        exported(tiny, tmp_path / "one", "ckpt")
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert made(config(name)).row is FAMILIES[name]
