"""SDXL trained on the simulated device against the CPU: losses, weights, waits of the host, resume, and other doors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from doors import ROOT, write_pictures
from npu_runs import Runner, Trained, runner

from difftrain.cli import main
from difftrain.testing.spawn import run_ranks

STEPS = 12
UNET, TEXT, VAE = 22, 4, 1  # attentions of the tiny SDXL: test_attention_runs.py counts them from its architecture


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def train(pictures: Path, tmp_path_factory: pytest.TempPathFactory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        yield runner(pictures, tmp_path_factory.mktemp("runs"), patch)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cpu(train: Runner) -> Trained:
    return train("cpu", "--log_every=1", steps=STEPS)


@pytest.fixture(scope="module")
def npu(train: Runner) -> Trained:
    return train("npu", "--log_every=6", steps=STEPS)


@pytest.fixture(scope="module")
def bf16(train: Runner) -> Trained:
    return train("npu", "--mixed_precision=bf16", "--log_every=1", steps=STEPS)


def waits(trained: Trained) -> set[int]:
    """Return the steps after whose update, and before the next one's, the host waited for the device."""
    return {n for n, step in enumerate(trained.steps, 1) if any(name.startswith("sync ") for name in step)}


def close(found: list[float], expected: list[float], rel: float) -> None:
    assert len(found) == len(expected) and found == pytest.approx(expected, rel=rel)


def test_losses_are_the_cpu_s(npu: Trained, cpu: Trained) -> None:
    close(npu.losses, cpu.losses, 1e-4)
    assert npu.report()["device"]["kind"] == "npu" and npu.report()["device"]["name"].startswith("Ascend")


def test_the_host_waits_for_the_device_where_a_line_is_due_and_nowhere_else(npu: Trained) -> None:
    """And once a session, at step 4: speed is measured from there on."""
    assert waits(npu) == {4, 6}
    assert not any(name.startswith("fallback ") for step in npu.steps for name in step)


def test_every_attention_of_every_step_is_fused(npu: Trained) -> None:
    assert {step["npu::npu_fusion_attention"] for step in npu.steps} == {UNET + TEXT + VAE}
    assert {step["npu::npu_fusion_attention_grad"] for step in npu.steps} == {UNET}
    assert not any(step["aten::_softmax"] or step["aten::bmm"] for step in npu.steps)


def test_weights_are_on_the_device_and_all_of_them_have_changed(npu: Trained) -> None:
    assert {str(each.device) for each in npu.run.model.parts.root.parameters()} == {"npu:0"}
    assert npu.weights and all(not torch.equal(each.cpu(), npu.start[name]) for name, each in npu.weights.items())


def test_bf16_is_near_fp32(bf16: Trained, cpu: Trained) -> None:
    close(bf16.losses, cpu.losses, 2e-2)
    assert {each.dtype for each in bf16.weights.values()} == {torch.float32}


def test_their_files_compare(npu: Trained, bf16: Trained, cpu: Trained, tmp_path: Path) -> None:
    """fp32 agrees with the CPU's fp32 to 1e-5 at the steps that have lines in both, bf16 as bf16 does at all of them."""
    out = tmp_path / "found.json"
    assert main(["compare", str(cpu.out), str(npu.out), str(bf16.out), f"--json={out}"]) == 0
    in_fp32, in_bf16 = json.loads(out.read_text())["comparisons"]
    assert in_fp32["verdict"] == in_bf16["verdict"] == "agree"
    assert in_fp32["thresholds"]["step_relative_error"] == 1e-5 and in_fp32["errors"]["steps"] == [6, 12]
    assert in_bf16["thresholds"]["step_relative_error"] == 2e-2 and in_bf16["errors"]["steps"] == [*range(1, STEPS + 1)]
    assert in_bf16["mean_relative_error"] > 0
    kinds = {each["name"]: (each["a"], each["b"]) for each in in_fp32["differences"] if each["group"] == "device"}
    assert kinds["kind"] == ("cpu", "npu")


def test_fp16_is_scaled_from_128_on_without_a_wait(train: Runner, cpu: Trained) -> None:
    npu = train("npu", "--mixed_precision=fp16", steps=8)
    assert waits(npu) == {2}  # the end of the warm-up
    assert npu.run.progress.skipped == 0 and npu.run.model.engine._scaler.get_scale() == 128.0
    close(npu.losses, cpu.losses[:8], 2e-2)


@pytest.mark.parametrize("more", [(), ("--save_async",)])
def test_a_run_that_goes_on_from_a_checkpoint_is_the_unbroken_one(train: Runner, more: tuple[str, ...]) -> None:
    flags = ("--mixed_precision=bf16", "--save_state", "--save_every_n_steps=2", "--use_ema", "--ema_decay=0.9", *more)
    whole = train("npu", *flags, steps=4)
    lines = [
        line for line in (whole.out / "console.log").read_text().splitlines() if "step00000002-state at step" in line
    ]
    assert len(lines) == 1 and ("in the background" in lines[0]) == bool(more)
    state = whole.out / "NAME-step00000002-state"
    again = train("npu", *flags, f"--resume={state}", steps=4)
    assert again.losses == whole.losses[2:]
    assert all(torch.equal(each, whole.weights[name]) for name, each in again.weights.items())
    assert all(
        torch.equal(each, whole.run.model.averages.ema.weights[name])
        for name, each in again.run.model.averages.ema.weights.items()
    )


# Each trains three steps as on the CPU. Figures: losses' distance, and how often a step makes the host wait.
DOORS = {
    "caches": (("--cache_latents", "--cache_text_encoder_outputs"), 1e-4),
    "text encoders, checkpointing": (
        ("--train_text_encoder", "--gradient_checkpointing", "--cpu_offload_checkpointing", "--clip_skip=1"), 1e-4),
    "averages and validation": (("--use_ema", "--ema_profiles=0.1", "--validation_split=0.3"), 1e-4),
    "weights in bf16": (("--full_bf16", "--mixed_precision=bf16", "--optimizer_type=oss"), 2e-2),
    "rounded by chance": (("--full_bf16", "--mixed_precision=bf16", "--master_weights=stochastic"), 2e-2),
    "weights in fp16": (("--full_fp16", "--mixed_precision=fp16"), 2e-2),
    "losses and noises": (
        ("--v_parameterization", "--min_snr_gamma=5", "--noise_offset=0.1", "--multires_noise_iterations=4",
         "--ip_noise_gamma=0.1", "--loss_type=smooth_l1", "--zero_terminal_snr"), 1e-4),
    "accumulation": (("--gradient_accumulation_steps=2", "--scale_v_pred_loss_like_noise_pred", "--v_parameterization"), 1e-4),
    "compile": (("--torch_compile",), 1e-4),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_other_doors_train_as_on_the_cpu_without_waiting(train: Runner, door: str) -> None:
    flags, rel = DOORS[door]
    on_cpu = [flag for flag in flags if flag != "--torch_compile"]
    npu = train("npu", *flags, steps=3)
    cpu = train("cpu", *on_cpu, steps=3)
    close(npu.losses, cpu.losses, rel)
    assert not waits(npu) - {1}  # the end of the warm-up


OPTIMIZERS = {
    "Adafactor": ("--optimizer_type=Adafactor",),
    "Adafactor fused": ("--optimizer_type=Adafactor", "--fused_backward_pass",
                                       "--optimizer_args=relative_step=False", "--max_grad_norm=0"),
    "Lion": ("--optimizer_type=Lion",),
    "SGD": ("--optimizer_type=SGDNesterov", "--learning_rate=0.1"),
    "schedule-free": ("--optimizer_type=AdamWScheduleFree",),
    "Prodigy": ("--optimizer_type=Prodigy", "--learning_rate=1.0"),
}  # fmt: skip
SIMPLER = ("Adafactor", "Lion", "SGD")  # on the device by no operator that others do not use
MOST_WAITS = {"Adafactor": 2, "Adafactor fused": 500, "Prodigy": 1000}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in SIMPLER else name for name in OPTIMIZERS]
)
def test_other_optimizers_train_as_on_the_cpu(train: Runner, name: str) -> None:
    npu, cpu = (train(device, *OPTIMIZERS[name], steps=3) for device in ("npu", "cpu"))
    close(npu.losses, cpu.losses, 1e-4)
    assert all(not torch.equal(each.cpu(), npu.start[key]) for key, each in npu.weights.items())
    # whether to skip is looked at on the host where an optimizer cannot; besides, some show their rate or distance
    assert max(
        sum(n for what, n in step.items() if what.startswith("sync ")) for step in npu.steps[1:]
    ) <= MOST_WAITS.get(name, 1)


# ------------------------------------------------------------------ several ranks


def train_as_rank(pictures: str, base: str) -> None:
    """Train as one of several ranks, then compare weights over them, bit for bit."""
    import torch.distributed as dist

    from difftrain.train import run as running

    rank = int(os.environ["RANK"])
    finish = running.finish

    def compare(run, *rest) -> None:
        for name, each in run.model.parts.root.named_parameters():
            assert str(each.device) == f"npu:{rank}", name
            first = each.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, each), name
        finish(run, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "finish", compare)
        train = runner(Path(pictures), Path(base), patch)
        trained = train("npu", steps=6, out="ranks")
    assert waits(trained) == {2}
    assert all(not torch.equal(each.cpu(), trained.start[name]) for name, each in trained.weights.items())


def test_ranks_hold_the_same_weights_and_wait_for_nothing(train: Runner, pictures: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([*map(str, (ROOT / "test" / "support", ROOT / "library", ROOT)), os.environ["PYTHONPATH"]])
    run_ranks(2, f"{__file__}::train_as_rank", pictures, tmp_path, timeout_s=240, env={"PYTHONPATH": path})
    alone = train("npu", "--gradient_accumulation_steps=2", steps=6)  # the same micro batches, one after another
    report = Trained(tmp_path / "ranks", None, {}, []).report()
    assert report["world_size"] == 2
    assert report["final_avr_loss"] == pytest.approx(alone.report()["final_avr_loss"], rel=1e-5)
