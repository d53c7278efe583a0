"""Fingerprints of weights: equal for equal weights wherever they lie, another for any other, and read once."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sdxl import config, loaded

from difftrain.contracts import ConfigFault, Encoder
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.weights import fingerprints

PARTS = ("latents", "text_encoder_1", "text_encoder_2")


SETTLED_S = 0.05  # many times what file systems here tell apart


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a cache folder of its own."""
    monkeypatch.setattr(fingerprints, "_SETTLED_NS", int(SETTLED_S * 1e9))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "difftrain" / fingerprints.FOLDER


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in every layout, old enough for its hashes to be kept."""
    folder = tmp_path_factory.mktemp("stored")
    family, parts = loaded(config())
    for layout in ("safetensors", "ckpt", "diffusers", "diffusers_safetensors"):
        family.export([], parts, layout, folder / f"as_{layout}")
    time.sleep(2 * SETTLED_S)
    return folder


def encoders(cfg: Any = None, **model: Any) -> dict[str, Encoder]:
    family = SDXLFamily(cfg or config(**model))
    return family.encoders(family.load(deferred=("vae", "text_encoder_1", "text_encoder_2")))


def prints(cfg: Any = None, **model: Any) -> dict[str, str]:
    return {name: each.fingerprint() for name, each in encoders(cfg, **model).items()}


def test_each_encoder_stands_alone() -> None:
    found = encoders()
    assert tuple(found) == PARTS
    assert [each.modules for each in found.values()] == [("vae",), ("text_encoder_1",), ("text_encoder_2",)]
    assert [set(each.features) for each in found.values()] == [{"moments"}, {"hidden_1"}, {"hidden_2", "pooled"}]
    assert found["text_encoder_2"].inputs == ("input_ids_2", "token_weights_2")
    one_trained = config({"optimizer": {"learning_rate_te2": 0.0}}, train_text_encoder=True)
    assert set(encoders(one_trained)) == {"latents", "text_encoder_2"}


@pytest.mark.parametrize(
    "name", ["as_safetensors.safetensors", "as_ckpt.ckpt", "as_diffusers", "as_diffusers_safetensors"]
)
def test_equal_weights_have_equal_fingerprints_in_every_layout(stored: Path, name: str) -> None:
    wanted = prints(pretrained=str(stored / "as_diffusers_safetensors"))
    found = prints(pretrained=str(stored / name))
    assert found == wanted
    assert found["latents"] == prints()["latents"]  # the VAE that comes with the tiny size, too


def test_a_vae_of_its_own_place_counts_alone(stored: Path) -> None:
    plain = prints()
    same = prints(vae=str(stored / "as_diffusers_safetensors"))
    inside = prints(vae=str(stored / "as_safetensors.safetensors"))
    assert plain == same == inside


def test_a_random_model_is_told_by_its_seed_and_sizes(tmp_path: Path) -> None:
    first, again, other = prints(), prints(), prints(config({"training": {"seed": 2}}))
    assert first == again and first["latents"] == other["latents"]  # the tiny VAE is shipped
    assert all(first[name] != other[name] for name in PARTS[1:])
    assert len(set(first.values())) == 3


@pytest.mark.parametrize(
    ("sections", "model", "changed"),
    [
        ({"training": {"seed": 1, "mixed_precision": "bf16"}}, {}, {"text_encoder_1", "text_encoder_2"}),
        ({"training": {"seed": 1, "mixed_precision": "bf16"}}, {"vae_fp32": False}, set(PARTS)),
        ({}, {"clip_skip": 1}, {"text_encoder_1", "text_encoder_2"}),
        ({}, {"max_token_length": 150}, {"text_encoder_1", "text_encoder_2"}),
        ({}, {"fp8_frozen": "all"}, {"text_encoder_1", "text_encoder_2"}),
        ({}, {"vae_batch_size": 2}, set()),
        ({"cache": {"latents_as": "mean"}}, {}, {"latents"}),
        ({"cache": {"latents_as": "sample"}}, {}, {"latents"}),
    ],
)
def test_what_decides_the_outcome_is_in_it(sections: Any, model: Any, changed: set[str]) -> None:
    before, after = prints(), prints(config(sections, **model))
    assert {name for name in PARTS if before[name] != after[name]} == changed


@pytest.mark.parametrize(
    ("section", "sizes", "changed"),
    [
        ("vae", {"act_fn": "silu", "use_quant_conv": True}, set()),  # as its class has it
        ("vae", {"scaling_factor": 0.7, "sample_size": 512}, set()),
        ("vae", {"act_fn": "relu"}, {"latents"}),
        ("text_encoder", {"attention_dropout": 0.1, "bos_token_id": 0}, set()),
        ("text_encoder_2", {"hidden_act": "quick_gelu"}, {"text_encoder_2"}),
        ("text_encoder_2", {"layer_norm_eps": 1e-6}, {"text_encoder_2"}),
    ],
)
def test_sizes_count_where_they_decide(
    stored: Path, tmp_path: Path, section: str, sizes: dict[str, Any], changed: set[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(stored / "as_diffusers_safetensors", folder)
    before, file = prints(pretrained=str(folder)), folder / section / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    after = prints(pretrained=str(folder))
    assert {name for name in PARTS if before[name] != after[name]} == changed


def with_another_bit(file: Path, key: str) -> bytes:
    """Return a file of weights in which the first number of a tensor differs in its last bit."""
    content = bytearray(file.read_bytes())
    if file.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        content[8 + length + json.loads(content[8 : 8 + length])[key]["data_offsets"][0]] ^= 1
    else:
        number = torch.load(file, weights_only=True)[key].numpy().tobytes()
        content[content.index(number)] ^= 1
    return bytes(content)


FOLDER, INSIDE = "vae/diffusion_pytorch_model.safetensors", "first_stage_model.encoder.conv_in.weight"


@pytest.mark.parametrize("way", ["written over", "moved in place"])
@pytest.mark.parametrize(
    ("flag", "name", "file", "key"),
    [
        ("pretrained", "as_diffusers_safetensors", FOLDER, "encoder.conv_in.weight"),
        ("pretrained", "as_safetensors.safetensors", "", INSIDE),
        ("pretrained", "as_ckpt.ckpt", "", INSIDE),
        ("vae", "as_diffusers_safetensors", FOLDER, "encoder.conv_in.weight"),
        ("vae", "as_safetensors.safetensors", "", INSIDE),
    ],
)
def test_other_weights_of_the_same_size_and_date_are_noticed(
    stored: Path, tmp_path: Path, flag: str, name: str, file: str, key: str, way: str
) -> None:
    here = tmp_path / name
    (shutil.copytree if file else shutil.copy)(stored / name, here)
    weights = here / file if file else here
    time.sleep(2 * SETTLED_S)
    before, told, other = prints(**{flag: str(here)}), weights.stat(), with_another_bit(weights, key)
    assert prints(**{flag: str(here)}) == before
    if way == "written over":
        weights.write_bytes(other)
    else:
        (tmp_path / "other").write_bytes(other)
        (tmp_path / "other").replace(weights)
    os.utime(weights, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (told.st_size, told.st_mtime_ns)
    after = prints(**{flag: str(here)})
    assert {each for each in PARTS if before[each] != after[each]} == {"latents"}


def test_later_starts_read_no_weights(stored: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    read: list[int] = []
    inner = fingerprints.of_tensors

    def counted(named: Any) -> str:
        read.append(1)
        return inner(named)

    monkeypatch.setattr("difftrain.models.weights.part_files.of_tensors", counted)
    for name in ("as_diffusers_safetensors", "as_safetensors.safetensors"):
        first = prints(pretrained=str(stored / name))
        assert len(read) == 3
        read.clear()
        assert prints(pretrained=str(stored / name)) == first and not read
    assert len(list(own_cache.glob("*.txt"))) == 6


def test_damaged_notes_and_a_folder_that_takes_none_cost_only_time(stored: Path, own_cache: Path) -> None:
    model = {"pretrained": str(stored / "as_diffusers_safetensors")}
    first = prints(**model)
    for file in own_cache.glob("*.txt"):
        file.write_text(file.read_text()[:-1])
    assert prints(**model) == first
    shutil.rmtree(own_cache)
    own_cache.parent.mkdir(exist_ok=True)
    own_cache.write_text("a file where the folder would be")
    assert prints(**model) == first


def test_what_was_written_a_moment_ago_is_not_taken_for_settled(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"1")
    assert fingerprints.of_files([file], "all", lambda: "a") == "a"
    assert fingerprints.of_files([file], "all", lambda: "b") == "b" and not own_cache.exists()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"1")

    def changing() -> str:
        file.write_bytes(file.read_bytes() + b"1")
        return "never"

    with pytest.raises(ConfigFault, match="weights: changed "):
        fingerprints.of_files([file], "all", changing)
    with pytest.raises(ConfigFault, match=": changed "):
        fingerprints.of_files([file], "all", lambda: "a", since=[[0, 0, 0, 0]])
