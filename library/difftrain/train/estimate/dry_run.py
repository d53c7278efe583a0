"""`--dry_run`: what a run would be, and whether it fits, without a device. It builds the data's index where needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from difftrain.cache.request import cache_requests, caches_anything, duration_text, estimate_storage
from difftrain.config import TrainConfig
from difftrain.config.hidden_imports import collect_again
from difftrain.config.paths import PendingFiles
from difftrain.config.schema.families import row_of
from difftrain.config.spellings.spelling import option
from difftrain.config.toml import dump
from difftrain.contracts import Bucket, ConfigFault, DataFault, Family, Fault, Parts
from difftrain.data.evaluation_sets import open_set
from difftrain.data.loader import check_sizes
from difftrain.data.plan.plan import EVERY, EpochPlan, why
from difftrain.data.prepare import global_batches, prepare
from difftrain.device.free_memory import free_memory
from difftrain.device.quantised import count_parameters
from difftrain.distributed.launch import Launch
from difftrain.distributed.partition import Cut
from difftrain.evaluation.features import INSTALL, NAME
from difftrain.evaluation.features import missing as packages_missing
from difftrain.evaluation.losses import TENTHS
from difftrain.hub.client import endpoint
from difftrain.hub.fetch import looked_up
from difftrain.hub.ids import TOKENIZERS, HubRequest
from difftrain.models.registry import make_family
from difftrain.report.run_files import read_run
from difftrain.train.check import check
from difftrain.train.drawing import prompts_of
from difftrain.train.estimate.communication import Cluster, cut_size, kinds, scaling, size_of, spread_of
from difftrain.train.estimate.fitting import fault, fitted, usual_bucket
from difftrain.train.estimate.footprint import (
    GIB,
    RESERVE,
    DeviceMemory,
    cached_parts,
    device_memory,
    disk,
    gib_text,
    memory_by_ranks,
    trained,
)
from difftrain.train.run_dir import describe_run_directory, run_dirs
from difftrain.train.session import open_run_data, plan_run

if TYPE_CHECKING:
    from difftrain.data.plan.tables import BucketRows
    from difftrain.data.prepare import Data

_RUNS_LOOKED_AT = 5


def dry_run(
    cfg: TrainConfig,
    log: Callable[[str], None] = print,
    coming: PendingFiles | None = None,
    *,
    full: bool = False,
    for_ranks: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> int:
    """Print what the run would be in ten lines; return 0.

    full: also the resolved configuration, buckets, parameters, memory item by item, FLOPs and evaluation sets. coming:
    what the run itself would make before it begins; it is named, and what hangs on it is left out. for_ranks: numbers of
    ranks to say scaling for, "8,64,1024". progress: told what takes a while.
    """
    # --- model and family, as far as they are here
    world = Launch.from_environment().size
    ranks, asked = cfg.replicas(world), numbers_of(for_ranks)
    hub_cfg, (cfg, missing) = cfg, looked_up(cfg)
    family = make_family(cfg)
    parts = _checked(cfg, family, missing) if coming is None else _checked_before(cfg, family)
    fetched = [
        f"would be fetched for {file.flag}: {file.kind} {file.id}, from {file.id.hub or endpoint()}" for file in missing
    ]
    log(f"model: {model_line(cfg, parts)}")
    for line in stage_lines(cfg, family, parts):
        log(line)

    # --- what hangs on files that are not here yet is left out
    if coming or parts is None:
        log(f"batch: {batch_arithmetic(cfg, ranks)}")
        for line in (*fetched, *([f"would be made before training: {coming.what}"] if coming else [])):
            log(line)
        if parts:
            parts.offloaded |= cached_parts(cfg, parts)
            bucket = usual_bucket(cfg, family)
            by_ranks = memory_by_ranks(cfg, family, parts, (world, *asked), *bucket)
            memory = by_ranks[world]
            log(f"memory: {memory.sentence()}")
            for line in (*parameters(parts), *memory_lines(memory)) if full else ():
                log(line)
            for line in scaling_lines(cfg, family, parts, by_ranks, world, *bucket, asked=full or bool(asked)):
                log(line)
        elif not coming:
            for line in _as_shipped(cfg, ranks):
                log(line)
        done = "made or written" if coming else "fetched"
        log(f"dry run: figures for what is not present are left out; nothing was {done}, and no device was touched")
        return 0

    # --- output folder, prompts, data and plan, as training would find them
    collect_again()  # nearly all is imported
    where, notes = describe_run_directory(cfg, world), prompts_of(cfg).notes
    data = open_run_data(cfg, prepare(cfg, log=progress), family)
    plan, total = plan_run(_seeded(cfg), data, ranks)
    epochs = plan.locate(total - 1)[0] + 1 if total else 0
    rows = data.tables.training
    shown = cfg.data.num_control
    pairs = f", each with {shown} reference image{'s'[: shown != 1]}" if shown else ""
    pairs += " of the pipeline's size" if shown and cfg.data.control_size == "area" else ""
    log(f"data: {sum(row.records for row in rows):,} samples in {len(rows)} bucket{'s'[: len(rows) != 1]}{pairs}")
    log(f"steps: {total:,} in {epochs:,} epoch{'s'[: epochs != 1]}, {total * plan.mean_batch:,.0f} samples seen")
    log(f"batch: {batch_arithmetic(cfg, ranks)}")

    # --- memory and disk: encoders that caches stand in for take no memory of the card
    unread = [file.flag for file in missing]  # tokenizers, since everything else is here
    caches = [] if unread else cache_requests(cfg, family, parts, data)
    parts.offloaded |= cached_parts(cfg, parts) if unread else {n for wish in caches for n in wish.encoder.modules}
    files, counts = disk(cfg, parts, total, epochs, plan.mean_batch), list(parameters(parts))
    evaluated = list(evaluation(cfg, family, parts)) if full else []
    bucket = _largest_bucket(cfg, data)
    by_ranks = memory_by_ranks(cfg, family, parts, (world, *asked), *bucket)
    memory = by_ranks[world]
    spoken = list(scaling_lines(cfg, family, parts, by_ranks, world, *bucket, asked=full or bool(asked)))
    log(f"memory: {memory.sentence()}")
    log(f"free: {free_line(cfg, memory)}")
    fitting = None if cfg.memory.memory_gib is None else fitted(cfg, bucket[0], world)
    if fitting is not None:
        log(f"fit: {fitting.sentence()}")
    log(f"disk: {files.sentence(cfg.output_dir)}")
    log(where)
    log(f"time: {time_line(cfg, total * plan.mean_batch, world)}")

    if fitting is not None and (faults := list(fault(fitting))):
        raise ConfigFault(faults)

    # --- all the rest
    for line in spoken:
        log(line)
    if not full:
        for line in fetched:
            log(line)
        log("dry run: nothing was trained and no device was touched; --dry_run=full says more")
        return 0
    cached = [f"{estimate_storage(w, data).size_sentence()} {'on disk' if w.to_disk else 'of memory'}" for w in caches]
    if unread and caches_anything(cfg):
        cached.append(f"cache: its size is left out until {' and '.join(unread)} can be read")
    log(dump(hub_cfg))
    for line in (
        *fetched,
        *(f"samples: {note}" for note in notes),
        *length(cfg, plan, total),
        *cached,
        *counts,
        *memory_lines(memory),
        *flops(family, parts, cfg, data, plan, total),
        *evaluated,
    ):
        log(line)
    log("dry run: nothing was trained and no device was touched")
    return 0


def stage_lines(cfg: TrainConfig, family: Family, parts: Parts | None) -> list[str]:
    """Say how the model is cut into the stages of a pipeline, where it is."""
    if cfg.training.pipeline_stages == 1 or parts is None:
        return []
    lines = Cut.of(cfg, family.chain(parts.root), parts.root).lines(cfg)
    return lines


def model_line(cfg: TrainConfig, parts: Parts | None) -> str:
    """Say which model it is, how much of it is trained, and in which precision."""
    training, row = cfg.training, row_of(cfg)
    computed = {"no": "fp32"}.get(training.mixed_precision, training.mixed_precision)
    weights = f", weights in {training.full_precision}" if training.full_precision else ""
    if parts is None:
        return f"{row.title}, computed in {computed}{weights}"
    total = sum(count_parameters(module) for module in modules(parts).values())
    return f"{row.title}, {trained(parts.root):,} of {total:,} parameters trained, computed in {computed}{weights}"


def _largest_bucket(cfg: TrainConfig, data: Data) -> tuple[Bucket, int]:
    """Return the bucket and micro batch with the most pixels in a step."""

    def pixels(row: BucketRows) -> int:
        return row.bucket.frames * row.bucket.height * row.bucket.width * cfg.batch_sizes[row.group]

    largest = max(data.tables.training, key=pixels)
    return largest.bucket, cfg.batch_sizes[largest.group]


def free_line(cfg: TrainConfig, memory: DeviceMemory) -> str:
    """Say what is free, and whether the run fits."""
    free = free_memory(cfg.training.device)
    if free.free is None:
        return f"not known for {free.what}: {free.why}"
    of = f" of {free.total / GIB:.4g}" if free.total else ""
    room = f"with {RESERVE / GIB:g} GiB for driver and libraries it {memory.verdict(free.free)}"
    return f"{free.free / GIB:.4g}{of} GiB on {free.what}: {room}"


def time_line(cfg: TrainConfig, samples: float, ranks: int) -> str:
    """Say how long it would take at the speed of an earlier run in the same place, on as many devices."""
    base = cfg.output_dir
    folders = run_dirs(base) if cfg.save.run_dirs else [base]
    for folder in folders[:_RUNS_LOOKED_AT]:
        try:
            run = read_run(folder)
        except DataFault:
            continue
        speed = run.figures().get("fps")
        if not speed or speed <= 0 or run.world_size not in (0, ranks):
            continue
        if run.config.get("model.family", cfg.model.family) != cfg.model.family:
            continue
        return f"{duration_text(samples / speed)} at {speed:.4g} images/s, the speed of {folder.name} there"
    return "not known: no earlier run in the output folder shows the speed"


def evaluation(cfg: TrainConfig, family: Family, parts: Parts) -> Iterator[str]:
    """Open every evaluation set, and say what looking at it takes. Raises DataFault where nothing can be made of one."""
    for section in cfg.eval.sets:
        name, notes = f"evaluation set {section.name}", list[str]()
        eval_set = open_set(cfg, section, notes.append)
        yield from (f"{name}: {line}" for line in notes)
        check_sizes(eval_set.data.tables, family.features)
        records, weights = sum(rows.records for rows in eval_set.data.tables.training), 1 + cfg.ema.enable
        looks = f"{records:,} images x {len(TENTHS)} quantiles x {weights} weight{'s'[: weights > 1]}"
        yield f"{name}: {looks} = {records * len(TENTHS) * weights:,} forward passes of an image per evaluation"
        for wish in cache_requests(eval_set.cfg, family, parts, eval_set.data, trains=False):
            yield f"{name}: {estimate_storage(wish, eval_set.data).size_sentence()}"
    if cfg.eval.kid and (lacking := packages_missing()):
        yield f"{NAME}: {' and '.join(lacking)} not installed, so it would not be measured; {INSTALL}"


def _as_shipped(cfg: TrainConfig, ranks: int) -> Iterator[str]:
    """Estimate the memory by the family's own size, so that it is known before weights are fetched whether they fit."""
    row, model = row_of(cfg), cfg.model
    if row.sizes[0] in ("tiny", "demo"):
        return
    encoders = [f"text_encoder{number}" for number in range(1, len(row.encoders) + 1)]
    without = dict.fromkeys(("pretrained", "vae", "transformer", *encoders))
    cfg = cfg.model_copy(update={"model": model.model_copy(update={**without, "init_from_config": row.sizes[0]})})
    try:
        family = make_family(cfg)
        parts = family.load(meta=True)
        parts.offloaded |= cached_parts(cfg, parts)
        memory = device_memory(cfg, family, parts, ranks, *usual_bucket(cfg, family))
    except ConfigFault:  # the configuration belongs to weights of another size
        return
    yield f"memory: {memory.sentence()}"
    yield f"free: {free_line(cfg, memory)}"
    yield f"memory is that of {row.title} in its size {row.sizes[0]}, as the weights are not here"


def _checked(cfg: TrainConfig, family: Family, missing: list[HubRequest]) -> Parts | None:
    """Return the parts without weights; None where they are still to be fetched. Raises ConfigFault for all else."""
    try:
        return check(cfg, family)
    except ConfigFault as error:
        others = [fault for fault in error.faults if fault.where not in {file.flag for file in missing}]
        if others or not missing:
            raise ConfigFault(others or error.faults) from None
    return None if any(file.field not in TOKENIZERS for file in missing) else family.load(meta=True)


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
        f"{sizes} image{'s'[: sizes != '1']} a micro batch x {cfg.training.accumulation} accumulated x {ranks} "
        f"rank{'s' if ranks > 1 else ''} = {images} image{'s'[: images != '1']} a step"
        + cfg.batches_by
        + (", fewer where a bucket or an epoch ends" if cfg.data.epoch_batches == EVERY else "")
    )


def length(cfg: TrainConfig, plan: EpochPlan, total: int) -> Iterator[str]:
    """Say how steps, epochs and repeats hang together here."""
    yield from plan.lines()
    epochs = plan.locate(total - 1)[0] + 1 if total else 0
    yield f"length: {total} step{'s'[: total != 1]} in {epochs} epoch{'s'[: epochs != 1]} ({why(cfg.training, plan)}), {total * plan.mean_batch:.0f} images seen"


def modules(parts: Parts) -> dict[str, nn.Module]:
    """Return every part by name, trained ones first."""
    return {**dict(parts.root.named_children()), **parts.frozen}


def parameters(parts: Parts) -> Iterator[str]:
    """Count parameters by part."""
    total = 0
    for name, module in modules(parts).items():
        count, moving = count_parameters(module), trained(module)
        total += count
        how = "frozen" if not moving else "trained" if moving == count else f"{moving:,} of them trained"
        yield f"parameters of {name}: {count:,}, {how}"
    yield f"parameters in all: {total:,}, {trained(parts.root):,} trained"


def memory_lines(memory: DeviceMemory) -> Iterator[str]:
    """Spell the estimate item by item."""
    for item in memory.items:
        yield f"device memory: {item.what} {gib_text(item.size)} ({item.formula})"
    images = f"{memory.batch} x {memory.bucket}"
    yield f"device memory: a step of {images} {gib_text(memory.step)} (gradients, casts and activations at its peak)"
    yield f"device memory, estimated: {gib_text(memory.total)} in all, without driver and libraries"


def numbers_of(counts: str) -> tuple[int, ...]:
    """Read "8,64,1024". Raises ConfigFault."""
    words = [word.strip() for word in counts.split(",") if word.strip()]
    if any(not word.isdecimal() or not 1 <= int(word) <= 1_000_000 for word in words):
        what = f"must be numbers of ranks with commas between them, got {counts!r}"
        raise ConfigFault([Fault("--dry_run_ranks", what, "--dry_run_ranks=8,64,1024")])
    return tuple(dict.fromkeys(map(int, words)))


def scaling_lines(
    cfg: TrainConfig,
    family: Family,
    parts: Parts,
    by_ranks: Mapping[int, DeviceMemory],
    ranks: int,
    bucket: Bucket,
    batch: int,
    *,
    asked: bool,
) -> Iterator[str]:
    """Say what ranks send one another in a step, and how speed and memory go with their number, every rank as busy.

    asked: also for one rank, which sends nothing.
    """
    if ranks == 1 and not asked:
        return
    if cfg.training.sequence_parallel > 1:
        yield f"scaling: what ranks exchange with {option('training.sequence_parallel')} is not estimated"
        return
    cluster, model = Cluster(), size_of(parts.root, family.repeated(parts))
    stages = cfg.training.pipeline_stages
    if stages > 1:
        model = cut_size(cfg, family, parts.root.to("meta"), model, bucket, batch)
    work = family.flops_per_sample(parts, bucket) * batch * cfg.training.accumulation / stages
    for count, memory in sorted(by_ranks.items()):
        if count % stages:
            yield f"scaling: {count:,} ranks: no multiple of {option('training.pipeline_stages')}={stages}"
            continue
        outlook = scaling(spread_of(cfg, count), model, work, cluster)
        by_kind = ", ".join(f"{kind} {gib_text(size)}" for kind, size in kinds(outlook.exchanged).items())
        sends = f"sends {gib_text(outlook.sent)} a step ({by_kind})" if by_kind else "sends nothing"
        worst, best = (f"{100 * share:.0f}" for share in outlook.efficiency)
        speed = f"{worst}{f' to {best}' if best != worst else ''} % of its speed alone"
        images = outlook.spread.replicas * batch * cfg.training.accumulation
        yield (
            f"scaling: {count:,} rank{'s'[: count != 1]}: {gib_text(memory.total)} a rank, each {sends}; "
            f"{images:,} images a step, each rank at {speed}"
        )
    yield f"scaling, {cluster.sentence()}; the lower figure where nothing of it overlaps with computing"


def flops(family: Family, parts: Parts, cfg: TrainConfig, data: Data, plan: EpochPlan, total: int) -> Iterator[str]:
    """Estimate the work: of an image at --resolution, of a mean step over the buckets, of the run."""
    width, height = cfg.data.resolution or (1024, 1024)
    main = family.flops_per_sample(parts, Bucket(height, width))
    yield f"FLOPs of an image at {width}x{height}: {scaled(main)}, forward and backward, recomputation not counted"
    rows = data.tables.training
    uses = sum(row.uses for row in rows)
    step = sum(family.flops_per_sample(parts, row.bucket) * row.uses for row in rows) / uses * plan.mean_batch
    yield f"FLOPs of a step, the mean over the buckets: {scaled(step)}; of the run: {scaled(step * total)}"


def scaled(value: float) -> str:
    """Write a large number with its prefix: 20.24 T."""
    prefixes = " kMGTPEZY"
    power = min(int(math.log10(value) // 3), len(prefixes) - 1) if value >= 1 else 0
    return f"{value / 1000**power:.4g} {prefixes[power]}".strip()
