"""Deferred frozen parts: nothing of them is loaded, and everything that needs them is as if they had been."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_part import same
from sdxl import config, loaded, sizes

from difftrain.cache.build import deferred_parts
from difftrain.contracts import ConfigFault, Parts
from difftrain.device import host, quantised
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.placeholder import MetaPlaceholder
from difftrain.models.weights import fingerprints
from difftrain.models.weights.source import WeightSource
from difftrain.sampling.draw import draw_pictures
from difftrain.sampling.prompts import Prompt
from difftrain.train.check import check
from difftrain.train.finalize import parameter_counts

FROZEN = ("vae", "text_encoder_1", "text_encoder_2")
LAYOUTS = ["safetensors", "ckpt", "diffusers", "diffusers_safetensors"]
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"training": {"seed": 1, "mixed_precision": "bf16"}}, {"fp8_frozen": "all"}),
    ({"training": {"seed": 1, "mixed_precision": "fp16"}}, {"vae_fp32": False}),
]


@pytest.fixture(autouse=True)
def small_layers_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 8 bits be for the tiny model's layers too."""
    monkeypatch.setattr(quantised, "FEWEST_INPUTS", 16)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a diffusers folder and as one file."""
    folder = tmp_path_factory.mktemp("stored")
    family, parts = loaded(config())
    for layout in ("safetensors", "diffusers_safetensors"):
        family.export([], parts, layout, folder / f"as_{layout}")
    return folder


def deferred(cfg: Any, names: tuple[str, ...] = FROZEN) -> tuple[SDXLFamily, Parts]:
    family = SDXLFamily(cfg)
    return family, family.load(deferred=names)


@pytest.mark.parametrize(("sections", "model"), WAYS)
def test_a_part_that_was_woken_is_the_one_that_was_loaded(sections: Any, model: Any) -> None:
    cfg = config(sections, **model)
    _, wanted = loaded(cfg)
    _, parts = deferred(cfg)
    assert set(parts.deferred) == set(FROZEN) and not any(map(parts.is_loaded, FROZEN))
    assert all(isinstance(parts.frozen[name], MetaPlaceholder) for name in FROZEN)
    in_8_bits = [note for note in parts.notes if note.startswith("in 8 bits, ") and FROZEN[1] in note]
    told = FROZEN[1:] if "fp8_frozen" in model else []
    assert len(in_8_bits) == (1 if told else 0) and all(f"{name} where it " in in_8_bits[0] for name in told)
    assert parts.notes[len(told) // 2 :] == wanted.notes[len(told) // 2 :]
    for _ in range(2):
        for name in FROZEN:
            assert all(each.is_meta for each in parts.frozen[name].parameters())
            parts.load(name)
            assert same(parts, wanted, name)
            assert not any(each.requires_grad for each in parts.frozen[name].parameters())
            assert not any(module.training for module in parts.frozen[name].modules())
            held = list(quantised.stored_names(wanted.frozen[name]))
            assert list(quantised.stored_names(parts.frozen[name])) == held
            assert bool(held) == ("fp8_frozen" in model and name != "vae")
            parts.offload(name)
    assert not any(map(parts.is_loaded, FROZEN))


def test_only_frozen_parts_that_are_named_sleep() -> None:
    cfg = config({"optimizer": {"learning_rate_te2": 0.0}}, train_text_encoder=True)
    _, parts = deferred(cfg, ("unet", *FROZEN))
    assert set(parts.deferred) == {"vae", "text_encoder_2"}
    assert not any(each.is_meta for each in parts.root.parameters())
    _, one = deferred(config(), ("vae",))
    assert set(one.deferred) == {"vae"} and one.is_loaded("text_encoder_1")
    bare = SDXLFamily(config()).load(meta=True, deferred=("vae",))
    bare.load("vae")
    bare.load("text_encoder_1")
    assert bare.is_loaded("vae") and not bare.is_loaded("text_encoder_1")
    assert all(each.is_meta for each in bare.root.parameters())
    one.offload("text_encoder_1")
    assert one.is_loaded("text_encoder_1")


def test_the_root_may_wait_until_the_caches_are_built() -> None:
    """Trained encoders with it: what is frozen stays so, and the weights are those of the start."""
    cfg = config(train_text_encoder=True)
    _, parts = deferred(cfg, ("root", "vae"))
    assert all(each.is_meta for each in parts.root.parameters())
    parts.fill_root()
    wanted = loaded(cfg)[1]
    assert parts.notes == wanted.notes and not any(each.is_meta for each in parts.root.parameters())
    for (name, ours), (other, theirs) in zip(
        parts.root.named_parameters(), wanted.root.named_parameters(), strict=True
    ):
        assert name == other and ours.equal(theirs) and ours.requires_grad == theirs.requires_grad


@pytest.mark.parametrize(
    ("sections", "model", "layout"), [*((*WAYS[0], layout) for layout in LAYOUTS), (*WAYS[1], LAYOUTS[0])]
)
def test_exports_with_sleeping_parts_are_those_with_loaded_ones(
    sections: Any, model: Any, layout: str, tmp_path: Path
) -> None:
    cfg = config(sections, **model)
    written = []
    for name, (family, parts) in (("loaded", loaded(cfg)), ("lazy", deferred(cfg))):
        weights = ((key, value) for key, value in parts.root.state_dict().items())
        path = family.export(weights, parts, layout, tmp_path / name)
        files = sorted(each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file())
        written.append({str(each.relative_to(path)): content(each) for each in files})
        assert name == "loaded" or not any(map(parts.is_loaded, FROZEN))
    assert written[0] == written[1]


def content(file: Path) -> Any:
    if file.suffix in (".ckpt", ".bin"):  # zip files hold times
        held = torch.load(file, weights_only=True)
        return fingerprints.of_tensors(held.get("state_dict", held).items())
    return file.read_bytes()


def test_pictures_of_woken_parts_are_those_of_loaded_ones(stored: Path) -> None:
    cfg = config(pretrained=str(stored / "as_safetensors.safetensors"))
    drawn = []
    for family, parts in (loaded(cfg), deferred(cfg)):
        for name in FROZEN:
            parts.load(name)
        prompts = [Prompt("a red star", width=64, height=64, sample_steps=2)]
        (picture,) = draw_pictures(family.drawer(parts), prompts, sampler="ddim", seed=1)
        drawn.append(picture.image.tobytes())
        for name in FROZEN:
            parts.offload(name)
    assert drawn[0] == drawn[1] and not any(map(parts.is_loaded, FROZEN))


@pytest.mark.parametrize("name", ["as_diffusers_safetensors", "as_safetensors.safetensors", "tiny"])
def test_with_known_files_no_weight_of_a_sleeping_part_is_read(
    stored: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Loading, what a start asks of the parts, and the fingerprints: all from headers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fingerprints, "_SETTLED_NS", 0)
    time.sleep(0.05)
    model = {} if name == "tiny" else {"pretrained": str(stored / name)}
    first = {each: one.fingerprint() for each, one in encoders(**model).items()}
    asked: list[str] = []
    family = SDXLFamily(config(**model))
    kind = type(family.source)
    weights = kind.weights
    monkeypatch.setattr(kind, "weights", lambda self, part, module: asked.append(part) or weights(self, part, module))
    parts = family.load(deferred=FROZEN)
    assert asked == ["unet"]
    found = family.encoders(parts)
    assert {each: one.fingerprint() for each, one in found.items()} == first
    assert found["text_encoder_2"].features["pooled"].channels == sizes()["text_encoder_2"]["projection_dim"]
    assert asked == ["unet"]


@pytest.mark.parametrize("name", ["tiny", "as_safetensors.safetensors"])
def test_a_run_that_caches_builds_none_of_what_the_cache_saves(
    stored: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither what is checked at the start, nor the parts, nor fingerprints of known files, nor counts need a module."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fingerprints, "_SETTLED_NS", 0)
    time.sleep(0.05)
    model = {} if name == "tiny" else {"pretrained": str(stored / name)}
    cfg = config({"cache": {"latents_to_disk": True, "text_to_disk": True}}, **model)
    family, whole = loaded(cfg)
    prints = {each: one.fingerprint() for each, one in family.encoders(whole).items()}
    built: list[str] = []
    build = WeightSource.build
    monkeypatch.setattr(WeightSource, "build", lambda self, part: built.append(part) or build(self, part))
    family = SDXLFamily(cfg)
    check(cfg, family, full=False)
    parts = family.load(deferred=deferred_parts(cfg, family))
    assert {each: one.fingerprint() for each, one in family.encoders(parts).items()} == prints
    assert parameter_counts(parts) == parameter_counts(whole)
    assert set(built) == {"unet"} and not any(map(parts.is_loaded, FROZEN))
    built.clear()
    check(cfg, family)
    assert set(built) == {"unet", *FROZEN}


def test_encoders_that_are_trained_never_sleep() -> None:
    cfg = config({"cache": {"latents_to_disk": True}}, train_text_encoder=True)
    family = SDXLFamily(cfg)
    parts = family.load(deferred=deferred_parts(cfg, family))
    assert (
        set(parts.deferred) == {"vae"}
        and {"text_encoder_1", "text_encoder_2"} <= dict(parts.root.named_children()).keys()
    )
    assert not any(each.is_meta for each in parts.root.parameters())


@pytest.mark.parametrize("sleeping", [False, True])
def test_weights_that_do_not_fit_are_named(stored: Path, tmp_path: Path, sleeping: bool) -> None:
    """At the start; of a deferred part where the cache asks what it is, or where it is loaded."""
    folder = shutil.copytree(stored / "as_diffusers_safetensors", tmp_path / "model")
    (weights,) = (folder / "text_encoder_2").glob("*.safetensors")
    shutil.copy(next((folder / "text_encoder").glob("*.safetensors")), weights)
    family = SDXLFamily(config(pretrained=str(folder)))
    if not sleeping:
        with pytest.raises(ConfigFault, match="text_encoder_2 looks like"):
            family.load()
        return
    parts = family.load(deferred=FROZEN)
    described = family.encoders(parts)
    assert described["text_encoder_1"].fingerprint()
    parts.load("text_encoder_1")
    for action in (described["text_encoder_2"].fingerprint, lambda: parts.load("text_encoder_2")):
        with pytest.raises(ConfigFault, match="text_encoder_2 looks like"):
            action()


def encoders(**model: Any) -> dict[str, Any]:
    family, parts = deferred(config(**model))
    return family.encoders(parts)


def resident() -> int:
    """Return this process's own memory, files that it maps aside."""
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(told["RssAnon"].split()[0]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_sleeping_parts_take_no_memory_and_give_back_what_they_took(tmp_path: Path) -> None:
    """Text encoders of 80 MiB beside a tiny UNet: whatever else the process takes meanwhile is far less than one."""
    wide = sizes()
    for encoder in ("text_encoder", "text_encoder_2"):
        wide[encoder] = wide[encoder] | {"intermediate_size": 1 << 17, "num_hidden_layers": 3}
    (tmp_path / "wide.json").write_text(json.dumps(wide))
    cfg = config(init_from_config=str(tmp_path / "wide.json"))
    family, parts = deferred(cfg)  # what loading takes at its first time is not the parts'
    large = sum(each.nbytes for each in parts.frozen["text_encoder_2"].state_dict().values())
    assert large > 80e6
    host.give_back()  # else waking takes what others have left
    before = resident()
    family, parts = deferred(cfg)
    encoder = family.encoders(parts)["text_encoder_2"]
    encoder.fingerprint()
    assert resident() - before < 0.4 * large
    parts.load("text_encoder_2")
    assert resident() - before > 0.8 * large
    parts.offload("text_encoder_2")
    host.give_back()
    assert resident() - before < 0.4 * large


def test_a_file_that_is_gone_is_named_when_it_is_needed(stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored / "as_diffusers_safetensors", tmp_path / "model")
    shutil.copy(stored / "as_safetensors.safetensors", tmp_path)
    file = tmp_path / "as_safetensors.safetensors"
    for path in (tmp_path / "model", file):
        _, parts = deferred(config(pretrained=str(path)), ("vae",))
        if path == file:  # it was opened at the start, and what was opened stays
            file.unlink()
            parts.load("vae")
            assert same(parts, loaded(config())[1], "vae")
            continue
        shutil.rmtree(path / "vae")
        with pytest.raises(ConfigFault, match=r"vae has .*weights"):
            parts.load("vae")
