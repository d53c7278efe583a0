"""SD3-Light trained on the simulated device against the CPU: losses, attention, waits of the host, resume, other doors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doors import write_pictures
from npu_runs import Runner, Trained, toml_runner
from sd3_speedups import vision_folder

from difftrain.report.compare.trace_summary import sentences
from difftrain.report.trace import AGREE, compare_traces

STEPS = 12
BLOCKS = 3
CACHED = ("--cache.latents=true", "--cache.text=true")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pictures = write_pictures(tmp_path_factory.mktemp("pictures"))
    with pytest.MonkeyPatch.context() as patch:
        yield toml_runner(pictures, tmp_path_factory.mktemp("runs"), patch)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cpu(train: Runner) -> Trained:
    return train("cpu", *CACHED, steps=STEPS)


@pytest.fixture(scope="module")
def npu(train: Runner) -> Trained:
    return train("npu", *CACHED, "--monitoring.logging_steps=8", steps=STEPS)


def close(found: list[float], expected: list[float], rel: float) -> None:
    assert len(found) == len(expected) and found == pytest.approx(expected, rel=rel)


def test_losses_are_the_cpu_s(npu: Trained, cpu: Trained) -> None:
    close(npu.losses, cpu.losses, 1e-4)
    assert npu.report()["device"]["kind"] == "npu"


def test_every_attention_is_fused_nothing_falls_back_and_the_host_waits_where_a_line_is_due(npu: Trained) -> None:
    for step in npu.steps:
        assert step["npu::npu_fusion_attention"] == step["npu::npu_fusion_attention_grad"] == BLOCKS
        assert not any(name.startswith("fallback ") for name in step) and not step["aten::_softmax"]
    waits = {n for n, step in enumerate(npu.steps, 1) if any(name.startswith("sync ") for name in step)}
    assert waits == {4, 8}  # the end of the warm-up, and the line


def test_weights_are_on_the_device_and_have_changed(npu: Trained) -> None:
    assert {str(each.device) for each in npu.run.model.parts.root.parameters()} == {"npu:0"}
    assert all(not torch.equal(each.cpu(), npu.start[name]) for name, each in npu.weights.items())


# Each trains three steps as on the CPU. Figures: the losses' distance.
DOORS = {
    "online, masked T5, dropped texts": (
        ("--model.t5_attention_mask=true", "--model.enable_uncond_text_dropout=true"), 1e-4),
    "text reconstruction": ((*CACHED, "--loss.text_recon_gamma=0.1", "--optimization.activation_checkpointing=true"), 1e-4),
    "bf16": ((*CACHED, "--model.dtype=bfloat16"), 2e-2),
    "fp16": ((*CACHED, "--model.dtype=float16"), 2e-2),
    "routing": ((*CACHED, "--tread.share=0.5", "--tread.start=2", "--tread.end=2"), 1e-4),
    "patch masking": ((*CACHED, "--patch_masking.share=0.5"), 1e-4),
    "muon": ((*CACHED, "--optimizer.type=muon"), 1e-3),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_other_doors_train_as_on_the_cpu(train: Runner, door: str) -> None:
    flags, rel = (*DOORS[door][0], "--logging.trace=1-2"), DOORS[door][1]
    npu, cpu = train("npu", *flags, steps=3), train("cpu", *flags, steps=3)
    close(npu.losses, cpu.losses, rel)
    assert not any(name.startswith("fallback ") for step in npu.steps for name in step)
    traces = compare_traces(cpu.out, npu.out)  # module by module, forward and backward
    assert traces.code == AGREE, "\n".join(sentences(traces))
    assert [(each.step, each.a.facts["device"], each.b.facts["device"]) for each in traces.steps] == [
        (1, "cpu", "npu"),
        (2, "cpu", "npu"),
    ]
    assert all(each.modules > 60 and each.unequal is not None for each in traces.steps)


def test_alignment_with_an_image_encoder_trains_as_on_the_cpu(train: Runner, tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "encoder", "dinov2")
    flags = (*CACHED, f"--repa.encoder={folder}", "--repa.layer=2", "--repa.hidden=32")
    npu, cpu = train("npu", *flags, steps=3), train("cpu", *flags, steps=3)
    close(npu.losses, cpu.losses, 1e-4)
    assert not any(name.startswith("fallback ") for step in npu.steps for name in step)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_unbroken_one(train: Runner) -> None:
    flags = (*CACHED, "--model.dtype=bfloat16", "--ema.enable=true", "--ema.update_every=2")
    whole = train("npu", *flags, steps=4, out="whole")
    train("npu", *flags, steps=2, out="parted")
    again = train("npu", *flags, "--resume_from_checkpoint", steps=4, out="parted")
    assert again.losses == whole.losses[2:]
    assert all(torch.equal(each, whole.weights[name]) for name, each in again.weights.items())
