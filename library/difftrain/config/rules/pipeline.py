"""Rules about a model that is cut over several devices: how it is cut, what that cannot go with, and what it costs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from difftrain.config.rules.finding import Finding, value_of
from difftrain.config.schema import names
from difftrain.config.schema.rates import is_named
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import default_of
from difftrain.config.spellings.spelling import option

_ENGINE, _TYPE = "training.engine", "optimizer.type"
_SEQUENCE = "training.sequence_parallel"
_STAGES, _SCHEDULE = "training.pipeline_stages", "training.pipeline_schedule"
_METHOD, _SPLIT = "training.partition_method", "training.partition_split"


def pipeline(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What a model that is cut into stages cannot go with, and how it is cut."""
    training = cfg.training
    stages = training.pipeline_stages
    if stages == 1:
        for field in (_SCHEDULE, _METHOD, _SPLIT):
            if field in requested and value_of(cfg, field) != default_of(field):
                yield Finding((field,), f"has no effect with {option(_STAGES)}=1: the model is not cut", note=True)
        return
    world = processes_started()
    if world and not cfg.cache.only and (wrong := processes_fault(cfg, world)):
        yield Finding((_STAGES,), *wrong)

    # --- how it is cut
    method = training.partition_method
    if method not in (names.BY_PARAMETERS, names.EVENLY, names.BY_HAND) and not method.startswith(names.BY_KIND):
        what = f"got {method!r}"
        yield Finding(
            (_METHOD,), what, f"{names.BY_PARAMETERS}, {names.EVENLY}, {names.BY_KIND}REGEX or {names.BY_HAND}"
        )
    elif method.startswith(names.BY_KIND):
        try:
            re.compile(method.removeprefix(names.BY_KIND))
        except re.error as error:
            yield Finding((_METHOD,), f"{method!r} is no regular expression: {error}")
    pieces = stages * names.PIECES[training.pipeline_schedule]
    split = training.partition_split
    if method == names.BY_HAND and len(split) != pieces - 1:
        what = f"has {len(split)} numbers, and the model is cut at {pieces - 1} places"
        yield Finding((_SPLIT, _METHOD), what, "the blocks with which the stages behind the first one begin")
    elif method == names.BY_HAND and list(split) != sorted({max(number, 2) for number in split}):
        yield Finding((_SPLIT,), f"is {list(split)}", "growing numbers of blocks, from 2 on")
    elif method != names.BY_HAND and split:
        yield Finding((_SPLIT, _METHOD), f"needs {option(_METHOD)}={names.BY_HAND}: {method} finds the places itself")

    # --- what it cannot go with
    remedy = f"leave it out, or {option(_STAGES)}=1"
    for field, value in (
        (_ENGINE, training.engine != "native" and training.engine),
        ("optimizer.fused_backward", cfg.optimizer.fused_backward),
        ("optimizer.fused_groups", cfg.optimizer.fused_groups),
        ("model.fp8_frozen", cfg.model.fp8_frozen),
        ("logging.trace", cfg.logging.trace),
        ("demo.score", cfg.demo.score),
    ):
        if value:
            yield Finding((field, _STAGES), f"cannot be used with {option(_STAGES)}={stages}", remedy)
    if is_named(cfg.optimizer, names.ADAPTIVE) or cfg.optimizer.type.lower() == "oss":
        needs = (
            "shards its state over all ranks" if cfg.optimizer.type.lower() == "oss" else "needs all gradients at once"
        )
        what = f"{cfg.optimizer.type} {needs}, and each rank has those of its stage"
        yield Finding((_TYPE, _STAGES), what, f"{option(_TYPE)}=AdamW")
    for field in ("training.ddp_bucket_view", "training.ddp_static_graph"):
        if value_of(cfg, field):
            yield Finding((field, _STAGES), "has no effect: no DistributedDataParallel reduces a pipeline", note=True)

    # --- what it costs
    if training.accumulation < stages:
        share = waiting_share(stages, training.accumulation, training.pipeline_schedule)
        what = (
            f"with {training.accumulation} micro batch{'es' if training.accumulation > 1 else ''} a step, devices wait "
            f"{100 * share:.0f} % of the time for one another"
        )
        yield Finding((_STAGES,), what, f"{option('training.accumulation')}={4 * stages} waits less", note=True)


def sequence(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What ranks that share the tokens of a sample cannot go with."""
    training, size = cfg.training, cfg.training.sequence_parallel
    if size == 1:
        return
    world = processes_started()
    if world and not cfg.cache.only and world % size:
        remedy = f"start {size} processes or a multiple of that (torchrun), or leave it out"
        yield Finding((_SEQUENCE,), undivided(world, f"groups of {size}"), remedy)
    remedy = f"leave it out, or {option(_SEQUENCE)}=1"
    for field, value in (
        (_ENGINE, training.engine not in ("native", "fsdp") and training.engine),
        (_STAGES, training.pipeline_stages > 1),
        ("training.compile", training.compile),
        ("optimizer.fused_backward", cfg.optimizer.fused_backward),
        ("optimizer.fused_groups", cfg.optimizer.fused_groups),
        ("logging.trace", cfg.logging.trace),
        ("repa.encoder", cfg.repa.encoder),
    ):
        if value:
            yield Finding((field, _SEQUENCE), f"cannot be used with {option(_SEQUENCE)}={size}", remedy)


def processes_fault(cfg: TrainConfig, world: int) -> tuple[str, str] | None:
    """Say what is wrong with a number of processes for the stages of a pipeline, and what would be right."""
    stages = cfg.training.pipeline_stages
    if world % stages == 0:
        return None
    fits = ", ".join(str(number) for number in range(1, world + 1) if world % number == 0)
    what = f"{stages} stages, and {undivided(world, 'them')}"
    return what, f"start {stages} processes or a multiple of that (torchrun), or give: {fits}"


def processes_started() -> int:
    """Return how many processes the launcher has started; 0: it does not say."""
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) if world.isdecimal() else 0


def undivided(world: int, into: str) -> str:
    """Say that a number of processes cannot be divided."""
    return f"{world} process{'es' if world != 1 else ''} cannot be divided into {into}"


def waiting_share(stages: int, micro_batches: int, schedule: str) -> float:
    """Return the share of a step in which a device waits for others, where all stages take equally long.

    (p - 1) / (p - 1 + m) of p stages and m micro batches (Huang et al. 2019, arXiv:1811.06965, section 2.3); with v
    pieces a device the wait is a v-th of that (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). The part of it that
    "zb" fills with gradients of weights is not taken off.
    """
    waiting = (stages - 1) / names.PIECES[schedule]
    return waiting / (waiting + micro_batches)
