"""benchmarks/edit_pairs.py as people run it, over a few steps: losses with own and other references, and a sheet of images."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarked import benchmark
from emoji_packages import write_packages
from PIL import Image

from difftrain.demo.prepare import make
from difftrain.demo.recipe import cache_root


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["flux_kontext", "qwen_image_edit"])
def test_it_trains_measures_and_shows(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_packages(cache_root() / "npm")
    home = tmp_path / "home"
    make("pairs", home / "output" / family / "emoji", 1e-6, lambda _: None, family=family)

    words = f"--family={family}", f"--folder={home}", "--steps=2", "--sheet=sheet.png"
    code, said = benchmark("edit_pairs", *words, cwd=tmp_path)
    assert code == 1, said  # two steps teach nothing of references
    assert f"{family}, 2 steps" in said and "loss of 8 unseen pairs" in said
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (3 * 68 + 4, 6 * 68 + 4)  # reference, sample, image; six prompts
