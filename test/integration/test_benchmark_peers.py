"""The benchmark beside other trainers is rehearsed: every loop trains from JPEGs, and says so step by step."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from benchmarked import benchmark


@pytest.mark.nightly
def test_every_peer_trains_from_files(tmp_path: Path) -> None:
    code, said = benchmark("peers", "--rehearse", cwd=tmp_path)
    assert code == 0, said
    done = {line.partition(", ")[2].rpartition(": ")[0] for line in said.splitlines() if line.startswith("  round 1, ")}
    expected = {"difftrain", "kohya's step", "accelerate's loop"}
    if importlib.util.find_spec("datasets") is not None:
        expected |= {"diffusers example", "diffusers example, 0 workers"}
    assert done == expected and not list(tmp_path.iterdir())
