"""Blocks that wait in host memory, on a device with an allocator and streams: bits, peak memory, and what was planned."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from difftrain.config import TrainConfig
from difftrain.contracts import Bucket
from difftrain.device import choose, use_attention
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.flops import blank_inputs
from difftrain.models.registry import make_family
from difftrain.optim import make_optimizer, make_schedule
from difftrain.train.estimate.footprint import device_memory, swap_of

pytestmark = pytest.mark.usefixtures("clean_memory")

BUCKET, BATCH, WAITING = Bucket(128, 128), 1, 6
# 4 double and 8 single blocks, wide enough that weights are most of the memory and allocators' rounding is none of it
SIZE = {"num_layers": 4, "num_single_layers": 8, "num_attention_heads": 8, "attention_head_dim": 64}


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny: Any = make_family(TrainConfig.model_validate({"model": {"family": "flux", "init_from_config": "tiny"}}))
    made = tiny.architecture()
    made["transformer"] = {**made["transformer"], **SIZE, "axes_dims_rope": [16, 24, 24]}
    path = tmp_path_factory.mktemp("sizes") / "wide.json"
    path.write_text(json.dumps(made, default=list))
    return path


def configured(sizes: Path, waiting: int, *, kind: str | None, again: bool, whole: bool = False) -> TrainConfig:
    """Describe a LoRA, or with whole=True the training of all weights, updated during the backward pass."""
    return TrainConfig.model_validate({
        "model": {"family": "flux", "init_from_config": str(sizes), "t5_max_length": 16, "base_dtype": kind},
        "adapter": {} if whole else {"type": "lora", "rank": 4},
        "training": {"seed": 1, "mixed_precision": "bf16", "gradient_checkpointing": again},
        "memory": {"swap_blocks": waiting},
        "optimizer": {"learning_rate": 1e-3, "fused_backward": whole},
        "cache": {"latents": True, "text": True},
    })  # fmt: skip


def measured(cfg: TrainConfig) -> tuple[list[float], int, int]:
    """Train some steps on the device; return losses, the allocator's peak and what was copied in the last step."""
    device, family = choose("npu"), make_family(cfg)
    gc.collect()  # what an earlier run had
    gc.freeze()
    gc.set_threshold(1, 1, 1)  # references of operators are Python, and leave circles behind
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    engine: Any = make_engine(cfg, device, Ranks())
    parts = family.load(deferred=("root", *family.encoders(family.load(meta=True)), "vae"))
    parts.offloaded |= set(parts.frozen)
    engine.build(
        family, parts, lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=1),
        lambda made: make_schedule(cfg.optimizer, made, 20), [],
    )  # fmt: skip
    use_attention(engine.root, device)
    inputs = blank_inputs(family, BUCKET, "npu:0", BATCH)
    generator = torch.Generator().manual_seed(3)
    inputs.x_t.copy_(torch.randn(inputs.x_t.shape, generator=generator))
    inputs.target.copy_(torch.randn(inputs.target.shape, generator=generator))
    for value in inputs.conditions.values():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator))
    losses, moved, swap = [], 0, engine.block_swap
    fused = cfg.optimizer.fused_backward
    for _ in range(3 if fused else 2):  # the first update makes the optimizer's state
        moved = swap.moved_bytes + swap.returned_bytes if swap else 0
        if not fused:
            engine.optimizer.zero_grad()
        with device.autocast("bf16"):
            outputs = family.forward(engine.root, inputs)
        loss = family.loss_sums(tuple(output.float() for output in outputs), inputs)["loss"]
        if fused:
            engine._update.ready(loss.detach)
        loss.backward()
        if fused:
            engine._update.finish(loss.detach)
            engine._rest()
        else:
            engine.optimizer.step()
        losses.append(float(loss.detach()))
    gc.set_threshold(700, 10, 10)
    gc.unfreeze()
    copied = swap.moved_bytes + swap.returned_bytes - moved if swap else 0
    return losses, torch.npu.max_memory_allocated() - before, copied


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        (None, False),
        ("int8", True),
        pytest.param("int8", False, marks=NIGHTLY),
        pytest.param("nf4", False, marks=NIGHTLY),
    ],
)
def test_the_bits_are_those_without_and_the_peak_goes_down_as_planned(
    sizes: Path, kind: str | None, again: bool
) -> None:
    losses, peaks, plans = [], [], []
    for waiting in (0, WAITING):
        cfg = configured(sizes, waiting, kind=kind, again=again)
        family: Any = make_family(cfg)
        parts = family.load(meta=True)
        parts.offloaded |= set(parts.frozen)
        plan = device_memory(cfg, family, parts, 1, BUCKET, BATCH)
        of_run, peak, copied = measured(cfg)
        losses.append(of_run)
        peaks.append(peak)
        plans.append(plan.total)
        if not again:  # 10 MB of an allocator's rounding are more than a tenth of so small a model without activations
            assert plan.total == pytest.approx(peak, rel=0.10), (plan, peak)
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
    saved = plans[0] - plans[1]
    share = 0.25 if kind != "nf4" else 0.15  # of whose blocks less is left to move
    assert saved > share * plans[0] and peaks[0] - peaks[1] >= 0.9 * saved
    assert copied == swapped_of(cfg).traffic


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.nightly  # its peak hangs on what ran before in the process: run by itself it is the plan
def test_trained_blocks_go_back_behind_their_update(sizes: Path, again: bool) -> None:
    losses, peaks, plans = [], [], []
    for waiting in (0, WAITING):
        cfg = configured(sizes, waiting, kind=None, again=again, whole=True)
        family: Any = make_family(cfg)
        parts = family.load(meta=True)
        parts.offloaded |= set(parts.frozen)
        plan = device_memory(cfg, family, parts, 1, BUCKET, BATCH)
        of_run, peak, copied = measured(cfg)
        losses.append(of_run)
        peaks.append(peak)
        plans.append(plan.total)
        if waiting:  # state of many small tensors is rounded up by the allocator where all of it stays
            assert plan.total == pytest.approx(peak, rel=0.10), (plan, peak)
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
    assert plans[0] - plans[1] > 0.25 * plans[0] and peaks[0] - peaks[1] >= 0.9 * (plans[0] - plans[1])
    swap = swapped_of(cfg)
    small = 3 * 4 * 100  # numbers that are no tensors of several
    assert copied == pytest.approx(swap.traffic + swap.returned, rel=1e-3, abs=small)


def swapped_of(cfg: TrainConfig) -> Any:
    family: Any = make_family(cfg)
    return swap_of(cfg, family, family.load(meta=True))
