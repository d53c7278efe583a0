"""Every way to run an engine over ranks, on tiny families: trained, averaged, evaluated, drawn, exported and gone on with.

For tests whose ranks are processes of their own: they find this file where they put test/support on their path.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import families
import torch
from safetensors.torch import save_file
from sd3_speedups import cut

from difftrain import checkpoint
from difftrain.config.schema.sections import EmaSection, TrainConfig
from difftrain.device import choose
from difftrain.device.quantised import QuantisedLayer
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
    "flux-lora": {},
    "sdxl-lora": {"train_text_encoder": True},
    "flux-lora-nf4": {"base_dtype": "nf4"},
    "flux-lora-bf16": {"base_dtype": "bf16"},
}
# what is trained beside a family's own weights, which are held then
ADAPTERS: dict[str, dict[str, Any]] = {
    "flux-lora": {"type": "lora", "rank": 2},
    "sdxl-lora": {"type": "lora", "rank": 2},
    "flux-lora-nf4": {"type": "lora", "rank": 2, "scale_weight_norms": 0.02},
    "flux-lora-bf16": {"type": "lora", "rank": 2, "scale_weight_norms": 0.02},
}
ACCELERATE, OSS = {"training": {"engine": "accelerate"}}, {"optimizer": {"type": "oss"}}
# ways to run over ranks -> their sections of a configuration
WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "oss": OSS,
    "fsdp": {"training": {"engine": "fsdp"}},
    "hybrid": {"training": {"engine": "fsdp"}, "fsdp": {"shard": "hybrid", "shard_size": 2}},
    "pipeline": {"training": {"pipeline_stages": 2}},
    "accelerate": ACCELERATE,
    "fairscale": ACCELERATE | OSS,
    "zero1": ACCELERATE | {"deepspeed": {"enable": True, "zero_stage": 1}},
    "zero2": ACCELERATE | {"deepspeed": {"enable": True, "zero_stage": 2}},
    "zero3": ACCELERATE | {"deepspeed": {"enable": True, "zero_stage": 3}},
}
DRAWS_NOT = ("zero3",)  # refused by name
AT, STEPS = 2, 3  # updates before the checkpoint, and in all
CAPTIONS = ("a red cat on a table", "two dogs", "a ship", "snow on a hill")
COUNTS = {"samples": float(len(CAPTIONS))}


def assembled(cfg: TrainConfig, ranks: Ranks, family: Any, parts: Any, warm: list) -> CheckpointedEngine:
    engine = make_engine(cfg, choose("cpu"), ranks)
    assert not engine.faults(), engine.faults()
    engine.build(
        family,
        family.load() if parts is None else parts,
        lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=engine.dp_size),
        lambda made: make_schedule(cfg.optimizer, made, 20),
        warm,
    )
    assert isinstance(engine, CheckpointedEngine)
    return engine


def engine_of_drawn(cfg: TrainConfig) -> CheckpointedEngine:
    """Build an engine of one process whose frozen layers are drawn: blocks that begin as the identity would hide what is done to them."""
    family = families.made(cfg)
    parts = family.load()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for module in parts.root.modules():
            if isinstance(module, QuantisedLayer):
                module.take(0.05 * torch.randn(module.wide_shape, generator=generator))
            elif isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and not module.weight.requires_grad:
                module.weight.copy_(0.05 * torch.randn(module.weight.shape, generator=generator))
    bucket = families.bucket_of(cfg.model.family)
    return assembled(cfg, Ranks(), family, parts, [families.batch_of(family, bucket, parts=parts)])


def weights(engine: CheckpointedEngine, source: Any = None) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().contiguous() for name, tensor in engine.full_weights(source)}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def commit(engine: CheckpointedEngine, parent: Path, name: str, averages: Averages | None = None) -> Path:
    snapshot = engine.snapshot()

    def write(folder: Path) -> list[Path]:
        return [*snapshot.write(folder), *(averages.snapshot()(folder) if averages else [])]

    return checkpoint.commit(parent, f"{name}-state", write, engine.ranks, {"step": engine.position})


def family_engine(ranks: Ranks, name: str, way: str, precision: str = "no") -> CheckpointedEngine:
    """Build an engine on a tiny family. Micro batches: two where a replica has two samples or more."""
    kind = name.partition("-")[0]
    given = {"mixed_precision": precision, "gradient_checkpointing": name == "sd3", "accumulation": 2}
    sections = {section: dict(table) for section, table in WAYS[way].items()}
    sections["training"] = given | sections.get("training", {})
    sections["optimizer"] = {"learning_rate": LR} | sections.get("optimizer", {})
    sections["adapter"] = ADAPTERS.get(name, {})
    cfg = families.config(kind, sections, **FAMILIES[name])
    family = families.made(cfg)
    parts = family.load()
    families.trained_once(families.Tiny(family, parts, None))
    batch = families.batch_of(family, families.bucket_of(kind), CAPTIONS, parts=parts)
    return assembled(cfg, ranks, family, parts, [cut(batch, ranks.rank, ranks.size)])


def family_step(engine: CheckpointedEngine, step: int) -> float:
    """Make one update from four samples, dealt to replicas and micro batches."""
    family: Any = engine.family
    batch = families.batch_of(family, families.bucket_of(family.name), CAPTIONS, seed=step, parts=engine.parts)
    rank, size = engine.dp_rank, engine.dp_size
    ends = (0, 2, 4) if size <= 2 else (0, 4)
    micro = [cut(batch, rank, size, first, last) for first, last in pairwise(ends)]
    return float(engine.step(micro, COUNTS).sums["loss"])


def family_run(engine: CheckpointedEngine, first: int, last: int, averages: Averages | None = None) -> list[float]:
    found = []
    for step in range(first, last):
        found.append(family_step(engine, step))
        if averages is not None:
            averages.update(step)
    return found


def evaluated(engine: CheckpointedEngine) -> float:
    family: Any = engine.family
    batch = families.batch_of(family, families.bucket_of(family.name), CAPTIONS, seed=50, parts=engine.parts)
    return float(engine.evaluate([cut(batch, engine.dp_rank, engine.dp_size)])["loss"])


def drawn(engine: CheckpointedEngine, averages: Averages) -> torch.Tensor | None:
    """Draw from averaged weights, as a run does; None on a rank that draws nothing."""
    family: Any = engine.family
    prompt = Prompt("a cat", width=64, height=64, sample_steps=2, seed=5)
    if not (engine.dp_rank == 0 or engine.all_forward):
        return None
    with averages.averaged(), engine.drawing() as predict:
        if not engine.leads:
            return None
        drawer = family.drawer(engine.parts, predict)
        (picture,) = draw_pictures(drawer, [prompt], sampler="ddim" if family.name == "sdxl" else "flow_euler", seed=1)
    return torch.tensor(list(picture.image.getdata()), dtype=torch.float32)


def swapped_bits(ranks: Ranks, what: str) -> dict[str, Any]:
    """Train a small Flux with and without a block in host memory: an adapter, or all weights, updated in the backward."""
    found: dict[str, Any] = {"losses": [], "moved": []}
    trained: list[dict[str, torch.Tensor]] = []
    for waiting in (0, 1):
        sections: dict[str, Any] = {"memory": {"swap_blocks": waiting}, "optimizer": {"learning_rate": LR}}
        if what == "adapter":
            sections["adapter"] = ADAPTERS["flux-lora"]
        else:
            sections["optimizer"]["fused_backward"] = True
        family = families.made(families.config("flux", sections))
        parts = family.load()
        families.trained_once(families.Tiny(family, parts, None))
        batches = [
            families.batch_of(family, families.bucket_of("flux"), CAPTIONS, seed=s, parts=parts) for s in range(3)
        ]
        batches = [cut(batch, ranks.rank, ranks.size) for batch in batches]
        engine = assembled(family.cfg, ranks, family, parts, batches[:1])
        found["losses"].append([float(engine.step([batch], COUNTS).sums["loss"]) for batch in batches])
        found["moved"].append(engine.block_swap.moved_bytes if engine.block_swap else 0)
        trained.append(weights(engine))
    return found | {"same": equal(*trained)}


def family_case(ranks: Ranks, out: Path, name: str, way: str) -> dict[str, Any]:
    """Train, keep averages, evaluate, draw, export; and go on from the own checkpoint, to the same bits."""
    engine = family_engine(ranks, name, way)
    averages = Averages(EMA, engine)
    losses = family_run(engine, 0, AT, averages)
    path = commit(engine, out, f"{name}-{way}", averages)
    losses += family_run(engine, AT, STEPS, averages)
    found: dict[str, Any] = {"losses": losses, "evaluated": evaluated(engine)}
    picture = None if way in DRAWS_NOT else drawn(engine, averages)
    trained, averaged = weights(engine), weights(engine, averages.ema.weights if averages.ema else None)
    found["resumed"] = family_taken_up(ranks, path, name, way, trained)
    if ranks.is_logger:
        save_file(trained, out / f"{name}-{way}-trained.safetensors")
        save_file(averaged, out / f"{name}-{way}-averaged.safetensors")
        if picture is not None:
            save_file({"picture": picture}, out / f"{name}-{way}-picture.safetensors")
    return found


def family_taken_up(
    ranks: Ranks, path: Path, name: str, way: str, trained: dict[str, torch.Tensor] | None
) -> list[Any]:
    """Go on from a checkpoint of any way: the losses from there, and whether the weights are then those of `trained`."""
    engine = family_engine(ranks, name, way)
    engine.restore(path)
    averages = Averages(EMA, engine)
    averages.load(path, ranks, AT)
    losses = family_run(engine, AT, STEPS, averages)
    return [losses, trained is not None and equal(weights(engine), trained)]
