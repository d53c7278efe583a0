"""Stable Diffusion 1 trained on the simulated device against the CPU: a UNet whose projections are convolutions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doors import write_pictures
from npu_runs import toml_runner

STEPS = 4
UNET, TEXT, VAE = 8, 2, 1  # attentions of the tiny size: itself and the text's in 4 blocks, layers, the middle


def test_losses_are_the_cpu_s_and_every_attention_is_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train = toml_runner(write_pictures(tmp_path / "pictures"), tmp_path, monkeypatch, family="sd1")
        npu, cpu = train("npu", steps=STEPS), train("cpu", steps=STEPS)
    finally:
        torch.set_num_threads(threads)
    assert npu.losses == pytest.approx(cpu.losses, rel=1e-4)
    for step in npu.steps:
        assert step["npu::npu_fusion_attention"] == UNET + TEXT + VAE
        assert step["npu::npu_fusion_attention_grad"] == UNET
        assert not step["aten::_softmax"] and not any(name.startswith("fallback ") for name in step)
