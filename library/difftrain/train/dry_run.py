"""`--dry_run`: what a run would be, in numbers, without a device. It reads the data's index and builds it where needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from difftrain.cache.request import cache_requests, estimate_storage
from difftrain.config import TrainConfig
from difftrain.config.paths import PendingFiles
from difftrain.config.toml import dump
from difftrain.contracts import Bucket, ConfigFault, Family, Group, Parts
from difftrain.data.evaluation_sets import open_set
from difftrain.data.loader import check_sizes
from difftrain.data.plan.plan import EpochPlan, why
from difftrain.data.prepare import global_batches, prepare
from difftrain.distributed.launch import Launch
from difftrain.engine.fused import parts_of
from difftrain.engine.half_precision import weights_kept
from difftrain.engine.master_weights import DTYPES
from difftrain.evaluation.features import INSTALL, NAME
from difftrain.evaluation.features import missing as packages_missing
from difftrain.evaluation.losses import TENTHS
from difftrain.hub.client import endpoint
from difftrain.hub.fetch import looked_up
from difftrain.hub.ids import TOKENIZERS, HubRequest
from difftrain.models.registry import make_family
from difftrain.optim import make_optimizer
from difftrain.optim.muon import is_matrix
from difftrain.train.check import check
from difftrain.train.drawing import prompts_of
from difftrain.train.run_dir import describe_run_directory
from difftrain.train.session import open_run_data, plan_run

if TYPE_CHECKING:
    from difftrain.data.prepare import Data

GIB = float(1 << 30)
FP32, HALF = 4, 2
KEPT_BYTES = {"fp32": 4, "kahan": 2}  # beside a weight in half precision


def dry_run(cfg: TrainConfig, say: Callable[[str], None] = print, coming: PendingFiles | None = None) -> int:
    """Print resolved configuration, batch arithmetic, steps and epochs, parameters, memory and FLOPs; return 0.

    coming: what the run itself would make before it begins; it is named, and what hangs on it is left out.
    """
    # what the configuration alone says
    ranks = Launch.from_environment().size
    say(dump(cfg))
    say(f"batch: {batch_arithmetic(cfg, ranks)}")

    # model and family, as far as they are here
    cfg, missing = looked_up(cfg)
    family = make_family(cfg)
    parts = _checked(cfg, family, missing) if coming is None else _checked_before(cfg, family)
    for each in missing:
        say(f"would be fetched for {each.flag}: {each.kind} {each.id}, from {endpoint()}")

    # what hangs on files that are not here yet is left out
    if coming:
        say(f"would be made before training: {coming.what}")
        for line in (*parameters(parts), *memory(cfg, parts, ranks)) if parts else ():
            say(line)
        say("dry run: figures of what is not here are left out; nothing was made or written, and no device was touched")
        return 0
    if parts is None:
        say("dry run: figures of what is not here are left out; nothing was fetched, and no device was touched")
        return 0

    # output folder, prompts, data and plan, as training would find them
    say(describe_run_directory(cfg, ranks))
    for note in prompts_of(cfg).notes:
        say(f"samples: {note}")
    data = open_run_data(cfg, prepare(cfg, log=say), family)
    plan, total = plan_run(_seeded(cfg), data, ranks)

    # encoders that caches stand in for take no memory of the card
    caches = cache_requests(cfg, family, parts, data)
    parts.offloaded |= {name for wish in caches for name in wish.encoder.modules}
    for line in (
        *length(cfg, plan, total),
        *(f"{estimate_storage(w, data).size_sentence()} {'on disk' if w.to_disk else 'of memory'}" for w in caches),
        *parameters(parts),
        *memory(cfg, parts, ranks),
        *flops(family, parts, cfg, data, plan, total),
        *evaluation(cfg, family, parts),
    ):
        say(line)
    say("dry run: nothing was trained and no device was touched")
    return 0


def evaluation(cfg: TrainConfig, family: Family, parts: Parts) -> Iterator[str]:
    """Open every evaluation set, and say what looking at it takes. Raises DataFault where nothing can be made of one."""
    for section in cfg.eval.sets:
        name, said = f"evaluation set {section.name}", list[str]()
        each = open_set(cfg, section, said.append)
        yield from (f"{name}: {line}" for line in said)
        check_sizes(each.data.tables, family.features)
        records, weights = sum(rows.records for rows in each.data.tables.training), 1 + cfg.ema.enable
        looks = f"{records:,} pictures x {len(TENTHS)} quantiles x {weights} weight{'s'[: weights > 1]}"
        yield f"{name}: {looks} = {records * len(TENTHS) * weights:,} images forward each time"
        for wish in cache_requests(each.cfg, family, parts, each.data, trains=False):
            yield f"{name}: {estimate_storage(wish, each.data).size_sentence()}"
    if cfg.eval.kid and (lacking := packages_missing()):
        yield f"{NAME}: {' and '.join(lacking)} not installed, so it would not be measured; {INSTALL}"


def _checked(cfg: TrainConfig, family: Family, missing: list[HubRequest]) -> Parts | None:
    """Return the parts without weights; None where they are still to be fetched. Raises ConfigFault for all else."""
    try:
        return check(cfg, family)
    except ConfigFault as error:
        others = [fault for fault in error.faults if fault.where not in {each.flag for each in missing}]
        if others or not missing:
            raise ConfigFault(others or error.faults) from None
    return None if any(each.field not in TOKENIZERS for each in missing) else family.load(meta=True)


def _checked_before(cfg: TrainConfig, family: Family) -> Parts | None:
    """Do so but for what is still to be made: weights with their tokenizers, and prompts. Raises ConfigFault."""
    if cfg.sample.prompts and not Path(cfg.sample.prompts).exists():
        cfg = cfg.model_copy(update={"sample": cfg.sample.model_copy(update={"prompts": None})})
    weights_there = not cfg.model.pretrained or Path(cfg.model.pretrained).exists()
    parts = check(cfg, family, () if weights_there else ("model.pretrained",))
    return parts if weights_there else None


def _seeded(cfg: TrainConfig) -> TrainConfig:
    """Give a seed to a run that would draw one: no figure here depends on it."""
    if cfg.training.seed is not None:
        return cfg
    return cfg.model_copy(update={"training": cfg.training.model_copy(update={"seed": 0})})


def batch_arithmetic(cfg: TrainConfig, ranks: int) -> str:
    """Spell how micro batches make a global one."""
    sizes, images = (", ".join(map(str, numbers)) for numbers in (cfg.batch_sizes, global_batches(cfg, ranks)))
    return (
        f"{sizes} images a micro batch x {cfg.training.accumulation} accumulated x {ranks} "
        f"rank{'s' if ranks > 1 else ''} = {images} images a step"
        + (", by data set" if len(cfg.batch_sizes) > 1 else "")
    )


def length(cfg: TrainConfig, plan: EpochPlan, total: int) -> Iterator[str]:
    """Say how steps, epochs and repeats hang together here."""
    yield from plan.lines()
    epochs = plan.locate(total - 1)[0] + 1 if total else 0
    yield f"length: {total} steps in {epochs} epochs ({why(cfg.training, plan)}), {total * plan.mean_batch:.0f} images seen"


def modules(parts: Parts) -> dict[str, nn.Module]:
    """Return every part by name, trained ones first."""
    return {**dict(parts.root.named_children()), **parts.frozen}


def trained(module: nn.Module) -> int:
    """Count the parameters that are trained."""
    return sum(each.numel() for each in module.parameters() if each.requires_grad)


def parameters(parts: Parts) -> Iterator[str]:
    """Count parameters by part."""
    total = 0
    for name, module in modules(parts).items():
        count, moving = sum(each.numel() for each in module.parameters()), trained(module)
        total += count
        how = "frozen" if not moving else "trained" if moving == count else f"{moving:,} of them trained"
        yield f"parameters of {name}: {count:,}, {how}"
    yield f"parameters in all: {total:,}, {trained(parts.root):,} trained"


@dataclass(frozen=True)
class MemoryItem:
    """One line of the estimate: how many bytes, and by which formula."""

    what: str
    size: float
    formula: str


def needs(cfg: TrainConfig, parts: Parts, ranks: int) -> list[MemoryItem]:
    """Estimate what one card holds at all times, by formula; activations come on top."""
    training, moving = cfg.training, trained(parts.root)
    wide = HALF if training.full_precision else FP32  # of a weight that is computed with, and of a gradient

    # weights, trained and frozen, with what low precision keeps beside them
    weights = sum(each.numel() * min(each.element_size(), wide) for each in parts.root.parameters())
    held = [part for name, part in parts.frozen.items() if name not in parts.offloaded]
    frozen = sum(each.numel() * each.element_size() for part in held for each in part.parameters())
    found = [
        MemoryItem(
            f"weights in {training.full_precision or 'fp32'}", weights, f"{wide} B a parameter of what is trained"
        ),
        MemoryItem("frozen weights", frozen, "in the precision that they are kept in"),
    ]
    kept = weights_kept(training)
    if training.full_precision and kept in KEPT_BYTES:
        found.append(
            MemoryItem(f"beside them ({kept})", KEPT_BYTES[kept] * moving, f"{KEPT_BYTES[kept]} B a trained parameter")
        )

    # of each step: gradients and copies
    alive, formula = gradients_alive(cfg, parts)
    found.append(MemoryItem("gradients", wide * alive, f"{wide} B {formula}"))
    if training.mixed_precision != "no" and not training.full_precision:
        found.append(MemoryItem("casts of autocast", 2 * moving, "2 B a trained parameter"))
    if ranks > 1 and not training.ddp_bucket_view and alive == moving:
        found.append(
            MemoryItem("gradient buckets", wide * moving, f"{wide} B a trained parameter; none with bucket views")
        )

    # optimizer state, of which sharding leaves each rank its part
    each = state_bytes(cfg, matrix_share(parts))
    shards = ranks if cfg.optimizer.type.lower() == "oss" else 1
    formula = f"{each:g} B a trained parameter" + (f", sharded over {shards} ranks" if shards > 1 else "")
    found.append(MemoryItem("optimizer state", each * moving / shards, formula))

    # averages, always in fp32
    if cfg.ema.enable:
        found.append(MemoryItem("averaged weights", FP32 * moving, "4 B a trained parameter"))
    if cfg.ema.profiles:
        count = len(cfg.ema.profiles)
        found.append(
            MemoryItem(f"averages of {count} widths", count * FP32 * moving, "4 B a trained parameter and width")
        )
    return found


def gradients_alive(cfg: TrainConfig, parts: Parts) -> tuple[int, str]:
    """Count the gradients that are in memory at once, and say of what; updates during the backward pass free them."""
    named = [(name, each) for name, each in parts.root.named_parameters() if each.requires_grad]
    section = cfg.optimizer
    if not (section.fused_backward or section.fused_groups) or cfg.training.accumulation > 1:
        return sum(each.numel() for _, each in named), "a trained parameter"
    sizes = {name: each.numel() for name, each in named}
    together = parts_of([Group("all", named, 0.0)], section.fused_groups)
    what = "a parameter of the largest group" if section.fused_groups else "for each number of the largest parameter"
    return max(sum(sizes[name] for name in names) for names in together), what


def matrix_share(parts: Parts) -> float:
    """Return the share of the trained numbers that are in matrices, as Muon takes them."""
    named = [(name, each) for name, each in parts.root.named_parameters() if each.requires_grad]
    return sum(each.numel() for name, each in named if is_matrix(name, each)) / sum(each.numel() for _, each in named)


def state_bytes(cfg: TrainConfig, matrices: float = 1.0) -> float:
    """Return the bytes of state that the optimizer keeps for a parameter: counted on small ones after a step.

    matrices: the share of matrices within blocks, of which Muon keeps less.
    """
    full = cfg.training.full_precision
    dtype = DTYPES[full] if full and weights_kept(cfg.training) == "none" else torch.float32
    shares = {"blocks.0.probe": matrices, "probe": 1 - matrices}
    probes = {name: nn.Parameter(torch.full((256, 256), 1e-2, dtype=dtype)) for name in shares}
    group = Group("probe", list(probes.items()), cfg.optimizer.learning_rate or 1.0)
    optimizer = make_optimizer(cfg.optimizer, [group], dp_size=1, fused_ok=False)
    for probe in probes.values():
        probe.grad = torch.full_like(probe, 1e-3)
    optimizer.step()
    return sum(share * _state_of(optimizer.state[probes[name]], probes[name]) for name, share in shares.items())


def _state_of(state: dict[str, Any], probe: torch.Tensor) -> float:
    kept = (each for each in state.values() if torch.is_tensor(each) and each.numel() > 1)
    return sum(each.numel() * each.element_size() for each in kept) / probe.numel()


def memory(cfg: TrainConfig, parts: Parts, ranks: int) -> Iterator[str]:
    """Spell the estimate."""
    found = needs(cfg, parts, ranks)
    for need in found:
        yield f"memory of a card: {need.what} {need.size / GIB:.4g} GiB ({need.formula})"
    total = sum(need.size for need in found) / GIB
    yield f"memory of a card: {total:.4g} GiB in all, without activations, which grow with batch and resolution"


def flops(family: Family, parts: Parts, cfg: TrainConfig, data: Data, plan: EpochPlan, total: int) -> Iterator[str]:
    """Estimate the work: of an image at --resolution, of a mean step over the buckets, of the run."""
    width, height = cfg.data.resolution or (1024, 1024)
    main = family.flops_per_sample(parts, Bucket(height, width))
    yield f"FLOPs of an image at {width}x{height}: {scaled(main)}, forward and backward, recomputation not counted"
    rows = data.tables.training
    uses = sum(each.uses for each in rows)
    step = sum(family.flops_per_sample(parts, each.bucket) * each.uses for each in rows) / uses * plan.mean_batch
    yield f"FLOPs of a step, the mean over the buckets: {scaled(step)}; of the run: {scaled(step * total)}"


def scaled(value: float) -> str:
    """Write a large number with its prefix: 20.24 T."""
    prefixes = " kMGTPEZY"
    power = min(int(math.log10(value) // 3), len(prefixes) - 1) if value >= 1 else 0
    return f"{value / 1000**power:.4g} {prefixes[power]}".strip()
