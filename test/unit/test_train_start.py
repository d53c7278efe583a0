"""How a session begins."""

from __future__ import annotations

from pathlib import Path

from difftrain.config.sections import SaveSection, TrainConfig
from difftrain.distributed.ranks import Ranks
from difftrain.train.averages import snapshot_path
from difftrain.train.start import begin


def test_half_written_exports_and_snapshots_are_cleared_away(tmp_path: Path) -> None:
    whole = snapshot_path(tmp_path, 0.05, 2)
    torn = [each.with_name(f".{each.name}.0123abcd.tmp") for each in (whole, tmp_path / "NAME.safetensors")]
    whole.parent.mkdir()
    for path in (whole, *torn):
        path.write_bytes(b"x")
    with begin(TrainConfig(save=SaveSection(output_dir=str(tmp_path))), Ranks(), drawn_seed=5) as start:
        assert start.checkpoint is None and start.cfg.training.seed == 5
        assert whole.exists() and not any(path.exists() for path in torn)
