"""Flux trained on the simulated device against the CPU: losses, attention, waits of the host, no fp64 in a step."""

from __future__ import annotations

import pytest
import torch
from doors import write_pictures
from npu_runs import Runner, Trained, toml_runner

STEPS = 12
BLOCKS = 4  # two joint, two single
LORA = ("--adapter.type=lora", "--adapter.rank=4", "--adapter.scale_weight_norms=1", "--adapter.loraplus_lr_ratio=4")
CACHED = ("--cache.latents=true", "--cache.text=true")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pictures = write_pictures(tmp_path_factory.mktemp("pictures"))
    with pytest.MonkeyPatch.context() as patch:
        yield toml_runner(pictures, tmp_path_factory.mktemp("runs"), patch, family="flux")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cpu(train: Runner) -> Trained:
    return train("cpu", *CACHED, steps=STEPS)


@pytest.fixture(scope="module")
def npu(train: Runner) -> Trained:
    return train("npu", *CACHED, "--monitoring.logging_steps=8", steps=STEPS)


def test_losses_are_the_cpu_s(npu: Trained, cpu: Trained) -> None:
    assert npu.losses == pytest.approx(cpu.losses, rel=1e-4)
    assert npu.report()["device"]["kind"] == "npu"


def test_every_attention_is_fused_nothing_falls_back_and_the_host_waits_where_a_line_is_due(npu: Trained) -> None:
    """The simulator refuses fp64 and complex operands, so a run that ends has none."""
    for step in npu.steps:
        assert step["npu::npu_fusion_attention"] == step["npu::npu_fusion_attention_grad"] == BLOCKS
        assert not any(name.startswith("fallback ") for name in step) and not step["aten::_softmax"]
    waits = {n for n, step in enumerate(npu.steps[1:], 2) if any(name.startswith("sync ") for name in step)}
    assert waits == {4, 8}  # the end of the warm-up, and the line; the first step brings the rotary tables


@pytest.mark.parametrize(
    ("flags", "rel"),
    [
        ((*CACHED, "--model.dtype=bfloat16", "--optimization.activation_checkpointing=true"), 2e-2),
        ((*CACHED, "--model.dtype=bfloat16", "--model.train_only=['attn']"), 2e-2),
        ((*CACHED, "--model.dtype=bfloat16", "--model.base_dtype=int8", *LORA), 2e-2),
        ((), 1e-4),
    ],
    ids=["bf16, checkpointed", "held in bf16", "LoRA over int8", "online"],
)
def test_other_doors_train_as_on_the_cpu(train: Runner, flags: tuple[str, ...], rel: float) -> None:
    npu, cpu = train("npu", *flags, steps=3), train("cpu", *flags, steps=3)
    assert npu.losses == pytest.approx(cpu.losses, rel=rel)
    assert not any(name.startswith("fallback ") for step in npu.steps for name in step)
