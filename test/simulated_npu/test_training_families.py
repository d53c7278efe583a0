"""Families whose language model and positions are a device's work, trained on the simulated device against the CPU, through the door."""

from __future__ import annotations

import pytest
import torch
from doors import write_pictures
from npu_runs import toml_runner

CACHED = (
    "--cache.latents=true",
    "--cache.text=true",
    "--model.dtype=bfloat16",
    "--optimization.activation_checkpointing=true",
)


@pytest.mark.parametrize("name", [pytest.param("qwen_image", marks=pytest.mark.nightly), "z_image"])
def test_losses_are_the_cpus_and_every_attention_is_fused(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pictures, runs = write_pictures(tmp_path_factory.mktemp("pictures")), tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        train = toml_runner(pictures, runs, patch, family=name)
        npu, cpu = train("npu", *CACHED, steps=2), train("cpu", *CACHED, steps=2)
    torch.set_num_threads(threads)
    assert npu.losses == pytest.approx(cpu.losses, rel=2e-2)
    for step in npu.steps:
        assert step["npu::npu_fusion_attention"] and not step["aten::_softmax"]
        assert not any(each.startswith("fallback ") for each in step)
