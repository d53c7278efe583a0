"""Deferred frozen parts: not built, not looked at, and once loaded as if they had been from the start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from loaded_part import same
from sd3 import config, loaded

from difftrain.cache.build import deferred_parts
from difftrain.contracts import EVERY, ConfigFault
from difftrain.device import choose, quantised
from difftrain.device.attention_modules import JointAttention
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.placeholder import MetaPlaceholder
from difftrain.models.weights import source
from difftrain.train.check import check
from difftrain.train.finalize import parameter_counts
from difftrain.train.run import attend

FROZEN = ("vae", "text_encoder_1", "text_encoder_2", "text_encoder_3")
CACHED = {"cache": {"latents_to_disk": True, "text_to_disk": True}}
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"training": {"seed": 1, "mixed_precision": "bf16"}}, {"fp8_frozen": "all"}),
    ({"training": {"seed": 1, "mixed_precision": "fp16"}}, {"vae_fp32": False}),
]

# of caches that version 0.5 wrote: they are read as long as these stay
PLAIN_0_5 = {
    "latents": "a1b7391847b98c4c9528652fbae99a02",
    "text_encoder_1": "cdef4c8bec3dcaa2192a7e9411e9d3c5",
    "text_encoder_2": "1f0ae965402e2e4c9bd032de801f85d8",
    "text_encoder_3": "d1d08efb3050b9ab8fc22823b20703da",
}
MASKED_0_5 = {
    "latents": "a1b7391847b98c4c9528652fbae99a02",
    "text_encoder_1": "7dd829e3beaf72c183a4c28695be65eb",
    "text_encoder_2": "0616b9ce8ed1a8405a63012fef96bce3",
    "text_encoder_3": "ba16325b399b9381448a1169b80bb125",
}


@pytest.fixture(autouse=True)
def small_layers_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 8 bits be for the tiny model's layers too."""
    monkeypatch.setattr(quantised, "FEWEST_INPUTS", 16)


@pytest.mark.parametrize(("sections", "model"), WAYS)
def test_a_part_that_was_woken_is_the_one_that_was_loaded(sections: Any, model: Any) -> None:
    cfg = config(sections, **model)
    _, wanted = loaded(cfg)
    parts = SD3Family(cfg).load(deferred=FROZEN)
    assert all(isinstance(parts.frozen[name], MetaPlaceholder) and not parts.is_loaded(name) for name in FROZEN)
    for _ in range(2):
        for name in FROZEN:
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
    parts = SD3Family(config()).load(deferred=("transformer", "vae"))
    assert set(parts.deferred) == {"vae"} and parts.is_loaded("text_encoder_3")
    assert not any(each.is_meta for each in parts.root.parameters())
    bare = SD3Family(config()).load(meta=True, deferred=EVERY)
    assert set(bare.deferred) == set(FROZEN)
    bare.load("vae")
    bare.load("text_encoder_1")
    assert bare.is_loaded("vae") and bare.is_loaded("text_encoder_1") and not bare.is_loaded("text_encoder_2")
    assert all(each.is_meta for each in bare.root.parameters())


def test_a_run_that_caches_builds_none_of_what_the_cache_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is checked at the start, nor the parts, nor the encoders' fingerprints, nor counts need a module."""
    built: list[str] = []
    build = source.build
    monkeypatch.setattr(source, "build", lambda kind, part, sizes: built.append(part) or build(kind, part, sizes))
    cfg = config(CACHED)
    family = SD3Family(cfg)
    check(cfg, family, full=False)
    assert deferred_parts(cfg, family) == set(FROZEN)
    parts = family.load(deferred=deferred_parts(cfg, family))
    described = family.encoders(parts)
    assert {name: each.modules for name, each in described.items()} == {
        "latents": ("vae",), **{f"text_encoder_{i}": (f"text_encoder_{i}",) for i in (1, 2, 3)}
    }  # fmt: skip
    prints = {name: each.fingerprint() for name, each in described.items()}
    counts = parameter_counts(parts)
    assert set(built) == {"transformer"}
    family, whole = loaded(cfg)
    assert {name: each.fingerprint() for name, each in family.encoders(whole).items()} == prints
    assert counts == parameter_counts(whole)
    assert deferred_parts(config({"cache": {"text_to_disk": True}}), family) == set(FROZEN) - {"vae"}
    assert deferred_parts(config(), family) == set()
    built.clear()
    check(cfg, family)
    assert set(built) == {"transformer", *FROZEN}


def test_attention_is_given_to_what_is_built_later() -> None:
    cfg = config()
    parts = SD3Family(cfg).load(deferred=FROZEN)
    attend(cfg, choose("cpu"), parts)
    assert isinstance(parts.root.transformer.transformer_blocks[0].attn.processor, JointAttention)
    parts.load("vae")
    (middle,) = parts.frozen["vae"].encoder.mid_block.attentions
    assert type(middle.processor).__module__.startswith("difftrain.")


def test_weights_that_do_not_fit_are_named_when_they_are_needed(tmp_path: Path) -> None:
    family, parts = loaded(config())
    folder = family.export([], parts, "diffusers_safetensors", tmp_path / "model")
    shutil.rmtree(folder / "text_encoder_3" / "nothing", ignore_errors=True)
    (weights,) = (folder / "text_encoder_3").glob("*.safetensors")
    shutil.copy(next((folder / "text_encoder").glob("*.safetensors")), weights)
    cfg = config(CACHED, pretrained=str(folder), init_from_config=None)
    with pytest.raises(ConfigFault):
        check(cfg, SD3Family(cfg))
    check(cfg, SD3Family(cfg), full=False)
    parts = SD3Family(cfg).load(deferred=FROZEN)
    parts.load("text_encoder_1")
    with pytest.raises(ConfigFault, match="text_encoder_3"):
        parts.load("text_encoder_3")


def test_exports_with_sleeping_parts_are_those_with_loaded_ones(tmp_path: Path) -> None:
    written = []
    for name, lazy in (("loaded", ()), ("lazy", FROZEN)):
        family = SD3Family(config())
        parts = family.load(deferred=lazy)
        weights = ((key, value) for key, value in parts.root.state_dict().items())
        path = family.export(weights, parts, "diffusers_safetensors", tmp_path / name)
        files = sorted(each for each in path.rglob("*") if each.is_file())
        written.append({str(each.relative_to(path)): each.read_bytes() for each in files})
    assert written[0].keys() == written[1].keys()
    assert not [name for name in written[0] if written[0][name] != written[1][name]]


def test_fingerprints_are_those_of_version_0_5() -> None:
    half = {"training": {"seed": 1, "mixed_precision": "bf16"}}
    for cfg, wanted in ((config(), PLAIN_0_5), (config(half, t5_attention_mask=True), MASKED_0_5)):
        family = SD3Family(cfg)
        described = family.encoders(family.load(deferred=FROZEN))
        assert {name: each.fingerprint() for name, each in described.items()} == wanted
        assert described["text_encoder_3"].inputs == ("input_ids_3", "t5_mask")
