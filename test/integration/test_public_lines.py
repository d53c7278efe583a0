"""Lines that people publish for kohya's script are taken, and come to his updates, uses, rates and files, dry and for real."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import public_lines
import pytest
import warm
from public_lines import LINES, PublicLine

from difftrain.config.parse_flags import parse
from difftrain.config.schema.rates import part_rates
from difftrain.data.plan.plan import EpochPlan, total_steps
from difftrain.data.prepare import Data, global_batches, make_plan, open_data, prepare

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
# each is a run of its own: all of them in the nightly script, one of eight elsewhere
TRAINED = [
    pytest.param(line, id=line.name, marks=() if at % 8 == 0 else pytest.mark.nightly) for at, line in enumerate(LINES)
]


def test_there_are_as_many_as_promised_and_the_formulas_are_kohyas() -> None:
    assert len(LINES) >= 25 and len({line.name for line in LINES}) == len(LINES)
    # what his script itself gave for thirty images in four buckets
    (line,) = [line for line in LINES if line.name == "thirty images in four buckets"]
    assert (public_lines.micro_batches(line), public_lines.updates_of(line)) == (6, 3)


@pytest.fixture(scope="module")
def came_out(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Count the lines that come out as they should, and print how many."""
    counts: Counter[str] = Counter()
    yield counts
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{len(LINES)} public lines: {counts['dry']} dry, {counts['trained']} trained")


@BY_NAME
def test_a_line_comes_to_kohyas_updates_uses_and_rates(
    line: PublicLine, tmp_path: Path, came_out: Counter[str]
) -> None:
    cfg = parse([*public_lines.write(line, tmp_path), "--seed=1"]).config
    data = open_data(cfg, prepare(cfg, log=lambda text: None))
    plan = make_plan(data, cfg, global_batches(cfg, 1))
    assert total_steps(cfg.training, plan) == public_lines.updates_of(line)
    assert part_rates(cfg) == pytest.approx(dict(line.rates))
    expected = {folder: sorted(uses) for folder, uses in public_lines.uses_of(line).items()}
    for epoch in range(2):
        assert plan.steps(epoch) == public_lines.updates_an_epoch(line)
        assert uses_of(plan, data, epoch) == expected
    came_out["dry"] += 1


def uses_of(plan: EpochPlan, data: Data, epoch: int) -> dict[str, list[int]]:
    """Return how often an epoch uses each image of a folder, sorted."""
    steps = range(plan.total_steps(epoch), plan.total_steps(epoch + 1))
    draws = Counter(draw.record_id for step in steps for uses in plan.parts(step) for draw in plan.draws(uses))
    by_folder: dict[str, list[int]] = {}
    for record, number in draws.items():
        by_folder.setdefault(Path(data.index.record(record).name).parent.name, []).append(number)
    return {folder: sorted(numbers) for folder, numbers in by_folder.items()}


@pytest.mark.parametrize("line", TRAINED)
def test_a_line_trains(line: PublicLine, tmp_path: Path, came_out: Counter[str]) -> None:
    words = [*public_lines.write(line, tmp_path), "--seed=1"]
    script = [sys.executable, str(ROOT / "sd_scripts_xl" / "sdxl_pretrain.py"), *words]
    process = warm.popen(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    said, _ = process.communicate(timeout=170)
    assert process.returncode == 0 and not re.search("Traceback", said), said[-3000:]
    for what in line.heard:
        assert what in said

    # updates, each with the rate of each group; images, all of them in every epoch
    out, updates = tmp_path / "out", public_lines.updates_of(line)
    steps = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(1, updates + 1))
    for done, row in enumerate(steps):
        factor = public_lines.factor(line, done)
        assert row.get("lrs", {"unet": row["lr"]}) == pytest.approx(
            {group: rate * factor for group, rate in line.rates}, rel=1e-6, abs=1e-15
        )
    an_epoch, images = public_lines.updates_an_epoch(line), sum(map(sum, public_lines.uses_of(line).values()))
    ends = [row["samples_seen"] for row in steps if row["step"] % an_epoch == 0]
    assert ends == [images * (number + 1) for number in range(updates // an_epoch)]

    # files
    assert {path.stem for path in out.glob("*.safetensors")} == public_lines.files_of(line), said[-2000:]
    came_out["trained"] += 1
