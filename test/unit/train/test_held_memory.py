"""What is said of the memory of weights and their update: once, from what is there."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from difftrain.config import TrainConfig, TrainingSection
from difftrain.train.meter import Meter
from difftrain.train.state import TrainProgress


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (TrainingSection(), r"4 KiB in float32, .*gradients, optimizer state 8\.004 KiB"),
        (
            TrainingSection(full_precision="bf16", mixed_precision="bf16"),
            r"2 KiB in bfloat16, kahan .*gradients, optimizer state 4\.004 KiB",
        ),
        (
            TrainingSection(full_precision="bf16", mixed_precision="bf16", master_weights="none"),
            r"2 KiB in bfloat16, (?!.*kahan).*gradients, optimizer state 4\.004 KiB",
        ),
    ],
)
def test_memory_is_measured_behind_the_first_update(
    training: TrainingSection, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = nn.Linear(32, 32, bias=False).to(torch.bfloat16 if training.full_precision else torch.float32)
    optimizer = torch.optim.AdamW(root.parameters())
    root.weight.grad = torch.ones_like(root.weight)
    optimizer.step()
    asleep = nn.Linear(8, 8, device="meta")
    parts = SimpleNamespace(root=root, frozen={"vae": nn.Linear(8, 8, bias=False), "text_encoder_1": asleep})
    meter = Meter(TrainConfig(training=training), TrainProgress(), *[None] * 6)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "difftrain"):
        for _ in range(2):
            meter.say_memory(parts, SimpleNamespace(optimizer=optimizer))  # type: ignore[arg-type]
    [line] = caplog.messages
    assert re.match(f"memory: trained weights {said}; frozen weights 256 B; ", line)
