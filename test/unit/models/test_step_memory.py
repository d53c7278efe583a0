"""Memory of a step, counted without content, against what the real step keeps and takes."""

from __future__ import annotations

import pytest
import torch

from difftrain.config import TrainConfig
from difftrain.config.schema.model import ModelSection
from difftrain.config.schema.training import TrainingSection
from difftrain.contracts import Bucket
from difftrain.device.step_memory import AcceleratorMaths, CountMemory
from difftrain.models.flops import blank_inputs
from difftrain.models.registry import FAMILIES, make_family
from difftrain.models.step_memory import step_peak

BUCKET, BATCH = Bucket(128, 128), 4


def family_of(name: str, **training: object):
    section = TrainingSection(**training)  # type: ignore[arg-type]
    return make_family(TrainConfig(model=ModelSection(family=name, init_from_config="tiny"), training=section))


def saved_and_peak(family) -> tuple[int, int, int]:
    """Run the step on the CPU: bytes of distinct storages kept for the backward pass, peak, gradients."""
    root = family.load().root.train()
    inputs = blank_inputs(family, BUCKET, "cpu", BATCH)
    own = {param.untyped_storage().data_ptr() for param in root.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = value
        return value

    with CountMemory() as memory:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            outputs = family.forward(root, inputs)
            loss = sum(family.loss_sums(outputs, inputs).values())
        saved = sum(value.untyped_storage().nbytes() for value in kept.values())
        kept.clear()
        loss.backward()
    return saved, memory.peak, sum(p.grad.nbytes for p in root.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("sdxl", "sd3", "flux", "lumina_2") else pytest.param(name, marks=pytest.mark.nightly)
        for name in FAMILIES
    ],
)
def test_the_pass_without_content_takes_what_the_real_one_takes(name: str) -> None:
    family = family_of(name)
    saved, peak, gradients = saved_and_peak(family)
    estimated = step_peak(family, family.load(meta=True).root.to("meta"), BUCKET, BATCH)
    assert estimated == pytest.approx(peak, rel=0.1)
    assert max(saved, gradients) <= estimated <= 1.3 * (saved + gradients)


def test_what_takes_less_is_told_to_take_less() -> None:
    def peak(batch: int = BATCH, **training: object) -> int:
        family = family_of("sd3", **training)
        return step_peak(family, family.load(meta=True).root.to("meta"), BUCKET, batch)

    plain = peak()
    assert peak(gradient_checkpointing=True) < plain < peak(2 * BATCH)
    assert peak(mixed_precision="bf16") < plain < peak(accumulation=2)


def test_storages_count_once_and_for_as_long_as_they_live() -> None:
    with CountMemory() as memory:
        first = torch.empty(1024, device="meta")
        view = first.view(2, 512)
        assert memory.now == 4096
        first.add_(1)
        assert memory.now == 4096
        del first
        assert memory.now == 4096
        del view
        assert memory.now == 0
        torch.empty(1, device="meta")
    assert memory.peak == 4096


def test_casts_are_those_of_autocast_and_attention_keeps_no_scores() -> None:
    layer = torch.nn.Linear(64, 64, device="meta")
    with AcceleratorMaths(torch.bfloat16):
        x = layer(torch.empty(2, 64, device="meta"))
        assert x.dtype == torch.bfloat16
        assert torch.nn.functional.layer_norm(x, (64,)).dtype == torch.float32
        with CountMemory() as memory:
            q = torch.empty(1, 1, 4096, 8, device="meta", dtype=torch.bfloat16)
            assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape
    assert memory.peak < 4096 * 4096
