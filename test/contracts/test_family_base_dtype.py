"""An adapter, or a part of every family, is trained over weights in few bits: losses are near, and a resume has the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import batch_of, bucket_of, config, made
from family_engines import commit, engine_of_drawn, equal, weights

from difftrain.device import quantised
from difftrain.models.registry import FAMILIES

KINDS = ("bf16", "fp8", "int8", "nf4")
NEAR = {"bf16": 1e-3, "fp8": 2e-2, "int8": 5e-3, "nf4": 6e-2}
HELD = [name for name in families.ON_KIT if "model.train_only" in FAMILIES[name].takes]
ALWAYS = {("flux", "part", "nf4"), ("flux", "lora", "fp8"), ("sdxl", "lora", "nf4")}
WAYS = [
    pytest.param(*way, marks=() if way in ALWAYS else pytest.mark.nightly)
    for name in families.ON_KIT
    for kind in KINDS
    for way in ((name, "part", kind), (name, "lora", kind))
    if way[1] == "lora" or name in HELD
]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A UNet of the size tiny looks at few numbers everywhere."""
    monkeypatch.setattr(quantised, "FEWEST_INPUTS", 16)


def last_block(name: str) -> str:
    """Return a pattern of the last block's names."""
    tiny = made(config(name))
    return (
        rf"^{re.escape(tiny.blocks[-1])}\.{len(tiny.source.build(tiny.denoiser).get_submodule(tiny.blocks[-1])) - 1}\."
    )


def engine_of(name: str, what: str, kind: str | None) -> Any:
    """Build an engine that trains the last block alone, or an adapter in every block."""
    sections: dict[str, Any] = {"optimizer": {"learning_rate": 1e-3}}
    if what == "lora":
        cfg = config(name, sections | {"adapter": {"type": "lora", "rank": 2}}, base_dtype=kind)
    else:
        cfg = config(name, sections, base_dtype=kind, train_only=(last_block(name),))
    return engine_of_drawn(cfg)


def losses(engine: Any, first: int, last: int) -> list[float]:
    made = []
    for step in range(first, last):
        batch = batch_of(engine.family, bucket_of(engine.family.name), seed=step, parts=engine.parts)
        made.append(float(engine.step([batch], {"samples": float(len(batch.record_id))}).sums["loss"]))
    return made


@pytest.mark.parametrize(("name", "what", "kind"), WAYS)
def test_a_resume_over_few_bits_is_exact_and_the_loss_is_near(name: str, what: str, kind: str, tmp_path: Path) -> None:
    straight = engine_of(name, what, kind)
    layers = list(quantised.layers_of(straight.parts.root))
    assert layers and all(layer.kind == kind for layer in layers)
    before, start = [layer.weight.clone() for layer in layers], weights(straight)
    first = losses(straight, 0, 2)
    path = commit(straight, tmp_path, "two")
    rest = losses(straight, 2, 4)
    assert all(torch.equal(a, layer.weight) for a, layer in zip(before, layers))
    assert set(start).isdisjoint(straight.parts.base) and not equal(start, weights(straight))

    resumed = engine_of(name, what, kind)
    resumed.restore(path)
    assert losses(resumed, 2, 4) == rest and equal(weights(straight), weights(resumed))
    assert first[0] == pytest.approx(losses(engine_of(name, what, None), 0, 1)[0], rel=NEAR[kind])


@pytest.mark.nightly
def test_every_family_has_layers_of_its_blocks_in_few_bits() -> None:
    """Without weights: all linear layers of the blocks but those that are trained."""
    for name in HELD:
        family = made(config(name, base_dtype="nf4", train_only=(last_block(name),)))
        parts = family.load(meta=True)
        net = parts.root.get_submodule(family.denoiser)
        lists = tuple(f"{member}." for member in family.blocks)
        linear = {
            n: layer for n, layer in net.named_modules() if isinstance(layer, torch.nn.Linear) and n.startswith(lists)
        }
        few = {n for n, layer in linear.items() if isinstance(layer, quantised.QuantisedLayer)}
        assert few == {n for n in linear if f"{family.denoiser}.{n}.weight" in parts.base}, name
        assert few and not any(re.search(last_block(name), n + ".") for n in few), name
