"""The table of docs/precision_and_memory.md is what --dry_run counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from difftrain.config.parse_flags import parse
from difftrain.models.registry import make_family
from difftrain.train.estimate.footprint import needs

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "precision_and_memory.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?:`(--[^`]+)`|\(none: fp32\)) " + r"\| (\d+) " * 6 + r"\|$", PAGE, re.MULTILINE)


def test_the_table_is_read() -> None:
    assert len(ROWS) == 8


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_bytes_of_a_parameter(row: tuple[str, ...], tmp_path: Path) -> None:
    flags, (weight, beside, gradient, casts, state, total) = row[0].split(), map(int, row[1:])
    line = ["--init_from_config=tiny", f"--train_data_dir={tmp_path}", f"--output_dir={tmp_path}", "--resolution=64,64"]
    cfg = parse([*line, *flags]).config
    parts = make_family(cfg).load(meta=True)
    moving = sum(each.numel() for each in parts.root.parameters() if each.requires_grad)
    found = {need.what.split()[0]: need.size / moving for need in needs(cfg, parts, ranks=1)}
    assert found["weights"] == weight and found["gradients"] == gradient and found["optimizer"] == state
    assert found.get("master", 0) == beside and found.get("casts", 0) == casts
    assert weight + beside + gradient + casts + state == total
