"""The contract line of sdxl_pretrain.py: what it leaves, and that restarts and ranks change nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from doors import Door, family_of, losses, metrics, wait_for, write_pictures
from safetensors.torch import load_file

LINE_KEYS = {
    "step",
    "epoch",
    "step_loss",
    "avr_loss",
    "lr",
    "grad_norm",
    "fps",
    "compute_fps",
    "data_wait_s",
    "peak_memory_gib",
    "samples_seen",
}
REPORT_KEYS = {
    "fps",
    "compute_fps",
    "final_loss",
    "steps",
    "world_size",
    "global_batch",
    "device",
    "config",
    "versions",
    "dataset",
}


def weights(out: Path, name: str = "NAME") -> dict[str, torch.Tensor]:
    return load_file(out / f"{name}.safetensors")


def assert_same_weights(a: Path, b: Path) -> None:
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    different = [key for key in left if not torch.equal(left[key], right[key])]
    assert not different, f"{len(different)} of {len(left)} tensors differ, first {different[:3]}"


def assert_within_one_lr(a: Path, b: Path, lr: float = 1e-4) -> None:
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    assert max((left[k].float() - right[k].float()).abs().max().item() for k in left) <= lr


def assert_same_losses(a: Path, b: Path, relative: float = 1e-6) -> None:
    left, right = losses(a), losses(b)
    assert len(left) == len(right)
    for step, (x, y) in enumerate(zip(left, right), 1):
        assert abs(x - y) <= relative * abs(x), f"step {step}: {x} against {y}"


@pytest.mark.flags("max_train_steps", "init_from_config")
def test_files_of_the_contract_line(straight: Path) -> None:
    for name in ("NAME.safetensors", "NAME-step00000004-state", "NAME-step00000008-state", "report.html"):
        assert (straight / name).exists(), name
    lines = metrics(straight)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line.keys() >= LINE_KEYS for line in lines)
    assert [line["samples_seen"] for line in lines] == [2 * step for step in range(1, 13)]
    report = json.loads((straight / "report.json").read_text())
    assert report.keys() >= REPORT_KEYS
    assert report["steps"] == 12 and report["world_size"] == 1 and report["global_batch"] == 2
    calls = report["kernels"]["attention"]  # 2 in each of the UNet's 11 blocks, 2 + 2 layers of text, the VAE's one
    assert calls == {"fused": 0, "sdpa": 27, "recomputed": 0, "why": {"on cpu": 27}}
    assert not (straight / "rejected.jsonl").exists()


def test_console_lines_can_be_grepped(straight: Path) -> None:
    console = (straight.parent / "console.txt").read_text()
    found = re.findall(r"step_loss=([0-9.]+)\b.*FPS: ([0-9.]+)$", console, flags=re.M)
    assert len(found) == 12
    assert [float(loss) for loss, _ in found] == pytest.approx(losses(straight), rel=1e-3)


def test_weights_were_trained(straight: Path, door: Door, tmp_path: Path) -> None:
    # A rate below the last bit of every weight: what is exported is what was there at the start.
    door.run(door.flags(tmp_path / "out", "--learning_rate=1e-30", steps=1))
    trained, start = weights(straight), weights(tmp_path / "out")
    unet = [key for key in start if key.startswith("model.diffusion_model.")]
    moved = sum(not torch.equal(trained[key], start[key]) for key in unet)
    assert moved == len(unet)
    rest = [key for key in start if not key.startswith("model.diffusion_model.")]
    assert rest and all(torch.equal(trained[key], start[key]) for key in rest)


@pytest.mark.flags("max_data_loader_n_workers", "seed", "train_data_dir")
def test_same_seed_same_bits_and_another_data_folder_name(straight: Path, door: Door, tmp_path: Path) -> None:
    copy = write_pictures(tmp_path / "the same pictures elsewhere")
    door.run(door.flags(tmp_path / "out", f"--train_data_dir={copy}", "--max_data_loader_n_workers=0"))
    assert losses(tmp_path / "out") == losses(straight)
    assert_same_weights(tmp_path / "out", straight)


def test_two_ranks_give_the_same_losses(straight: Path, door: Door, tmp_path: Path) -> None:
    # full micro batches of one device are drawn as whole batches are, which may be split any way
    door.run(door.flags(tmp_path / "out", "--epoch_batches=whole", batch=1), ranks=2)
    assert_same_losses(straight, tmp_path / "out")
    assert_within_one_lr(straight, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["world_size"] == 2 and report["global_batch"] == 2


@pytest.mark.flags("dataset_repeats", "gradient_accumulation_steps")
def test_ranks_repeats_accumulation_and_sharded_optimizer(door: Door, tmp_path: Path) -> None:
    extra = (
        "--epoch_batches=whole",
        "--dataset_repeats=3",
        "--shuffle_caption",
        "--flip_aug",
        "--caption_dropout_rate=0.2",
    )
    door.run(door.flags(tmp_path / "one", *extra, batch=4, steps=6))
    door.run(
        door.flags(
            tmp_path / "two", *extra, "--gradient_accumulation_steps=2", "--optimizer_type=oss", batch=1, steps=6
        ),
        ranks=2,
    )
    assert_same_losses(tmp_path / "one", tmp_path / "two")
    assert_within_one_lr(tmp_path / "one", tmp_path / "two")


@pytest.mark.flags("resume")
def test_kill_at_any_moment_and_resume_is_bit_exact(straight: Path, door: Door, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = door.flags(out, "--resume=auto")
    for step in (5, 10):  # after the checkpoints of 4 and of 8
        door.kill_at(step, flags)
        assert metrics(out)[-1]["step"] == step
    door.run(flags)
    assert [line["step"] for line in metrics(out)] == list(range(1, 13))
    assert losses(out) == losses(straight)
    assert_same_weights(out, straight)


def test_sigterm_saves_and_resume_goes_on(straight: Path, door: Door, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = door.flags(out, "--resume=auto")
    process = door.start(flags)
    wait_for(lambda: (out / "metrics.jsonl").exists() and any(m["step"] >= 2 for m in metrics(out)))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    states = [path.name for path in out.glob("NAME-step*-state")]
    assert states, output
    door.run(flags)
    assert losses(out) == losses(straight)
    assert_same_weights(out, straight)


def test_sigusr1_saves_and_goes_on(straight: Path, door: Door, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = door.start(door.flags(out, "--save_every_n_steps=100"))
    wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out))
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert len(list(out.glob("NAME-step*-state"))) == 1, output
    assert losses(out) == losses(straight)


def test_one_rank_killed_takes_the_job_down(door: Door, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = door.start(door.flags(out, batch=1, steps=2000), ranks=2)
    wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out))
    os.kill(family_of(process.pid)[1], signal.SIGKILL)
    start = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output
    assert time.monotonic() - start < 60


def test_two_runs_never_share_a_folder(door: Door, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = door.start(door.flags(out, steps=2000))
    wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out))
    before = len(metrics(out))
    for extra in ((), ("--resume=auto",)):
        output = door.run(door.flags(out, *extra, steps=2000), expect=2)
        assert str(first.pid) in output and str(out) in output
    assert len(metrics(out)) >= before
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()


def test_a_folder_with_another_run_is_refused(straight: Path, door: Door) -> None:
    before = sorted(path.name for path in straight.iterdir())
    output = door.run(door.flags(straight), expect=2)
    assert str(straight) in output and "--resume" in output
    output = door.run(door.flags(straight, "--resume=auto", "--learning_rate=3e-4"), expect=2)
    assert "learning_rate" in output
    assert sorted(path.name for path in straight.iterdir()) == before


def test_resume_refuses_another_global_batch_and_another_model(straight: Path, door: Door, tmp_path: Path) -> None:
    state = straight / "NAME-step00000008-state"
    output = door.run(door.flags(tmp_path / "a", f"--resume={state}", batch=3), expect=2)
    assert "global batch" in output and "2" in output and "3" in output
    other = json.loads(
        (Path(__file__).parents[2] / "library/difftrain/models/sizes_shipped/sdxl.tiny.json").read_text()
    )
    other["unet"]["block_out_channels"] = [2 * n for n in other["unet"]["block_out_channels"]]
    (tmp_path / "other.json").write_text(json.dumps(other))
    output = door.run(
        door.flags(tmp_path / "b", f"--resume={state}", f"--init_from_config={tmp_path / 'other.json'}"), expect=2
    )
    assert "model" in output


def test_resume_from_a_folder_goes_on_in_a_new_output_folder(straight: Path, door: Door, tmp_path: Path) -> None:
    out = tmp_path / "out"
    door.run(door.flags(out, f"--resume={straight / 'NAME-step00000008-state'}"))
    assert [line["step"] for line in metrics(out)] == [9, 10, 11, 12]
    assert losses(out) == losses(straight)[8:]
    assert_same_weights(out, straight)


def test_a_torn_checkpoint_is_never_picked(straight: Path, door: Door, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = door.start(door.flags(out, steps=12))
    wait_for(lambda: (out / "NAME-step00000008-state").exists())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    biggest = max((out / "NAME-step00000008-state").iterdir(), key=lambda path: path.stat().st_size)
    with biggest.open("r+b") as file:
        file.truncate(biggest.stat().st_size // 2)
    for path in out.glob("NAME-step00000012-state"):
        path.rename(tmp_path / path.name)
    output = door.run(door.flags(out, "--resume=auto"))
    assert "NAME-step00000008-state" in output and biggest.name in output
    assert losses(out) == losses(straight)
    assert_same_weights(out, straight)
