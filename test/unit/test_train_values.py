"""Values of train.py's keys: what each may look like, and what becomes of them where a data set's file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.config.train_line import parse
from difftrain.testing.pictures import write_folder

RUN = """output_dir = "out"
dataset = "dataset.toml"
epochs = 2
[model]
type = "sdxl"
init_from_config = "tiny"
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run's file beside its data."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "pictures", [(64, 64)] * 2)
    (tmp_path / "dataset.toml").write_text("resolutions = [64]\n[[directory]]\npath = 'pictures'\n")
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def test_what_the_run_says_of_pictures_holds_for_a_data_sets_file(run: Path) -> None:
    """Of an evaluation set nothing is drawn at random."""
    held = "[data]\nflip = true\nrandom_crop = true\nalpha_mask = true\n[eval]\nsets = [{name = 'a', config = 'dataset.toml'}]\n"
    run.write_text(RUN + held)
    parsed = parse([f"--config={run}", "--data.resolution=[128, 128]"])
    (subset,) = parsed.config.data.datasets[0].subsets
    (looked_at,) = parsed.config.eval.sets[0].datasets[0].subsets
    assert subset.flip and subset.random_crop and subset.alpha_mask and looked_at.alpha_mask
    assert not looked_at.flip and not looked_at.random_crop
    assert any("--data.resolution: has no effect: dataset.toml sets it" in note for note in parsed.notes)
