"""Caches built by several processes, killed while they are built and while they are read: the same run comes of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import cached
import pytest
from doors import Door, losses, metrics, wait_for

from difftrain.testing.spawn import run_ranks

CACHED = ("--cache_latents", "--cache_text_encoder_outputs")
ON_DISK = ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk")
MORE = ("--flip_aug", "--validation_split=0.2", "--validate_every_n_steps=4", "--max_data_loader_n_workers=1")


def test_ranks_share_the_work_and_machines_do_it_each_for_itself(tmp_path: Path) -> None:
    data = cached.write_data(tmp_path)
    alone = cached.make(cached.config(data, tmp_path / "alone", cached.ON_DISK)).digest()
    parts = len(list((tmp_path / "alone").rglob("*.part")))
    ended = run_ranks(2, f"{cached.__file__}::build", data, tmp_path / "two")
    ours, theirs = (json.loads(each.out.splitlines()[-1]) for each in ended)
    assert {held for held, _ in (*ours, *theirs)} == {alone}  # bit by bit, whoever encoded what
    built, again, memory, machine = ([first[1], second[1]] for first, second in zip(ours, theirs, strict=True))
    assert sum(built) == sum(memory) == parts and min(*built, *memory) > 0
    assert again == [0, 0] and machine == [parts, parts]


def kill_at(door: Door, flags: list[str], out: Path, step: int, ranks: int = 1) -> list[float]:
    """Kill a run when it has come to a step; return the losses until there."""
    process = door.start(flags, ranks=ranks)
    wait_for(lambda: (out / "metrics.jsonl").exists() and any(each["step"] >= step for each in metrics(out)))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return losses(out)[:step]


@pytest.fixture(scope="module")
def online(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("online") / "out"
    door.run(door.flags(out, *MORE, steps=8))
    return out


def validated(out: Path) -> list[float]:
    lines = (out / "validation.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.flags("cache_latents", "cache_text_encoder_outputs")
def test_a_run_from_memory_has_the_losses_of_online_training_and_resumes_bit_by_bit(
    door: Door, online: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = door.flags(out, *MORE, *CACHED, "--resume=auto", steps=8)
    before = kill_at(door, flags, out, 6)  # two steps beyond the checkpoint
    output = door.run(flags)
    assert "cache of latents" in output and "they stay on the host" in output
    assert losses(out)[:6] == before and len(losses(out)) == 8
    assert losses(out) == pytest.approx(losses(online), rel=1e-6)
    assert validated(out) == pytest.approx(validated(online), rel=1e-6) and len(validated(online)) == 2


@pytest.mark.flags("cache_only", "cache_latents_to_disk", "cache_text_encoder_outputs_to_disk", "cache_dir")
def test_caches_are_built_alone_by_torchrun_and_read_by_two_ranks(door: Door, online: Path, tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    flags = door.flags(out, *MORE, *ON_DISK, f"--cache_dir={cache}", "--resume=auto", batch=1, steps=8)
    output = door.run([*flags, "--cache_only"], ranks=2)
    assert "the caches are whole" in output and not out.exists()
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("*.part")}
    assert len(kept) > 2
    before = kill_at(door, flags, out, 6, ranks=2)
    door.run(flags, ranks=2)
    assert losses(out)[:6] == before and losses(out) == pytest.approx(losses(online), rel=1e-6)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.part")} == kept
