"""What can be known to be wrong before a device is touched or data are read: all of it, reported together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from difftrain import optim
from difftrain.cache.build import deferred_parts
from difftrain.config import TrainConfig
from difftrain.config.datasets.datasets import datasets_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Family, Fault, Parts
from difftrain.data.media.decoders import HOST
from difftrain.data.plan.buckets import BucketTable
from difftrain.data.sources import own_class
from difftrain.device import Device, jpeg, quantised
from difftrain.device.block_swap import most_waiting, movable_bytes
from difftrain.distributed.partition import Cut
from difftrain.train.drawing import prompts_of

_WEIGHTS = frozenset({"model.pretrained", "model.vae"})


def check_device(cfg: TrainConfig, device: Device) -> None:
    """Try what only some devices have and is asked for. Raises ConfigFault where it cannot be used here."""
    faults = []
    if cfg.model.fp8_frozen and (why := quantised.why_not(device.kind)):
        flag = (
            option("model.fp8_frozen", "all") if cfg.model.fp8_frozen == "all" else option("model.fp8_frozen", "unet")
        )
        faults.append(Fault(flag, why, f"leave it out; {option('cache.text', True)} frees more"))
    if cfg.model.base_dtype == "fp8" and (why := quantised.why_not(device.kind)):
        faults.append(Fault("[model] base_dtype", f"is fp8: {why}", "int8, which takes as much memory, or nf4"))
    if cfg.data.image_decoder != HOST and (why := jpeg.why_not(device)):
        faults.append(
            Fault(f"{option('data.image_decoder')}={cfg.data.image_decoder}", why, "leave it out: the host decodes")
        )
    if faults:
        raise ConfigFault(faults)


def check_sides(cfg: TrainConfig, family: Family) -> None:
    """Compare the sizes that the configuration can make of pictures with what the model takes. Raises ConfigFault."""
    multiple, faults = family.features.size_multiple, []
    evaluated = [dataset for section in cfg.eval.sets for dataset in section.datasets]
    for dataset in (*datasets_of(cfg.data, cfg.captions), *evaluated):
        if not dataset.sizes and dataset.resolution is None:
            continue
        table = BucketTable.of(dataset)
        sides = {side for size in table.sizes for side in size} or {table.steps}
        if odd := sorted(side for side in sides if side % multiple):
            what = f"gives sides of {', '.join(map(str, odd[:6]))} px, and this model needs multiples of {multiple}"
            remedy = f"with buckets {option('data.bucket_reso_steps')}={multiple}, or a multiple of it"
            faults.append(Fault(option("data.resolution"), what, remedy))
    if faults:
        raise ConfigFault(faults)


def check_swap(cfg: TrainConfig, family: Family, parts: Parts) -> None:
    """Compare the blocks that are to wait on the host with those that there are. Raises ConfigFault."""
    trained, waiting = not cfg.holds_base, cfg.memory.swap_blocks
    sizes = movable_bytes(family.units(parts), parts.base, trained=trained)
    most = most_waiting(sizes, trained=trained)
    if waiting > most:
        able, kind = sum(1 for size in sizes if size), "trained" if trained else "only held"
        of = (
            f"{len(sizes)} blocks"
            if able == len(sizes)
            else f"{len(sizes)} blocks, {able} of them with weights that are {kind}"
        )
        last = ", and the last one while it leaves" if trained else ""
        what = f"is {waiting}, and the model has {of}: the one that runs and the next one are on the device{last}"
        remedy = f"{most} at most" if most else "leave it out"
        raise ConfigFault([Fault(option("memory.swap_blocks"), what, remedy)])


def check(cfg: TrainConfig, family: Family, away: Collection[str] = (), *, full: bool = True) -> Parts:
    """Look at optimizer, prompts, the user's data set class, weights (their headers are enough) and tokenizers.

    away: fields of which something is still to be fetched, and which are left out. full: False leaves out the weights of
    encoders that a cache may save, where the family can; they are looked at when they are loaded. Returns the parts
    without weights. Raises ConfigFault with every fault.
    """
    faults: list[Fault] = optim.faults(cfg.optimizer, cfg.training.max_steps)

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ConfigFault as error:
            faults.extend(error.faults)
            return None

    attempt(lambda: prompts_of(cfg))
    if cfg.data.dataset_class:
        attempt(lambda: own_class.make(str(cfg.data.dataset_class), *cfg.data.dirs[:1]))
    parts = Parts(root=nn.Module())
    is_here = not any(field.startswith("model.") for field in away)
    if not _WEIGHTS.intersection(away):
        # what a cache will save is known by tokens: without a tokenizer all encoders are looked at
        full = full or not is_here
        parts = attempt(lambda: family.load(meta=True, deferred=() if full else deferred_parts(cfg, family))) or parts
        attempt(lambda: check_sides(cfg, family))
        if cfg.training.pipeline_stages > 1 and any(True for _ in parts.root.parameters()):
            attempt(lambda: Cut.of(cfg, family.chain(parts.root), parts.root))
        if cfg.memory.swap_blocks and any(True for _ in parts.root.parameters()):
            attempt(lambda: check_swap(cfg, family, parts))
    if is_here:
        attempt(lambda: family.tokenizer(parts))
    if faults:
        raise ConfigFault(dict.fromkeys(faults))  # weights and tokenizers may trip over the same file
    return parts
