"""Caches built by several processes, killed while they are built and while they are read: the same run comes of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import cached
import pytest
from doors import Door, losses, metrics, wait_for, write_pictures

from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.format import Damaged
from difftrain.cache.store.index import Metadata
from difftrain.cache.store.journals import Journal
from difftrain.testing.spawn import run_ranks

CACHED = ("--cache_latents", "--cache_text_encoder_outputs")
ON_DISK = ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk")
WHOLE = "--epoch_batches=whole"  # which two ranks may split
MORE = (WHOLE, "--flip_aug", "--validation_split=0.2", "--validate_every_n_steps=4", "--max_data_loader_n_workers=1")


PICTURES, CAPTIONS = 26, 15  # of cached.write_data: 13 both ways; 14 captions and the empty one
ALL = PICTURES + 2 * CAPTIONS


def test_ranks_share_the_work_and_machines_do_it_each_for_itself_or_together(tmp_path: Path) -> None:
    data = cached.write_data(tmp_path)
    alone = cached.make(cached.config(data, tmp_path / "alone", cached.ON_DISK)).digest()
    ended = run_ranks(2, f"{cached.__file__}::build", data, tmp_path / "two")
    ours, theirs = (json.loads(each.out.splitlines()[-1]) for each in ended)
    assert {held for held, _ in (*ours, *theirs)} == {alone}  # bit by bit, whoever encoded what
    counts = [(first[1], second[1]) for first, second in zip(ours, theirs, strict=True)]
    built, again, memory, apart, shared, own = counts
    assert sum(built) == ALL and sum(memory) == ALL and min(*built, *memory) > 0
    assert again == (0, 0)
    assert apart == (ALL, ALL)  # two machines, each in its memory
    assert sum(shared) == ALL and min(shared) > 0  # two machines that see one folder
    assert own == (ALL, ALL)  # two machines, each with a folder of its own


def kill_at(door: Door, flags: list[str], out: Path, step: int, ranks: int = 1) -> list[float]:
    """Kill a run when it has come to a step; return the losses until there."""
    door.kill_at(step, flags, ranks)
    assert [each["step"] for each in metrics(out)] == list(range(1, step + 1))
    return losses(out)


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
    assert "cache of latents" in output and "not loaded" in output
    assert losses(out)[:6] == before and len(losses(out)) == 8
    assert losses(out) == pytest.approx(losses(online), rel=1e-6)
    assert validated(out) == pytest.approx(validated(online), rel=1e-6) and len(validated(online)) == 2


@pytest.mark.flags("cache_only", "cache_latents_to_disk", "cache_text_encoder_outputs_to_disk", "cache_dir")
def test_caches_are_built_alone_by_torchrun_and_read_by_two_ranks(door: Door, online: Path, tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    flags = door.flags(out, *MORE, *ON_DISK, f"--cache_dir={cache}", "--resume=auto", batch=1, steps=8)
    output = door.run([*flags, "--cache_only"], ranks=2)
    assert "--cache_only: " in output and not out.exists()
    kept = stamps(cache)
    assert len(kept) > 2 and not list(cache.rglob("*.part"))
    before = kill_at(door, flags, out, 6, ranks=2)
    output = door.run(flags, ranks=2)
    assert "not loaded" in output and "entries encoded" not in output
    assert losses(out)[:6] == before and losses(out) == pytest.approx(losses(online), rel=1e-6)
    assert stamps(cache) == kept


def stamps(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (cache / "segments").iterdir()}


def entries(cache: Path) -> int:
    """Count what was committed so far, whether it was merged or not; a journal may be looked at before its first byte."""
    folder, count = CacheFolder(cache), 0
    for name in folder.names():
        with contextlib.suppress(Damaged):
            count += sum(len(rows) for rows, _ in Journal(folder, name).rows())
    return count


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("many") / "pictures", 120)


def test_builds_killed_under_torchrun_go_on_where_they_were(door: Door, many: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    more = (f"--train_data_dir={many}", f"--cache_dir={cache}", "--cache_only", "--vae_batch_size=1", *ON_DISK)
    flags = door.flags(tmp_path / "out", *more, "--max_data_loader_n_workers=1")
    was = 0
    for least in (1, 40):
        process = door.start(flags, ranks=2)
        wait_for(lambda least=least: cache.exists() and entries(cache) >= least)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert was < entries(cache) < 360
        was = entries(cache)
    output = door.run(flags, ranks=2)
    assert "--cache_only: " in output and entries(cache) == 120 + 2 * 121  # nothing was written twice
    found = int(re.search(r"cache of latents: .*; (\d+) are present", output)[1])
    assert found >= min(was, 120) - 2


def test_a_rank_that_fails_while_encoding_ends_the_others_too(many: Path, tmp_path: Path) -> None:
    function = f"{cached.__file__}::fail"
    ended = run_ranks(2, function, many, tmp_path / "failed", "fails", check=False, timeout_s=90)
    assert [each.code for each in ended] == [1, 1]
    assert "RuntimeError: a fault of rank 1 alone" in ended[1].err and "Traceback" in ended[1].err
    assert "TrainingFault: rank 1: RuntimeError('a fault of rank 1 alone')" in ended[0].err
    ended = run_ranks(2, function, many, tmp_path / "killed", "killed", check=False, timeout_s=90)
    assert [each.code for each in ended] == [1, -signal.SIGKILL]
    assert "RankLost: rank 0: rank 1 of 2 " in ended[0].err
    assert entries(tmp_path / "failed") > 20 and entries(tmp_path / "killed") > 20


def test_two_builds_at_once_waste_work_and_nothing_else(door: Door, many: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    more = (f"--train_data_dir={many}", f"--cache_dir={cache}", "--cache_only", "--max_data_loader_n_workers=1")
    flags = door.flags(tmp_path / "out", *more, *ON_DISK)
    processes = [door.start(flags) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    assert Metadata(cache / "metadata.db").count == 120 + 2 * 121
    output = door.run(flags)
    assert len(re.findall(r"cache of \w+: .* all ", output)) == 3


def test_a_signal_ends_a_build_that_the_next_start_goes_on_with(door: Door, many: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    more = (f"--train_data_dir={many}", f"--cache_dir={cache}", "--cache_only", "--vae_batch_size=1", *ON_DISK)
    flags = door.flags(tmp_path / "out", *more)
    process = door.start(flags, ranks=1)
    wait_for(lambda: cache.exists() and entries(cache) >= 3)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "a signal" in output, output
    assert not list(cache.rglob("*.part"))
    assert "--cache_only: " in door.run(flags)
