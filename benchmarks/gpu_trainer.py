"""The engine on one device, fed by hand with batches that are there already: what gpu.py measures of any family."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Bucket, Family, Parts
from difftrain.device import Device, use_attention
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.optim.registry import make_optimizer
from difftrain.optim.schedule import make_schedule
from difftrain.report.clock import Clock
from difftrain.report.peaks import measure_matmul, vendor_peak


class Fed(Family, Protocol):
    """A family that makes its own batches, the same for a seed."""

    def batch(self, side: int, size: int, seed: int) -> Batch: ...


def config(model: dict[str, Any], precision: str, lr: float, *, checkpointing: bool = False) -> TrainConfig:
    """Return a plain configuration."""
    training = {"mixed_precision": precision, "seed": 1, "gradient_checkpointing": checkpointing}
    return TrainConfig.model_validate({"model": model, "training": training, "optimizer": {"learning_rate": lr}})


class Trainer:
    """One family's engine. weights: of the root, in place of its own. watched: keep the first ones, to see them move."""

    def __init__(
        self, cfg: TrainConfig, family: Fed, parts: Parts, device: Device, *, weights: Any = None, watched: bool = False
    ) -> None:
        self.cfg, self.device, self.family, self.parts = cfg, device, family, parts
        if weights is not None:
            parts.root.load_state_dict(weights)
        self.first = {name: value.clone() for name, value in parts.root.state_dict().items()} if watched else {}
        self.attention = use_attention(
            parts.root, device, fused=True, choice="auto", precision=cfg.training.mixed_precision
        )
        self.engine = make_engine(cfg, device, Ranks())
        self.engine.build(
            family,
            parts,
            lambda groups: make_optimizer(cfg.optimizer, groups, fused_ok=device.fused_optimizer),
            lambda made: make_schedule(cfg.optimizer, made, 1000),
            [],
        )

    def losses(self, batches: list[Batch]) -> tuple[list[float], int]:
        """Take a step on each batch; return the losses, and how many updates were skipped."""
        stats = [self.engine.step([batch], dict(batch.counts)) for batch in batches]
        return [float(s.sums["loss"]) for s in stats], sum(int(s.skipped) for s in stats)

    def moved(self) -> bool:
        """Tell whether every trained weight has changed and is finite."""
        now = dict(self.parts.root.named_parameters())
        return all(
            bool(each.isfinite().all()) and not torch.equal(each.cpu(), self.first[n]) for n, each in now.items()
        )


def same(name: str, losses: list[float], expected: list[float], limit: float) -> dict[str, Any]:
    """Compare the losses of two runs."""
    error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return {"check": name, "error": error, "limit": limit, "passed": error <= limit}


def measure_speed(
    device: Device, options: argparse.Namespace, name: str, side: int, sizes: str, make: Callable[[str, bool], Trainer]
) -> list[dict[str, Any]]:
    """Measure steps per precision, checkpointing and batch; a setting that does not fit the card is named."""
    rows = []
    for precision in options.precisions.split(","):
        matmul = measure_matmul(device.torch_device, precision, device.synchronise, budget_s=2.0)
        peak = vendor_peak(str(device.describe()["name"]), precision)
        for checkpointing in (False, True):
            trainer = make(precision, checkpointing)
            print(f"  {name}: {trainer.attention}", flush=True)
            for batch_size in map(int, sizes.split(",")):
                row: dict[str, Any] = {"model": name, "resolution": side, "precision": precision}
                row |= {"gradient_checkpointing": checkpointing, "batch_size": batch_size}
                row |= _measure(trainer, device, side, batch_size, options.steps)
                if "flops_per_s" in row:
                    row["matmul_flops_per_s"] = matmul
                    row["matmul_utilisation"] = row["flops_per_s"] / matmul
                    row["mfu"] = row["flops_per_s"] / peak[0] if peak else None
                    row["mfu_peak"] = peak[1] if peak else "this card's peak is not known"
                rows.append(row)
                print(f"  {_told(row)}", flush=True)
            del trainer
            _free(device)
    return rows


def _measure(trainer: Trainer, device: Device, side: int, batch_size: int, steps: int) -> dict[str, Any]:
    batches = [trainer.family.batch(side, batch_size, seed) for seed in range(4)]
    flops = trainer.family.flops_per_sample(trainer.parts, Bucket(side, side))
    device.reset_peak_memory()
    try:
        for number in range(3):  # kernels are chosen, memory is taken
            trainer.engine.step([batches[number]], dict(batches[number].counts))
        clock = Clock(device.synchronise)
        clock.start()
        for number in range(steps):
            stats = trainer.engine.step([batches[number % 4]], dict(batches[number % 4].counts))
            clock.stepped(batch_size, flops * batch_size)
        span = clock.read()
    except torch.OutOfMemoryError:
        trainer.engine.optimizer.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
        _free(device)
        return {"failed": "out of the card's memory"}
    return {
        "fps": span.fps,
        "step_s": span.step_s,
        "flops_per_s": span.flops / span.wall_s,
        "flops_per_sample": flops,
        "peak_memory_gib": device.peak_memory_gib(),
        "loss": float(stats.sums["loss"]),
    }


def _free(device: Device) -> None:
    gc.collect()
    if device.module is not None:
        device.module.empty_cache()


def _told(row: dict[str, Any]) -> str:
    how = "checkpointing" if row["gradient_checkpointing"] else ""
    name = f"{row['model']:9} {row['precision']:4} batch {row['batch_size']:3} {how:13}"
    if "failed" in row:
        return f"{name} {row['failed']}"
    mfu = "   -  " if row["mfu"] is None else f"{100 * row['mfu']:5.1f}%"
    return (
        f"{name} {row['fps']:8.3f} FPS  {1000 * row['step_s']:9.1f} ms  MFU {mfu}  matmul "
        f"{100 * row['matmul_utilisation']:5.1f}%  {row['peak_memory_gib']:6.1f} GiB"
    )
