"""Lines that people publish for kohya's script are taken, and come to his updates, uses, rates and files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import public_lines
import pytest
import warm
from public_lines import FOR_REAL, LINES, PublicLine

from difftrain.config.parse_flags import parse
from difftrain.config.schema.rates import part_rates
from difftrain.data.plan.plan import total_steps
from difftrain.data.prepare import global_batches, make_plan, open_data, prepare
from difftrain.testing.pictures import write_folder

ROOT = Path(__file__).resolve().parents[2]


def words(line: PublicLine, folder: Path) -> list[str]:
    """Write what a line is about; return the line."""
    data = folder / "data"
    for number, (name, images) in enumerate(line.folders.items()):
        write_folder(data / name, [(64, 64)] * images, start=100 * number)
    made = [
        "--init_from_config=tiny",
        f"--output_dir={folder / 'out'}",
        f"--cache_dir={folder / 'cache'}",
        *line.flags.split(),
    ]
    made += ["--max_data_loader_n_workers=0"]
    if line.sets:
        (folder / "sets.toml").write_text(line.sets.replace("HERE", str(data)))
        made.append(f"--dataset_config={folder / 'sets.toml'}")
    else:
        made += [f"--train_data_dir={data}", "--resolution=64,64"]
    if line.args:
        (folder / "args.toml").write_text(line.args)
        made.append(f"--config_file={folder / 'args.toml'}")
    return made


def test_there_are_as_many_as_promised() -> None:
    assert len(LINES) >= 25 and len({line.name for line in LINES}) == len(LINES)
    assert set(FOR_REAL) <= {line.name for line in LINES}
    assert public_lines.updates_of(100, 16, 2, 3) == 12


@pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
def test_a_line_comes_to_kohyas_updates_uses_and_rates(line: PublicLine, tmp_path: Path) -> None:
    cfg = parse([*words(line, tmp_path), "--seed=1"]).config
    data = open_data(cfg, prepare(cfg, log=lambda text: None))
    plan = make_plan(data, cfg, global_batches(cfg, 1))
    assert total_steps(cfg.training, plan) == line.updates
    assert plan.uses == line.uses
    assert part_rates(cfg) == pytest.approx(dict(line.rates))
    drawn = [draw.key for step in range(plan.steps(0)) for draw in plan.batch(step)[1]]
    assert len(drawn) == line.uses  # every use of an epoch is served by whole batches: both kinds of epoch agree


@pytest.mark.parametrize("name", FOR_REAL)
def test_a_line_trains(name: str, tmp_path: Path) -> None:
    (line,) = [line for line in LINES if line.name == name]
    script = [sys.executable, str(ROOT / "sd_scripts_xl" / "sdxl_pretrain.py"), *words(line, tmp_path), "--seed=1"]
    process = warm.popen(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    said, _ = process.communicate(timeout=170)
    assert process.returncode == 0, said[-3000:]
    out = tmp_path / "out"
    steps = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("step", 0) for row in steps) == line.updates
    assert {path.stem for path in out.glob("*.safetensors")} == set(line.saves), said[-2000:]
    assert not re.search(r"Traceback", said)
