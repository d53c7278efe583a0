"""Runs from a cache on an object store: the losses are those of the folder it was copied from, and nothing is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doors import Door, losses

CACHED = ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk", "--max_data_loader_n_workers=1")


def state(cache: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file of a cache."""
    stats = {path: path.stat() for path in cache.rglob("*") if path.is_file()}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.mark.flags("cache_dir", "cache_copy_gib")
def test_ranks_train_from_a_url_as_from_the_folder_and_say_what_is_missing(door: Door, tmp_path: Path) -> None:
    cache, url = tmp_path / "cache", f"--cache_dir=file://{tmp_path}/cache"
    door.run(door.flags(tmp_path / "folder", *CACHED, f"--cache_dir={cache}", batch=1, steps=4), ranks=2)
    before = state(cache)
    flags = door.flags(tmp_path / "url", *CACHED, url, "--cache_copy_gib=0.01", batch=1, steps=4)
    said = door.run(flags, ranks=2, XDG_CACHE_HOME=str(tmp_path / "home"))
    assert said.count("files of file://") == 1, "one process of the machine fetches"
    assert losses(tmp_path / "url") == losses(tmp_path / "folder") and state(cache) == before
    kept = [path for path in (tmp_path / "home" / "difftrain" / "remote").rglob("seg-*")]
    assert kept and sum(path.stat().st_size for path in kept) < 0.01 * 2**30

    said = door.run(door.flags(tmp_path / "more", *CACHED, url, "--flip_aug", steps=4), expect=2)
    assert re.search(r"--cache_dir: .*read only.* of latents", said) and state(cache) == before

    lost = next(cache.glob("segments/*.bin"))
    lost.unlink()
    flags = door.flags(tmp_path / "gone", *CACHED, url, batch=1, steps=4)
    said = door.run(flags, expect=1, XDG_CACHE_HOME=str(tmp_path / "fresh"))
    assert f"{lost.name} is gone, bytes" in said and "Traceback" not in said
