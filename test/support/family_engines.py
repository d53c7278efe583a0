"""Engines over ranks on tiny families of the kit: trained, averaged, drawn, exported and gone on with.

For tests whose ranks are processes of their own: they find this file where they put test/support on their path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import torch
from safetensors.torch import save_file
from sd3_speedups import cut

from difftrain import checkpoint
from difftrain.config.schema.sections import EmaSection, TrainConfig
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.engine.checkpointing import CheckpointedEngine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.sampling import Prompt
from difftrain.sampling.draw import draw_pictures
from difftrain.train.averages import Averages

LR = 1e-4
EMA = EmaSection(enable=True, decay=0.9, profiles=(0.1,))
FAMILIES: dict[str, dict[str, Any]] = {
    "sdxl": {"train_text_encoder": True},
    "sd3": {},
    "flux": {},
    "flux-attention": {"train_only": ("attn",)},  # the rest is held as its source has it
}
FAMILY_STEPS = 4


def assembled(cfg: TrainConfig, ranks: Ranks, family: Any, parts: Any, warm: list) -> CheckpointedEngine:
    engine = make_engine(cfg, choose("cpu"), ranks)
    assert not engine.faults(), engine.faults()
    engine.build(
        family,
        family.load() if parts is None else parts,
        lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=ranks.size),
        lambda made: make_schedule(cfg.optimizer, made, 20),
        warm,
    )
    assert isinstance(engine, CheckpointedEngine)
    return engine


def weights(engine: CheckpointedEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_weights()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def commit(engine: CheckpointedEngine, parent: Path, name: str, averages: Averages | None = None) -> Path:
    snapshot = engine.snapshot()

    def write(folder: Path) -> list[Path]:
        return [*snapshot.write(folder), *(averages.snapshot()(folder) if averages else [])]

    return checkpoint.commit(parent, f"{name}-state", write, engine.ranks, {"step": engine.position})


def family_engine(ranks: Ranks, name: str, way: str, precision: str) -> CheckpointedEngine:
    sections = {
        "training": {"engine": way, "mixed_precision": precision, "gradient_checkpointing": name == "sd3"},
        "optimizer": {"learning_rate": LR},
    }
    kind = name.partition("-")[0]
    cfg = families.config(kind, sections, **FAMILIES[name])
    family = families.made(cfg)
    parts = family.load()
    families.trained_once(families.Tiny(family, parts, None))
    batch = families.batch_of(family, families.bucket_of(kind), CAPTIONS, parts=parts)
    return assembled(cfg, ranks, family, parts, [cut(batch, ranks.rank, ranks.size)])


CAPTIONS = ("a red cat on a table", "two dogs", "a ship", "snow on a hill")


def family_run(engine: CheckpointedEngine, first: int, last: int, mean: Averages | None = None) -> list[float]:
    found = []
    for step in range(first, last):
        family: Any = engine.family
        batch = families.batch_of(family, families.bucket_of(family.name), CAPTIONS, seed=step, parts=engine.parts)
        mine = cut(batch, engine.dp_rank, engine.dp_size)
        found.append(float(engine.step([mine], {"samples": float(len(CAPTIONS))}).sums["loss"]))
        if mean is not None:
            mean.update(step)
    return found


def family_case(ranks: Ranks, out: Path, name: str) -> dict:
    """Train, keep an average, draw, export; go on from a checkpoint; and in bf16."""
    way = "native" if ranks.size == 1 else "fsdp"
    found: dict[str, Any] = {"bf16": family_run(family_engine(ranks, name, way, "bf16"), 0, FAMILY_STEPS)}
    engine = family_engine(ranks, name, way, "no")
    mean = Averages(EMA, engine)
    drawer, prompt = engine.family.drawer(engine.parts), Prompt("a cat", width=64, height=64, sample_steps=2, seed=5)
    sampler = "flow_euler" if name != "sdxl" else "ddim"

    def drawn() -> torch.Tensor:
        with mean.averaged(), engine.drawing():
            (picture,) = draw_pictures(drawer, [prompt], sampler=sampler, seed=1)
        return torch.tensor(list(picture.image.getdata()), dtype=torch.float32)

    pictures = {"first": drawn()}
    found["losses"] = family_run(engine, 0, FAMILY_STEPS // 2, mean)
    path = commit(engine, out, f"family-{name}", mean)
    found["losses"] += family_run(engine, FAMILY_STEPS // 2, FAMILY_STEPS, mean)
    resumed = family_engine(ranks, name, way, "no")
    resumed.restore(path)
    again = family_run(resumed, FAMILY_STEPS // 2, FAMILY_STEPS)
    pictures["last"] = drawn()
    found["same"] = again == found["losses"][2:] and equal(weights(resumed), weights(engine))
    exports = {"trained": weights(engine), "ema": dict(engine.full_weights(mean.ema.weights))}
    if ranks.is_logger:
        for kind, tensors in {**exports, "pictures": pictures}.items():
            save_file(tensors, out / f"family-{name}-{kind}.safetensors")
    return found
