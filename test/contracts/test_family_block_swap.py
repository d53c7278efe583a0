"""A run whose blocks wait in host memory has the bits of one whose blocks stay: losses, weights, resumes, exports."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import families
import pytest
from families import batch_of, bucket_of, config, made
from family_engines import commit, engine_of_drawn, equal, weights
from refusals import is_about

from difftrain.contracts import ConfigFault
from difftrain.device import quantised
from difftrain.device.block_swap import most_waiting, movable_bytes, resident
from difftrain.models.registry import FAMILIES
from difftrain.train.check import check

HELD = [name for name in families.ON_KIT if "model.train_only" in FAMILIES[name].takes]
# family, what is trained, base_dtype, whether activations are computed again
ALWAYS = {
    ("flux", "lora", "fp8", True), ("flux", "part", None, False), ("sdxl", "lora", "nf4", False),
    ("lumina_2", "lora", None, False), ("hidream", "lora", "int8", True), ("sdxl", "all", None, False), ("flux", "all", None, True),
}  # fmt: skip
KINDS = (None, "bf16", "fp8", "int8", "nf4")
EVERY = {
    (name, what, kind, (number + (what == "lora")) % 2 == 0)
    for name in families.ON_KIT
    for what in (("lora", "part") if name in HELD else ("lora",))
    for number, kind in enumerate(KINDS)
} | {(name, "all", None, again) for name in families.ON_KIT for again in (False, True)}
WAYS = [
    pytest.param(*way, marks=() if way in ALWAYS else pytest.mark.nightly) for way in sorted(EVERY | ALWAYS, key=str)
]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A UNet of the size tiny looks at few numbers everywhere."""
    monkeypatch.setattr(quantised, "FEWEST_INPUTS", 16)


def settings(name: str, what: str, kind: str | None, waiting: int, *, again: bool = False) -> Any:
    """Describe a run that trains an adapter (lora), a part, or all weights, updated during the backward pass (all)."""
    sections: dict[str, Any] = {
        "optimizer": {"learning_rate": 1e-3, "fused_backward": what == "all"},
        "training": {"gradient_checkpointing": again},
        "memory": {"swap_blocks": waiting},
    }
    model: dict[str, Any] = {} if kind is None else {"base_dtype": kind}
    if what == "lora":
        texts = {"train_text_encoder": True} if "model.train_text_encoder" in FAMILIES[name].takes else {}
        return config(name, sections | {"adapter": {"type": "lora", "rank": 2}}, **model, **texts)
    if what == "all":
        return config(name, sections)
    return config(name, sections, train_only=(r"\.(attn|attn1|self_attn|attention)\.to_q\.",), **model)


def engine_of(name: str, what: str, kind: str | None, waiting: int, *, again: bool = False) -> Any:
    return engine_of_drawn(settings(name, what, kind, waiting, again=again))


def most_of(name: str, what: str) -> int:
    family = made(settings(name, what, None, 0))
    parts = family.load(meta=True)
    trained = what == "all"
    return most_waiting(movable_bytes(family.units(parts), parts.base, trained=trained), trained=trained)


def losses(engine: Any, first: int, last: int) -> list[float]:
    made = []
    for step in range(first, last):
        batch = batch_of(engine.family, bucket_of(engine.family.name), seed=step, parts=engine.parts)
        made.append(float(engine.step([batch], {"samples": float(len(batch.record_id))}).sums["loss"]))
        made.append(float(engine.evaluate([batch])["loss"]))
    return made


@pytest.mark.parametrize(("name", "what", "kind", "again"), WAYS)
def test_blocks_that_wait_change_no_bit(name: str, what: str, kind: str | None, again: bool, tmp_path: Path) -> None:
    waiting = most_of(name, what)
    if waiting < 1:
        pytest.skip("its tiny size has no block to spare")
    plain, swapped = (engine_of(name, what, kind, count, again=again) for count in (0, waiting))
    start = weights(swapped)
    first = losses(swapped, 0, 2)
    path = commit(swapped, tmp_path, "two")
    before = swapped.block_swap.moved_bytes
    rest = losses(swapped, 2, 3)
    assert losses(plain, 0, 3) == first + rest
    assert equal(weights(plain), weights(swapped)) and not equal(start, weights(swapped))

    # that many blocks really have no memory, and others did while they ran
    blocks = swapped.block_swap._blocks
    empty = [all(not tensor.untyped_storage().size() for tensor, _ in block.pairs) for block in blocks]
    assert len(blocks) == waiting + resident(trained=what == "all")
    assert sum(empty) == (len(blocks) if what == "all" else waiting)
    assert swapped.block_swap.moved_bytes > before

    resumed = engine_of(name, what, kind, waiting, again=again)
    resumed.restore(path)
    assert losses(resumed, 2, 3) == rest and equal(weights(plain), weights(resumed))


def test_an_export_has_the_weights_that_wait(tmp_path: Path) -> None:
    files = []
    for waiting in (0, most_of("flux", "part")):
        engine = engine_of("flux", "part", None, waiting)
        losses(engine, 0, 1)
        folder = engine.family.export(
            engine.full_weights(), engine.parts, "diffusers_safetensors", tmp_path / str(waiting)
        )
        files.append((folder / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_copies_are_as_many_as_planned() -> None:
    """From the second step on: two blocks are there already wherever the pass turns round."""
    engine = engine_of("flux", "lora", None, most_of("flux", "lora"))
    batch = batch_of(engine.family, bucket_of("flux"), parts=engine.parts)
    moved = [0]
    for _ in range(3):
        engine.step([batch], {"samples": 2.0})
        moved.append(engine.block_swap.moved_bytes)
    plan = engine.block_swap.plan
    assert [b - a for a, b in pairwise(moved[1:])] == [plan.traffic] * 2
    sizes = movable_bytes(engine.family.units(engine.parts), engine.parts.base)
    assert plan.saved > 0 and plan.host == sum(sizes[number] for number in plan.blocks)


def test_more_blocks_than_there_are_is_a_fault() -> None:
    most = most_of("flux", "lora")
    cfg = settings("flux", "lora", None, most + 1)
    with pytest.raises(ConfigFault) as caught:
        check(cfg, made(cfg))
    [fault] = caught.value.faults
    assert is_about(fault, "[memory] swap_blocks", most + 1, most) or is_about(
        fault, "--blocks_to_swap", most + 1, most
    )
