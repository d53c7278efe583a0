"""Adapters of every family train the same with each way to save memory: recomputed blocks, all or some, on the host, updates on the way."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from families import batch_of, bucket_of, config, made
from family_engines import assembled, equal, weights
from refusals import is_about

from difftrain.contracts import ConfigFault
from difftrain.distributed.ranks import Ranks
from difftrain.models import passes

IN_CI = ("flux", "sdxl")
NAMES = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.nightly) for name in families.ON_KIT]
AGAIN = {"gradient_checkpointing": True}
WAYS: dict[str, dict[str, Any]] = {
    "all": {"training": AGAIN},
    "some": {"training": AGAIN | {"checkpoint_blocks": 2}},
    "on the host": {"training": AGAIN | {"cpu_offload_checkpointing": True}},
    "released": {"optimizer": {"fused_backward": True}},
    "all, released": {"training": AGAIN, "optimizer": {"fused_backward": True}},
}


def engine_of(name: str, sections: dict[str, Any]) -> Any:
    base: dict[str, dict[str, Any]] = {
        "adapter": {"type": "lora", "rank": 2},
        "training": {"max_grad_norm": 0.0},  # released ones are clipped one by one
        "optimizer": {"learning_rate": 1e-3},
    }
    cfg = config(name, {key: base.get(key, {}) | sections.get(key, {}) for key in base.keys() | sections.keys()})
    family = made(cfg)
    parts = family.load()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # blocks that begin as the identity would hide what is done to them
        for module in parts.root.modules():
            if isinstance(module, torch.nn.Linear) and not module.weight.requires_grad:
                module.weight.copy_(0.05 * torch.randn(module.weight.shape, generator=generator))
    return assembled(cfg, Ranks(), family, parts, [batch_of(family, bucket_of(name), parts=parts)])


def trained(engine: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for step in range(2):
        batch = batch_of(engine.family, bucket_of(engine.family.name), seed=step, parts=engine.parts)
        losses.append(float(engine.step([batch], {"samples": float(len(batch.record_id))}).sums["loss"]))
    return losses, weights(engine)


@pytest.mark.parametrize("name", NAMES)
def test_every_saver_trains_adapters_to_the_same_bits(name: str) -> None:
    losses, plain = trained(engine_of(name, {}))
    for way, sections in WAYS.items():
        engine = engine_of(name, sections)
        assert trained(engine)[0] == losses and equal(weights(engine), plain), way


def test_some_blocks_are_computed_again_and_the_others_are_not() -> None:
    engine = engine_of("flux", WAYS["some"])
    blocks = [block for _, block in engine.family.units(engine.parts)]
    calls = dict.fromkeys(range(len(blocks)), 0)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: calls.update({number: calls[number] + 1}))
    trained(engine)
    keeps = [getattr(block, passes.KEEPS, False) for block in blocks]
    assert sorted(calls.values()) == [2] * (len(blocks) - 2) + [4] * 2  # of two steps
    assert [calls[number] == 2 for number in calls] == keeps


def test_more_blocks_to_compute_again_than_there_are_is_a_fault() -> None:
    with pytest.raises(ConfigFault) as caught:
        made(config("flux", {"training": AGAIN | {"checkpoint_blocks": 99}})).load(meta=True)
    [fault] = caught.value.faults
    assert is_about(fault, "[training] checkpoint_blocks", 99)
