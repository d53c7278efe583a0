"""What to turn on so that a run fits a device of so much memory: `[memory] memory_gib`.

Savers are added one after another, what costs least first: those that keep every bit before those that round, and those
that only compute or copy more before what trains another way. Each is planned on tensors without content, as
`--dry_run` plans the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from difftrain.config import TrainConfig
from difftrain.config.datasets.datasets import datasets_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Bucket, ConfigFault, Family, Fault
from difftrain.device.block_swap import most_waiting, movable_bytes, plan_swap
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
    return plain and _is_alone(cfg) and cfg.optimizer.type.lower() in ("adamw", "adafactor", "lion")


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


@dataclass(frozen=True)
class Fitting:
    """A run on a device of so much memory: as it is asked for, and with savers that were added. added: by field."""

    gib: float
    asked: Plan
    best: Plan
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
        if _SWAP in saver.fields:
            swaps = True
        else:
            added |= saver.fields
            # blocks that wait are chosen anew: as few as are needed with this one
            without = {_SWAP: cfg.memory.swap_blocks} if swaps else {}
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


def require_fit(cfg: TrainConfig, ranks: int = 1) -> None:
    """Plan a run that says how much memory its device has, by the size that it names. Raises ConfigFault where it does not fit."""
    if cfg.memory.memory_gib is not None:
        bucket, _ = usual_bucket(cfg, make_family(cfg))
        if faults := list(fault(fitted(cfg, bucket, ranks))):
            raise ConfigFault(faults)
