"""What to turn on so that a run fits a device of so much memory: `[memory] memory_gib`.

Savers are added one after another, what costs least first: those that keep every bit before those that round, and those
that only compute or copy more before what trains another way. Each is planned on tensors without content, as
`--dry_run` plans the run itself. A start plans on one process of each machine, once for a configuration: what came out is kept
in the user's cache folder, where the other processes look it up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from difftrain import __version__
from difftrain.config import TrainConfig
from difftrain.config.datasets.datasets import datasets_of
from difftrain.config.paths import user_cache
from difftrain.config.schema import names
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Bucket, ConfigFault, Family, Fault
from difftrain.device.block_swap import most_waiting, movable_bytes, plan_swap
from difftrain.distributed.launch import Launch
from difftrain.io.files import read_json_object, write_json
from difftrain.models.registry import make_family
from difftrain.train.estimate.footprint import (
    GIB,
    RESERVE,
    DeviceMemory,
    cached_parts,
    device_memory,
    gib_text,
    state_of_swapped,
)

_FEW_BITS = ("fp8", "int8", "nf4")


class Saver(NamedTuple):
    """A way to save memory: what it sets, and of which configurations it is one."""

    fields: Mapping[str, Any]
    fits: Callable[[TrainConfig], object]


def _is_alone(cfg: TrainConfig) -> bool:
    return cfg.training.engine == "native" and cfg.training.pipeline_stages == 1


def _swaps(cfg: TrainConfig) -> bool:
    return _is_alone(cfg) and not cfg.training.compile and not cfg.model.fp8_frozen


def _few_bits(cfg: TrainConfig) -> bool:
    """Tell whether weights that are only held may be stored in few bits."""
    wide = cfg.adapter.type != "dora" and not cfg.adapter.fuse_adapters and not cfg.model.fp8_frozen
    return cfg.holds_base and wide


def _updates_alone(cfg: TrainConfig) -> bool:
    plain = cfg.training.accumulation == 1 and cfg.training.mixed_precision != "fp16"
    name = names.proper(cfg.optimizer.type.removeprefix("torch.optim."), names.UPDATED_ALONE)
    return plain and _is_alone(cfg) and bool(name) and not cfg.optimizer.schedulefree_wrapper


_SWAP = "memory.swap_blocks"
# 1. the same bits: nothing more to compute, one more forward pass, copies; 2. the same bits of another clipping;
# 3. other bits: half precision, few bits, fewer images at once
SAVERS: tuple[Saver, ...] = (
    Saver({"cache.latents_to_disk": True}, lambda c: not (c.cache.latents or c.cache.latents_to_disk)),
    Saver({"cache.text_to_disk": True}, lambda c: not (
        c.cache.text or c.cache.text_to_disk or c.model.train_text_encoder or c.captions.shuffle or c.captions.tag_dropout_rate)),
    Saver({"training.gradient_checkpointing": True}, lambda c: not c.training.gradient_checkpointing),
    Saver({_SWAP: None}, lambda c: c.holds_base and _swaps(c)),
    Saver({"training.cpu_offload_checkpointing": True}, lambda c: not c.training.cpu_offload_checkpointing),
    Saver({"optimizer.fused_backward": True}, lambda c: not (
        c.optimizer.fused_backward or c.optimizer.fused_groups) and _updates_alone(c)),
    Saver({_SWAP: None}, lambda c: not c.holds_base and c.optimizer.fused_backward and not c.training.full_precision and _swaps(c)),
    Saver({"training.mixed_precision": "bf16"}, lambda c: c.training.mixed_precision == "no"),
    Saver({"model.base_dtype": "fp8"}, lambda c: _few_bits(c) and c.model.base_dtype not in _FEW_BITS),
    Saver({"model.base_dtype": "nf4"}, lambda c: _few_bits(c) and c.model.base_dtype != "nf4"),
    Saver({"training.batch_size": 1}, lambda c: c.training.batch_size > 1 and len(c.batch_sizes) == 1),
    Saver({"training.full_precision": "bf16"}, lambda c: not (
        c.holds_base or c.training.full_precision) and _is_alone(c) and c.training.mixed_precision == "bf16"),
    Saver({"optimizer.type": "Adafactor"}, lambda c: not c.holds_base and _is_alone(c) and c.optimizer.type.lower() == "adamw"),
)  # fmt: skip


def changed(cfg: TrainConfig, fields: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with other values of some fields."""
    for path, value in fields.items():
        section, _, name = path.partition(".")
        inner = getattr(cfg, section).model_copy(update={name: value})
        cfg = cfg.model_copy(update={section: inner})
    return cfg


@dataclass(frozen=True)
class Plan:
    """What a configuration takes of a device, and what of its blocks could wait on the host. sizes: of each, in bytes.

    state: of the optimizer's for a byte of these; None: they are held.
    """

    cfg: TrainConfig
    memory: DeviceMemory
    sizes: tuple[int, ...]
    state: float | None = None

    @property
    def total(self) -> float:
        """Return all of it, with what driver and libraries take."""
        return self.memory.total + RESERVE


def planned(cfg: TrainConfig, bucket: Bucket, ranks: int = 1) -> Plan:
    """Plan the memory of one device, without one. Raises ConfigFault where the model is none."""
    family: Any = make_family(cfg)
    parts = family.load(meta=True)
    parts.offloaded |= cached_parts(cfg, parts)
    sizes = tuple(movable_bytes(family.units(parts), parts.base, trained=not cfg.holds_base))
    state = state_of_swapped(cfg, parts)
    return Plan(cfg, device_memory(cfg, family, parts, ranks, bucket, max(cfg.batch_sizes)), sizes, state)


def usual_bucket(cfg: TrainConfig, family: Family) -> tuple[Bucket, int]:
    """Return the size and micro batch that the configuration names, where no data tell."""
    named = [dataset.resolution for dataset in datasets_of(cfg.data, cfg.captions) if dataset.resolution]
    width, height = max(named, key=math.prod, default=cfg.data.resolution or (512, 512))
    unit = family.features.size_multiple
    frames = max(max(dataset.frame_buckets) for dataset in datasets_of(cfg.data, cfg.captions))
    return Bucket(max(unit, height // unit * unit), max(unit, width // unit * unit), frames), cfg.training.batch_size


class Total(NamedTuple):
    """What a plan came to, where no more of it is known."""

    total: float


@dataclass(frozen=True)
class Fitting:
    """A run on a device of so much memory: as it is asked for, and with savers that were added. added: by field."""

    gib: float
    asked: Plan | Total
    best: Plan | Total
    added: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        """Tell whether it fits as it is."""
        return self.asked.total <= self.gib * GIB

    def sentence(self) -> str:
        """Say whether it fits, and with what it would."""
        needs = f"{gib_text(self.asked.total)} with {RESERVE / GIB:g} GiB for driver and libraries"
        if self.fits:
            return f"a device of {self.gib:g} GiB: fits, {needs}"
        return f"a device of {self.gib:g} GiB: does not fit, {needs}; {self.remedy()}"

    def remedy(self) -> str:
        """Say what to turn on."""
        words = ", ".join(option(path, value) for path, value in self.added.items())
        if self.best.total <= self.gib * GIB:
            return f"with {words} it takes {gib_text(self.best.total)}"
        tried = f"with {words} it still takes {gib_text(self.best.total)}" if words else "nothing is left to turn on"
        return f"{tried}: a smaller {option('data.resolution')}, a smaller model, or several devices"


def fitted(cfg: TrainConfig, bucket: Bucket, ranks: int = 1) -> Fitting:
    """Look for the savers with which a run fits [memory] memory_gib."""
    assert cfg.memory.memory_gib is not None
    limit = cfg.memory.memory_gib * GIB
    asked = best = planned(cfg, bucket, ranks)
    added: dict[str, Any] = {}
    swaps = False
    for saver in SAVERS:
        if best.total <= limit:
            break
        if not saver.fits(best.cfg):
            continue
        if "training.full_precision" in saver.fields and cfg.memory.swap_blocks and not cfg.holds_base:
            continue  # blocks of fp32 take turns
        if _SWAP in saver.fields:
            swaps = True
        else:
            added |= saver.fields
            # blocks that wait are chosen anew: as few as are needed with this one
            without = {_SWAP: cfg.memory.swap_blocks} if swaps else {}
            swaps = swaps and not ("training.full_precision" in saver.fields and not cfg.holds_base)
            best = planned(changed(best.cfg, {**saver.fields, **without}), bucket, ranks)
            added.pop(_SWAP, None)
        if swaps and best.total > limit:
            waiting = fewest_waiting(best, limit)
            if waiting > best.cfg.memory.swap_blocks:
                added[_SWAP] = waiting
                best = planned(changed(best.cfg, {_SWAP: waiting}), bucket, ranks)
    return Fitting(cfg.memory.memory_gib, asked, best, added)


def fewest_waiting(plan: Plan, limit: float) -> int:
    """Return how many blocks have to wait on the host so that a run fits; all that can where it does not."""
    most, now = most_waiting(plan.sizes, trained=plan.state is not None), plan.cfg.memory.swap_blocks
    before = plan_swap(plan.sizes, now, plan.state).saved if now else 0
    for waiting in range(now + 1, most + 1):
        if plan.total - (plan_swap(plan.sizes, waiting, plan.state).saved - before) <= limit:
            return waiting
    return most


def fault(fitting: Fitting) -> Iterator[Fault]:
    """Name what does not fit."""
    if not fitting.fits:
        what = f"is {fitting.gib:g}, and the run takes {gib_text(fitting.asked.total)} with {RESERVE / GIB:g} GiB for driver and libraries"
        yield Fault(option("memory.memory_gib"), what, fitting.remedy())


def require_fit(cfg: TrainConfig, launch: Launch) -> None:
    """Plan a run that says how much memory its device has, by the size that it names. Raises ConfigFault where it does not fit."""
    if cfg.memory.memory_gib is None:
        return
    family: Any = make_family(cfg)
    bucket, _ = usual_bucket(cfg, family)
    if faults := list(fault(_looked_up(cfg, family, bucket, launch))):
        raise ConfigFault(faults)


_KEPT = 100  # plans in the cache folder
_PATIENCE_S = 120.0  # of processes that wait for the one that plans
log = logging.getLogger("difftrain")


def _looked_up(cfg: TrainConfig, family: Any, bucket: Bucket, launch: Launch) -> Fitting:
    """Return what was planned for this configuration before, or by this machine's first process; else plan."""
    file = user_cache() / "plans" / f"{_plan_key(cfg, family, bucket, launch.size)}.json"
    until = time.monotonic() + (_PATIENCE_S if launch.local_rank else 0.0)
    while True:
        if (kept := _as_kept(read_json_object(file))) is not None:
            return kept
        if time.monotonic() >= until:
            break
        time.sleep(0.2)
    fitting = fitted(cfg, bucket, launch.size)
    if launch.local_rank == 0:
        content = {
            "gib": fitting.gib,
            "asked": fitting.asked.total,
            "best": fitting.best.total,
            "added": dict(fitting.added),
        }
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            for old in sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[: -_KEPT + 1]:
                old.unlink(missing_ok=True)
            write_json(file, content)
        except OSError as error:
            log.debug("the plan is not kept: %s", error)
    return fitting


def _as_kept(content: dict[str, Any] | None) -> Fitting | None:
    """Return what a file of the cache folder says; None where it is none."""
    try:
        gib, asked, best = (float(content[name]) for name in ("gib", "asked", "best"))  # type: ignore[index]
        return Fitting(gib, Total(asked), Total(best), dict(content["added"]))  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        return None


def _plan_key(cfg: TrainConfig, family: Any, bucket: Bucket, ranks: int) -> str:
    """Hash all that a plan depends on: the configuration, and what the model at its paths is."""
    free = cfg.model_dump(mode="json", exclude={"save", "logging", "sample", "metadata", "hub", "eval"})
    package = Path(__file__).parents[2]
    code = sum(path.stat().st_mtime_ns for path in package.rglob("*.py"))  # of those who change it
    about = [__version__, torch.__version__, code, free, family.architecture(), list(bucket), ranks]
    return hashlib.blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
