"""What a run takes, estimated before it begins: memory of each device, and disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from difftrain.config import TrainConfig
from difftrain.config.schema.families import row_of
from difftrain.config.schema.names import PIECES
from difftrain.contracts import Bucket, Group, Parts
from difftrain.device.block_swap import SwapPlan, movable_bytes, plan_swap
from difftrain.device.quantised import layers_of, scale_bytes
from difftrain.distributed.partition import Cut
from difftrain.engine.fused import parts_of
from difftrain.engine.half_precision import weights_kept
from difftrain.engine.master_weights import DTYPES
from difftrain.models.step_memory import step_peaks
from difftrain.optim import make_optimizer
from difftrain.optim.muon import is_matrix
from difftrain.train.estimate.communication import shard_size, spread_of
from difftrain.train.saving import is_one_file

if TYPE_CHECKING:
    from difftrain.models.base import BaseFamily

GIB = float(1 << 30)
RESERVE = 1.5 * GIB  # of a device: the driver's context, workspaces of libraries, what the allocator cannot use
FP32, HALF = 4, 2
VAE = "vae"
WAITING = "less blocks that wait in host memory"
KEPT_BYTES = {"fp32": 4, "kahan": 2}  # beside a weight in half precision


def trained(module: nn.Module) -> int:
    """Count the parameters that are trained."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


@dataclass(frozen=True)
class MemoryItem:
    """One line of the estimate: how many bytes, and by which formula."""

    what: str
    size: float
    formula: str
    in_step: bool = False  # comes and goes with each step
    unsharded: float = 0.0  # what it would be of a step where nothing is sharded


def needs(
    cfg: TrainConfig, parts: Parts, ranks: int, largest: float = 0.0, swap: SwapPlan | None = None
) -> list[MemoryItem]:
    """Estimate what one card holds at all times, by formula; activations come on top.

    largest: the share of a pipeline's largest stage, where the model is cut. swap: of blocks that wait on the host.
    """
    training, moving = cfg.training, trained(parts.root)
    spread = replace(spread_of(cfg, ranks), largest=largest)
    halves = cfg.deepspeed.enable and training.mixed_precision != "no"  # DeepSpeed keeps them, with fp32 masters
    wide = HALF if training.full_precision or halves else FP32  # of a weight that is computed with, and of a gradient

    def shared(share: float) -> str:
        if spread.way == "pipeline" and share < 1:
            return f", of the largest of {spread.stages} stages: {100 * share:.0f} % of the model"
        return f", sharded over {round(1 / share)} ranks" if share < 1 else ""

    # weights, trained and frozen, with what low precision keeps beside them
    few_bits = [layer.weight for layer in layers_of(parts.root)]
    codes = sum(weight.numel() * weight.element_size() for weight in few_bits)
    weights = (
        sum(parameter.numel() * min(parameter.element_size(), wide) for parameter in parts.root.parameters()) - codes
    )
    resident = [part for name, part in parts.frozen.items() if name not in parts.offloaded]
    frozen = sum(parameter.numel() * parameter.element_size() for part in resident for parameter in part.parameters())
    kept_in = training.full_precision or (training.mixed_precision if halves else "fp32")
    formula = f"{wide} B per trained parameter{shared(spread.weights_share)}"
    items = [
        MemoryItem(f"weights in {kept_in}", weights * spread.weights_share, formula),
        MemoryItem("frozen weights", frozen, "in the precision they are kept in"),
    ]
    if few_bits:
        size, kind = codes + scale_bytes(parts.root), cfg.model.base_dtype or "fp8"
        items.append(MemoryItem(f"base in {kind}", size, "codes and scales of layers that are only held"))
    if swap is not None:
        formula = (
            f"{gib_text(swap.host)} in host memory, {gib_text(swap.device)} of it on the device at once; "
            f"{gib_text(swap.traffic)} are copied there for a micro batch"
        )
        if swap.returned:
            formula += f", {gib_text(swap.returned)} back; weights and optimizer state"
        items.append(MemoryItem(WAITING, -float(swap.saved), formula))
    kept = "fp32" if halves else weights_kept(training)
    if (training.full_precision or halves) and kept in KEPT_BYTES:
        share = spread.state_share if halves else spread.weights_share
        formula = f"{KEPT_BYTES[kept]} B per trained parameter{shared(share)}"
        items.append(MemoryItem(f"master weights ({kept})", KEPT_BYTES[kept] * moving * share, formula))

    # of each step: gradients and copies
    alive, formula = gradients_alive(cfg, parts)
    unsharded = wide * alive
    formula = f"{wide} B {formula}{shared(spread.gradients_share)}"
    items.append(
        MemoryItem("gradients", unsharded * spread.gradients_share, formula, in_step=True, unsharded=unsharded)
    )
    if training.mixed_precision != "no" and not training.full_precision and not halves and spread.shard == 1:
        casts = 2.0 * moving
        share = spread.weights_share if spread.way == "pipeline" else 1.0
        items.append(
            MemoryItem("casts of autocast", casts * share, "2 B per trained parameter", in_step=True, unsharded=casts)
        )
    if spread.way in ("ddp", "oss") and ranks > 1 and not training.ddp_bucket_view and alive == moving:
        items.append(
            MemoryItem("gradient buckets", wide * moving, f"{wide} B per trained parameter; none with bucket views")
        )

    # optimizer state, of which sharding leaves each rank its part
    state = state_bytes(cfg, matrix_share(parts))
    formula = f"{state:g} B per trained parameter{shared(spread.state_share)}"
    items.append(MemoryItem("optimizer state", state * moving * spread.state_share, formula))

    # averages, always in fp32, each where its weight lies between steps
    on_device = FP32 * moving - (swap.weights if swap is not None and swap.returned else 0)
    if cfg.ema.enable:
        size = on_device * spread.averages_share
        items.append(MemoryItem("averaged weights", size, f"4 B per trained parameter{shared(spread.averages_share)}"))
    if cfg.ema.profiles:
        count = len(cfg.ema.profiles)
        size = count * on_device * spread.averages_share
        formula = f"4 B per trained parameter and width{shared(spread.averages_share)}"
        items.append(MemoryItem(f"averages of {count} widths", size, formula))
    return items


def gradients_alive(cfg: TrainConfig, parts: Parts) -> tuple[int, str]:
    """Count the gradients that are in memory at once, and say of what; updates during the backward pass free them."""
    named = [(name, parameter) for name, parameter in parts.root.named_parameters() if parameter.requires_grad]
    section = cfg.optimizer
    if not (section.fused_backward or section.fused_groups) or cfg.training.accumulation > 1:
        return sum(parameter.numel() for _, parameter in named), "per trained parameter"
    sizes = {name: parameter.numel() for name, parameter in named}
    together = parts_of([Group("all", named, 0.0)], section.fused_groups)
    what = "per parameter of the largest group" if section.fused_groups else "per element of the largest parameter"
    return max(sum(sizes[name] for name in names) for names in together), what


def matrix_share(parts: Parts) -> float:
    """Return the share of the trained numbers that are in matrices, as Muon takes them."""
    named = [(name, weight) for name, weight in parts.root.named_parameters() if weight.requires_grad]
    return sum(weight.numel() for name, weight in named if is_matrix(name, weight)) / sum(
        weight.numel() for _, weight in named
    )


def state_bytes(cfg: TrainConfig, matrices: float = 1.0, *, everywhere: bool = False) -> float:
    """Return the bytes of state that the optimizer keeps for a parameter: counted on small ones after a step.

    everywhere: also what waits on the host between updates. matrices: the share of matrices within blocks, of which Muon keeps less.
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
    if getattr(optimizer, "cpu_offload", False) and not everywhere:
        return 0.0
    return sum(share * _state_of(optimizer.state[probes[name]], probes[name]) for name, share in shares.items())


def _state_of(state: dict[str, Any], probe: torch.Tensor) -> float:
    kept = (tensor for tensor in state.values() if torch.is_tensor(tensor) and tensor.numel() > 1)
    return sum(tensor.numel() * tensor.element_size() for tensor in kept) / probe.numel()


def cached_parts(cfg: TrainConfig, parts: Parts) -> set[str]:
    """Return the frozen parts whose output would be cached, where the tokenizers that tell it exactly are not here."""
    latents, text = (cfg.cache.latents or cfg.cache.latents_to_disk), (cfg.cache.text or cfg.cache.text_to_disk)
    return {name for name in parts.frozen if (latents if name == VAE else text)}


# --- a step, and all together


def gib_text(size: float) -> str:
    """Write a size in GiB, which devices are compared in; a small one, which would be all zeros, in MiB."""
    return f"{size / GIB:.3g} GiB" if abs(size) >= 0.1 * GIB or not size else f"{size / 2**20:.3g} MiB"


@dataclass(frozen=True)
class DeviceMemory:
    """The estimate for one device. items: what stands at all times, and of a step by formula. step: the peak of one;
    backward: of its backward pass.
    """

    items: tuple[MemoryItem, ...]
    step: int
    bucket: Bucket
    batch: int
    swap: SwapPlan | None = None
    backward: int = 0

    @property
    def standing(self) -> float:
        """Return what is there between steps, and not gone in them."""
        return sum(item.size for item in self.items if not item.in_step)

    @property
    def total(self) -> float:
        """Return the peak of a run: in a step, or at the update, when gradients alone are left of it."""
        gradients = sum(item.size for item in self.items if item.what == "gradients")
        step = max(self.step, gradients)
        if self.swap is None:
            return self.standing + step
        return self.standing + self.swap.most_with(step, max(self.backward, gradients)) - self.swap.device

    def sentence(self) -> str:
        """Say it in one line."""
        parts = [f"{item.what} {gib_text(item.size)}" for item in self.items if not item.in_step and item.size]
        images = f"{self.batch} image{'s'[: self.batch != 1]} at {self.bucket.width}x{self.bucket.height}"
        parts.append(f"a step of {images} {gib_text(self.step)}")
        return f"{gib_text(self.total)} a device, estimated: {', '.join(parts)}"

    def verdict(self, free: float) -> str:
        """Say whether it fits."""
        if self.total + RESERVE <= free:
            return "fits"
        return "may not fit" if self.total <= free else "does not fit"


def device_memory(cfg: TrainConfig, family: Any, parts: Parts, ranks: int, bucket: Bucket, batch: int) -> DeviceMemory:
    """Estimate the memory of one device. parts: without weights; their root is brought into the form of a step.

    Not in it: text encoders and VAE at work, where they run in each step; samples and evaluations between steps; what
    the driver and libraries take.
    """
    return memory_by_ranks(cfg, family, parts, [ranks], bucket, batch)[ranks]


def swap_of(cfg: TrainConfig, family: Any, parts: Parts) -> SwapPlan | None:
    """Return which blocks wait on the host; None where none does."""
    if not cfg.memory.swap_blocks:
        return None
    sizes = movable_bytes(family.units(parts), parts.base, trained=not cfg.holds_base)
    return plan_swap(sizes, cfg.memory.swap_blocks, state_of_swapped(cfg, parts))


def state_of_swapped(cfg: TrainConfig, parts: Parts) -> float | None:
    """Return the bytes of optimizer state for a byte of a trained weight that waits; None where those are held."""
    return None if cfg.holds_base else state_bytes(cfg, matrix_share(parts)) / FP32


def memory_by_ranks(
    cfg: TrainConfig, family: Any, parts: Parts, counts: Iterable[int], bucket: Bucket, batch: int
) -> dict[int, DeviceMemory]:
    """Do so for several numbers of ranks. The step is that of a whole model, less what sharding takes off."""
    largest, live = stage_shares(cfg, family, parts.root) if cfg.training.pipeline_stages > 1 else (0.0, 1.0)
    swap = swap_of(cfg, family, parts)
    items = {ranks: tuple(needs(cfg, parts, ranks, largest, swap)) for ranks in counts}
    shards = {ranks: shard_size(cfg, ranks) for ranks in items}
    root, training = parts.root.to("meta"), cfg.training
    moving = trained(root)
    steps = {}
    for sharded in sorted({size > 1 for size in shards.values()}):  # whole ones first: the others' root is half
        # FSDP gathers what autocast would cast
        half = training.full_precision or (training.mixed_precision if sharded else None)
        if half in DTYPES:
            root.to(DTYPES[half])
        reduces = sharded and (training.accumulation == 1 or cfg.fsdp.reduce == "each")
        free = partial(_free_gradients, cfg, reduces=reduces)
        whole_step, backward = step_peaks(cast("BaseFamily", family), root, bucket, batch, free)
        root.zero_grad(set_to_none=True)
        width = next(root.parameters()).element_size()
        # the whole weights of two blocks: one runs, and the next one is gathered
        sizes = [sum(p.numel() for p in block.parameters()) * width for block in family.repeated(parts)]
        for ranks in (ranks for ranks, size in shards.items() if (size > 1) == sharded):
            step = whole_step
            if sharded:
                # gradients of fp32, whole or the rows of reduced ones
                step += FP32 * moving // shards[ranks] if reduces else (FP32 - width) * moving
                step += 2 * max(sizes, default=0)
            else:
                # activations of the busiest stage, or of a share of the tokens, beside what each step makes of its weights
                kept = sum(item.size for item in items[ranks] if item.in_step)
                made = sum(item.unsharded for item in items[ranks] if item.in_step)
                step = round((step - made) * live / training.sequence_parallel + kept)
            steps[ranks] = max(0, step), max(0, step - whole_step + backward)
    return {
        ranks: DeviceMemory(of, steps[ranks][0], bucket, batch, swap, steps[ranks][1]) for ranks, of in items.items()
    }


def stage_shares(cfg: TrainConfig, family: Any, root: nn.Module) -> tuple[float, float]:
    """Return how much of the model the largest stage of a pipeline holds, and of a micro batch's activations the busiest.

    A stage keeps activations of several micro batches at once, of its share of the blocks: GPipe of all m, 1F1B of p - s
    at most on stage s of p; interleaved ones of 2 (p - s - 1) + (v - 1) p + 1 pieces, v a stage. Blocks count alike.
    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; for interleaved ones the warm-up of torch's
    ScheduleInterleaved1F1B; zb keeps as many as 1F1B (Qi et al. 2023, arXiv:2401.10241).
    """
    training = cfg.training
    cut, stages, micro = Cut.of(cfg, family.chain(root), root), training.pipeline_stages, training.accumulation
    weights, blocks = [0] * stages, [0] * stages
    for name, size in cut.sizes.items():
        weights[cut.run_of[name] % stages] += size
    for run, numbers in enumerate(cut.runs):
        blocks[run % stages] += len(numbers)
    live = []
    for stage, own in enumerate(blocks):
        if training.pipeline_schedule == "gpipe":
            at_once = float(micro)
        elif training.pipeline_schedule == "interleaved":
            pieces = PIECES["interleaved"]
            at_once = min(2 * (stages - stage - 1) + (pieces - 1) * stages + 1, micro * pieces) / pieces
        else:
            at_once = min(stages - stage, micro)
        live.append(at_once * own / sum(blocks))
    return max(weights) / sum(weights), max(live)


def _free_gradients(cfg: TrainConfig, root: nn.Module, reduces: bool) -> None:
    """Take gradients away where the backward pass does: updates free those of a group once all are there.

    reduces: each is cut over the ranks as soon as it is there.
    """
    section = cfg.optimizer
    if reduces:
        for parameter in root.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        return
    if not (section.fused_backward or section.fused_groups) or cfg.training.accumulation > 1:
        return
    named = {name: parameter for name, parameter in root.named_parameters() if parameter.requires_grad}
    for names in parts_of([Group("all", list(named.items()), 0.0)], section.fused_groups):
        together, waiting = [named[name] for name in names], set(names)

        def arrived(_: Any, name: str, waiting: set[str], together: list[nn.Parameter]) -> None:
            waiting.discard(name)
            if not waiting:
                for parameter in together:
                    parameter.grad = None

        for name in names:
            named[name].register_post_accumulate_grad_hook(
                lambda p, name=name, waiting=waiting, together=together: arrived(p, name, waiting, together)
            )


# --- disk


@dataclass(frozen=True)
class Disk:
    """Bytes of one export and one checkpoint, how many of each a run writes, and how many of these stay."""

    export_bytes: float
    checkpoint_bytes: float
    exports: int
    checkpoints: int
    kept_exports: int
    kept_checkpoints: int
    every_minutes: float | None = None

    @property
    def total(self) -> float:
        """Return what is left at the end."""
        return self.export_bytes * self.kept_exports + self.checkpoint_bytes * self.kept_checkpoints

    def sentence(self, folder: Path) -> str:
        """Say it in one line, with what is free where it goes to."""
        made = [
            f"{count} {what}{'s'[: count != 1]} of {gib_text(size)}" + (f", {kept} kept" if kept < count else "")
            for what, count, kept, size in (
                ("export", self.exports, self.kept_exports, self.export_bytes),
                ("checkpoint", self.checkpoints, self.kept_checkpoints, self.checkpoint_bytes),
            )
            if count
        ]
        if self.every_minutes:
            made.append(f"a checkpoint of {gib_text(self.checkpoint_bytes)} every {self.every_minutes:g} min")
        home = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path.cwd())
        free = shutil.disk_usage(home).free
        return f"{gib_text(self.total)} in all ({'; '.join(made) or 'nothing is saved'}); {gib_text(free)} are free"


def disk(cfg: TrainConfig, parts: Parts, total_steps: int, epochs: int, mean_batch: float) -> Disk:
    """Estimate what a run writes; caches and samples aside."""
    save, moving = cfg.save, trained(parts.root)

    # sizes: an export holds the whole model, a checkpoint what is trained in fp32, with optimizer state and averages
    half = save.precision in ("fp16", "bf16")
    # a family that writes folders by itself links what is frozen into them
    links = "save.model_as" in row_of(cfg).defaults and not is_one_file(cfg)
    exported = [parts.root] if links else [parts.root, *parts.frozen.values()]
    numbers = [parameter for part in exported for parameter in part.parameters()]
    if cfg.adapter.type is not None:  # alone, in up to four layouts
        numbers = [parameter for parameter in parts.root.parameters() if parameter.requires_grad]
    export = sum(parameter.numel() * (HALF if half else parameter.element_size()) for parameter in numbers)
    for part in exported:  # what is in few bits is written as its source has it
        packed = [layer for layer in layers_of(part) if "original" not in layer.__dict__]
        export += sum((HALF if half else layer.wide_dtype.itemsize) * layer.wide_shape.numel() for layer in packed)
        export -= sum((HALF if half else layer.weight.element_size()) * layer.weight.numel() for layer in packed)
    averages = cfg.ema.enable + len(cfg.ema.profiles or ())
    state = state_bytes(cfg, matrix_share(parts), everywhere=True)
    checkpoint = moving * (FP32 + state + FP32 * averages)

    # how many: by steps, by epochs, and at the end
    by_step = save.naming != "kohya"
    every_epochs = save.every_n_epochs
    if save.n_epoch_ratio:
        every_epochs = max(1, (cfg.training.max_epochs or epochs) // save.n_epoch_ratio)
    exports = total_steps // save.every_n_steps if save.every_n_steps else 0
    exports += int(total_steps * mean_batch) // save.every_n_examples if save.every_n_examples else 0
    exports += epochs // every_epochs if every_epochs else 0
    checkpoints = exports if save.state else 0
    for every, of in ((save.checkpoint_every_n_steps, total_steps), (save.checkpoint_every_n_epochs, epochs)):
        checkpoints += of // every if every else 0
    exports += 1
    checkpoints += 1 if save.state or save.state_on_train_end or by_step else 0

    # what stays of them
    windows = ((save.last_n_steps, save.every_n_steps), (save.last_n_epochs, every_epochs))
    kept = [max(2, last // every + 1) for last, every in windows if last and every]
    kept_exports = min(exports, *kept) if kept else exports
    kept_checkpoints = min(checkpoints, max(2, save.last_n_states)) if save.last_n_states else checkpoints
    return Disk(
        export, checkpoint, exports, checkpoints, kept_exports, kept_checkpoints, save.checkpoint_every_n_minutes
    )
