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
# 4 double and 8 single blocks, wide enough that weights are most of the memory
SIZE = {"num_layers": 4, "num_single_layers": 8, "attention_head_dim": 64, "axes_dims_rope": [16, 24, 24]}
# so wide that the megabyte by which the allocator may round a tensor up is little of it
WIDE = 16


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sizes_of(8, tmp_path_factory.mktemp("sizes"))


def sizes_of(heads: int, folder: Path) -> Path:
    tiny: Any = make_family(TrainConfig.model_validate({"model": {"family": "flux", "init_from_config": "tiny"}}))
    made = tiny.architecture()
    made["transformer"] = {**made["transformer"], **SIZE, "num_attention_heads": heads}
    path = folder / "wide.json"
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


def planned_and_measured(cfg: TrainConfig) -> tuple[float, list[float], int, int]:
    """Return what is planned of a run on one device, its losses, its peak and what was copied in its last step."""
    family: Any = make_family(cfg)
    parts = family.load(meta=True)
    parts.offloaded |= set(parts.frozen)
    return device_memory(cfg, family, parts, 1, BUCKET, BATCH).total, *measured(cfg)


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
    runs = []
    for waiting in (0, WAITING):
        plan, losses, peak, copied = planned_and_measured(configured(sizes, waiting, kind=kind, again=again))
        runs.append((plan, losses, peak))
        if not again:  # without activations what is rounded up is more than a tenth of so small a model
            assert plan == pytest.approx(peak, rel=0.10)
    goes_down(*runs, share=0.25 if kind != "nf4" else 0.15)  # of whose blocks less is left to move
    assert copied == swapped_of(configured(sizes, WAITING, kind=kind, again=again)).traffic


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=NIGHTLY)])
def test_trained_blocks_go_back_behind_their_update(sizes: Path, again: bool) -> None:
    runs = []
    for waiting in (0, WAITING):
        plan, losses, peak, copied = planned_and_measured(
            configured(sizes, waiting, kind=None, again=again, whole=True)
        )
        runs.append((plan, losses, peak))
    goes_down(*runs, share=0.25)
    swap = swapped_of(configured(sizes, WAITING, kind=None, again=again, whole=True))
    small = 3 * 4 * 100  # numbers that are no tensors of several
    assert copied == pytest.approx(swap.traffic + swap.returned, rel=1e-3, abs=small)


def goes_down(before: tuple[Any, ...], after: tuple[Any, ...], *, share: float) -> None:
    """Assert that losses stay to the bit, and that the peak falls by what is planned, a share of all."""
    (plan, losses, peak), (lower, same, lower_peak) = before, after
    assert losses == same and len(set(losses)) == len(losses)
    assert plan - lower > share * plan and peak - lower_peak >= 0.9 * (plan - lower)


@pytest.mark.nightly
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("waiting", [0, WAITING])
def test_the_plan_is_within_a_tenth_of_the_peak(tmp_path: Path, whole: bool, again: bool, waiting: int) -> None:
    """A LoRA and all weights, updated during the backward pass; recomputed or not, with blocks that wait and without."""
    cfg = configured(sizes_of(WIDE, tmp_path), waiting, kind=None, again=again, whole=whole)
    plan, _, peak, _ = planned_and_measured(cfg)
    assert plan == pytest.approx(peak, rel=0.10)


def swapped_of(cfg: TrainConfig) -> Any:
    family: Any = make_family(cfg)
    return swap_of(cfg, family, family.load(meta=True))
