"""Speed-ups on two ranks: the same tokens stay and the same losses come as on one, over the end of a term too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # the ranks are no pytest
from sd3_speedups import batch_of, config, cut, vision_folder

from difftrain import checkpoint
from difftrain.config.schema.sections import OptimizerSection, PatchMaskingSection, RepaSection, TreadSection
from difftrain.contracts import Bucket
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.engine.native import NativeEngine
from difftrain.models.families.sd3.family import SD3Family
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.spawn import run_ranks

GLOBAL, STEPS, UNTIL = 4, 5, 3
WAYS: dict[str, dict[str, Any]] = {
    "tread and repa": {"tread": {"share": 0.5}, "repa": {"layer": 2, "hidden": 24, "until_step": UNTIL}},
    "masking": {"patch_masking": {"share": 0.75, "mixer_layers": 1, "until_step": UNTIL}},
}
KINDS = {"tread": TreadSection, "repa": RepaSection, "patch_masking": PatchMaskingSection}


def built(ranks: Ranks, way: str, vision: str) -> NativeEngine:
    sections = {name: KINDS[name](**values) for name, values in WAYS[way].items()}
    if "repa" in sections:
        sections["repa"] = sections["repa"].model_copy(update={"encoder": vision})
    cfg = config(**sections, optimizer=OptimizerSection(type="Muon", learning_rate=1e-3))
    family = SD3Family(cfg)
    engine, parts = make_engine(cfg, choose("cpu"), ranks), family.load()
    engine.build(
        family,
        parts,
        lambda groups: make_optimizer(cfg.optimizer, groups),
        lambda made: make_schedule(cfg.optimizer, made, 20),
        [cut(batch_of(family, parts, Bucket(64, 64), GLOBAL, 0), ranks.rank, ranks.size)],
    )
    assert isinstance(engine, NativeEngine)
    return engine


def run(engine: NativeEngine, first: int, last: int) -> list[float]:
    assert isinstance(engine.family, SD3Family)
    found = []
    for step in range(first, last):
        whole = batch_of(engine.family, engine.parts, Bucket(64, 64), GLOBAL, step)
        stats = engine.step([cut(whole, engine.dp_rank, engine.dp_size)], {"samples": float(GLOBAL)})
        found.append(float(stats.sums["loss"]))
    return found


def cases(folder: str) -> None:
    """Run every way on these ranks: straight, and after a restart before the term ends."""
    found: dict[str, Any] = {}
    with Ranks.open(Launch.from_environment(), choose("cpu"), 2.0) as ranks:
        for way in WAYS:
            vision = str(Path(folder) / "vision")
            straight = built(ranks, way, vision)
            losses = run(straight, 0, 2)
            name = f"{way.replace(' ', '-')}-{ranks.size}-state"
            path = checkpoint.commit(Path(folder), name, straight.snapshot().write, ranks, {"step": 2})
            losses += run(straight, 2, STEPS)
            resumed = built(ranks, way, vision)
            resumed.restore(path)
            same = run(resumed, 2, STEPS) == losses[2:]
            one, other = dict(straight.full_weights()), dict(resumed.full_weights())
            same = same and all(torch.equal(one[each], other[each]) for each in one)
            sums = [float(each.double().sum()) for each in one.values()]
            found[way] = [losses, same, len({str(each) for each in ranks.gather(sums)})]
        if ranks.is_logger:
            (Path(folder) / f"found-{ranks.size}.json").write_text(json.dumps(found))


def test_two_ranks_learn_what_one_does_and_resume_bit_by_bit(tmp_path: Path) -> None:
    vision_folder(tmp_path / "vision", "dinov2")
    for size in (1, 2):
        run_ranks(size, f"{__file__}::cases", tmp_path)
    one, two = (json.loads((tmp_path / f"found-{size}.json").read_text()) for size in (1, 2))
    for way in WAYS:
        assert one[way][1:] == [True, 1] and two[way][1:] == [True, 1], way
        assert two[way][0] == pytest.approx(one[way][0], rel=2e-3), way  # Muon's directions are rounded to bf16
        assert two[way][0][0] == pytest.approx(one[way][0][0], rel=1e-5), way
