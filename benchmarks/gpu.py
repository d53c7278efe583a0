"""Training on an accelerator: first whether it is right, then how fast SDXL-base trains at 1024 px.

    python benchmarks/gpu.py                       everything; about ten minutes and 60 GiB of card memory
    python benchmarks/gpu.py --batch_sizes=1,2     a smaller card
    python benchmarks/gpu.py --rehearse            the same code on any machine, on tiny sizes: no figure of a GPU

Right: attention against fp32 mathematics, forward and backward; bf16 and fp16 steps against fp32 ones; the engine's
losses against a hand-written loop's, and the device's against the CPU's. Fast: FPS, MFU, matmul utilisation and peak
memory of the UNet with random weights, on latents and text states that are there already (no VAE, no text encoder, no
loading). Prints a table, writes gpu-<date>.json, and exits with 1 where a check fails. Without an accelerator: says so, 0.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import torch
from plain_sdxl import PlainSDXL
from torch import Tensor

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Bucket, Parts
from difftrain.device import Device, attention, choose, use_attention
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.sdxl.family import SDXLFamily
from difftrain.models.sdxl.flops import unet_flops
from difftrain.models.sdxl.root import SDXLRoot
from difftrain.optim.registry import make_optimizer
from difftrain.optim.schedule import make_schedule
from difftrain.report.clock import Clock
from difftrain.report.environment import code_version, versions
from difftrain.report.peaks import measure_matmul, vendor_peak

TEXT_TOKENS = 77
STEPS = 8  # of each correctness check
LR = 1e-4
# relative error of attention: what rounding of the inputs and of the output to this dtype costs, and some
ATTENTION_LIMIT = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# relative difference of step losses, as the project states them
LOSS_LIMIT = {"no": 1e-4, "fp16": 2e-2, "bf16": 2e-2}


class LatentFamily(SDXLFamily):
    """SDXL whose batches bring latents and text states: the UNet alone is trained, nothing else is there."""

    def load(self, *, meta: bool = False) -> Parts:
        """Build the UNet with torch's own first weights."""
        torch.manual_seed(0)
        unet = self.source.architecture.build("unet")
        if meta:
            return Parts(SDXLRoot(unet))
        unet.to_empty(device="cpu")
        for module in unet.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        if self.cfg.training.gradient_checkpointing:
            unet.enable_gradient_checkpointing()
        return Parts(SDXLRoot(unet))

    def latents(self, batch: Batch, parts: Parts) -> Tensor:
        """Take the batch's."""
        return batch.features["latents"]

    def text(self, batch: Batch, parts: Parts) -> dict[str, Tensor]:
        """Take the batch's, as if they came from two encoders."""
        features = batch.features
        first, second = features["hidden"].chunk(2, dim=-1)
        sizes = [features[name] for name in ("original_size", "crop_top_left", "target_size")]
        pooled = {"pooled": features["pooled"], "time_ids": torch.cat(sizes, dim=1).float()}
        return {"hidden_1": first, "hidden_2": second, **pooled}

    def flops_per_sample(self, parts: Parts, bucket: Bucket) -> float:
        """Count the UNet's forward and backward."""
        factor = self.source.architecture.vae_factor
        latent = (bucket.height // factor, bucket.width // factor)
        return 3.0 * unet_flops(self.source.architecture.unet, latent, TEXT_TOKENS)

    def batch(self, side: int, size: int, seed: int) -> Batch:
        """Make a batch of latents of unit spread, the same for a seed."""
        architecture, draw = self.source.architecture, torch.Generator().manual_seed(seed)
        unet = architecture.unet
        pooled = unet["projection_class_embeddings_input_dim"] - 6 * unet["addition_time_embed_dim"]
        shape = (size, unet["in_channels"], side // architecture.vae_factor, side // architecture.vae_factor)
        sizes = torch.tensor([[side, side]] * size)
        ids = torch.arange(size)
        return Batch(
            bucket=Bucket(side, side),
            record_id=ids,
            occurrence=torch.zeros_like(ids),
            features={
                "latents": torch.randn(shape, generator=draw),
                "hidden": torch.randn(size, TEXT_TOKENS, unet["cross_attention_dim"], generator=draw),
                "pooled": torch.randn(size, pooled, generator=draw),
                "original_size": sizes,
                "crop_top_left": torch.zeros_like(sizes),
                "target_size": sizes,
            },
            draws={
                "noise": torch.randn(shape, generator=draw),
                "timestep": torch.randint(1000, (size,), generator=draw),
            },
            counts={"samples": float(size)},
        )


class Trainer:
    """The engine on one device, fed by hand."""

    def __init__(self, size: str, device: Device, precision: str, *, checkpointing: bool = False, weights: Any = None):
        training = {"mixed_precision": precision, "seed": 1, "gradient_checkpointing": checkpointing}
        model = {"init_from_config": size}
        optimizer = {"learning_rate": LR}
        self.cfg = TrainConfig.model_validate({"model": model, "training": training, "optimizer": optimizer})
        self.device, self.family = device, LatentFamily(self.cfg)
        self.parts = self.family.load()
        if weights is not None:
            self.parts.root.load_state_dict(weights)
        self.first = (
            {name: value.clone() for name, value in self.parts.root.state_dict().items()} if size != "base" else {}
        )
        self.attention = use_attention(
            self.parts.root, device, fused=True, choice="auto", precision=self.cfg.training.mixed_precision
        )
        self.engine = make_engine(self.cfg, device, Ranks())
        self.engine.build(
            self.family,
            self.parts,
            lambda groups: make_optimizer(self.cfg.optimizer, groups, fused_ok=device.fused_optimizer),
            lambda made: make_schedule(self.cfg.optimizer, made, 1000),
            [],
        )

    def losses(self, batches: list[Batch]) -> tuple[list[float], int]:
        """Take a step on each batch; return the losses, and how many updates were skipped."""
        stats = [self.engine.step([batch], dict(batch.counts)) for batch in batches]
        return [float(s.sums["loss"]) for s in stats], sum(int(s.skipped) for s in stats)

    def moved(self) -> bool:
        """Tell whether every weight has changed and is finite."""
        now = self.parts.root.state_dict()
        return all(bool(now[n].isfinite().all()) and not torch.equal(now[n].cpu(), v) for n, v in self.first.items())


# ---------------------------------------------------------------------- right?


def check_attention(device: Device, rehearse: bool) -> list[dict[str, Any]]:
    """Compare outputs and gradients with softmax(q k^T / sqrt(d)) v in fp32, for SDXL's shapes."""
    small = (1, 2, 64, 64, 16) if rehearse else None
    shapes = {
        "self, 64 x 64": small or (2, 10, 4096, 4096, 64),
        "self, 32 x 32": small or (2, 20, 1024, 1024, 64),
        "text, 64 x 64": (1, 2, 64, 77, 16) if rehearse else (2, 10, 4096, 77, 64),
    }
    rows = []
    for dtype, limit in ATTENTION_LIMIT.items():
        for name, (batch, heads, queries, keys, width) in shapes.items():
            for masked in (False, True):
                draw = torch.Generator().manual_seed(queries + keys + masked)
                q, k, v, grad = (
                    torch.randn(batch, heads, n, width, generator=draw).to(device.torch_device)
                    for n in (queries, keys, keys, queries)
                )
                keep = (torch.rand(queries, keys, generator=draw) < 0.8).to(device.torch_device) if masked else None
                error = _attention_error(q, k, v, grad, keep, dtype)
                label = f"attention {name}{', masked' if masked else ''}, {str(dtype).removeprefix('torch.')}"
                rows.append({"check": label, "error": error, "limit": limit, "passed": error <= limit})
    return rows


def _attention_error(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, keep: Tensor | None, dtype: torch.dtype) -> float:
    """Return the largest relative error of the output and of the three gradients."""

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        # the reference sees the rounded inputs: their rounding is not the kernel's fault
        leaves = [each.to(rounded).to(dtype).requires_grad_() for each in (q, k, v)]
        out = function(*leaves)
        out.backward(grad.to(rounded).to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def mathematics(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if keep is not None:
            scores = scores.masked_fill(~keep, float("-inf"))
        return scores.softmax(-1) @ v

    rounded = dtype
    found = run(lambda q, k, v: attention(q, k, v, keep), dtype)
    expected = run(mathematics, torch.float32)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected))


def check_steps(device: Device, side: int) -> list[dict[str, Any]]:
    """Train the tiny SDXL in every precision, by hand, and on the CPU; compare the losses."""
    reference = Trainer("tiny", choose("cpu"), "no")
    batches = [reference.family.batch(side, 4, seed) for seed in range(STEPS)]
    start = copy.deepcopy(reference.first)
    on_cpu, _ = reference.losses(batches)
    rows = []
    exact = Trainer("tiny", device, "no", weights=start)
    plain = PlainSDXL(exact.parts, device.torch_device, lr=LR)
    by_hand = [plain.step([batch]) for batch in batches]
    in_fp32, _ = exact.losses(batches)
    rows.append(_same("engine against the hand-written loop, fp32", in_fp32, by_hand, LOSS_LIMIT["no"]))
    rows.append(_same("this device against the CPU, fp32", in_fp32, on_cpu, LOSS_LIMIT["no"]))
    for precision in ("bf16", "fp16"):
        trainer = Trainer("tiny", device, precision, weights=start)
        losses, skipped = trainer.losses(batches)
        rows.append(_same(f"{precision} against fp32", losses, in_fp32, LOSS_LIMIT[precision]))
        fine = all(map(math.isfinite, losses)) and trainer.moved() and skipped <= STEPS // 2
        rows.append({"check": f"{precision}: finite, every weight moved", "skipped": skipped, "passed": fine})
    return rows


def _same(name: str, losses: list[float], expected: list[float], limit: float) -> dict[str, Any]:
    error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return {"check": name, "error": error, "limit": limit, "passed": error <= limit}


# ---------------------------------------------------------------------- fast?


def measure_speed(device: Device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure steps per precision, checkpointing and batch; a setting that does not fit the card is named."""
    size, side = ("tiny", 64) if options.rehearse else ("base", options.resolution)
    rows = []
    for precision in options.precisions.split(","):
        matmul = measure_matmul(device.torch_device, precision, device.synchronise, budget_s=2.0)
        peak = vendor_peak(str(device.describe()["name"]), precision)
        for checkpointing in (False, True):
            trainer = Trainer(size, device, precision, checkpointing=checkpointing)
            print(f"  {trainer.attention}", flush=True)
            for batch_size in map(int, options.batch_sizes.split(",")):
                row = {"precision": precision, "gradient_checkpointing": checkpointing, "batch_size": batch_size}
                row |= _measure(trainer, device, side, batch_size, options.steps)
                if "flops_per_s" in row:
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
        trainer.engine.optimizer.zero_grad(set_to_none=True)
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
    name = f"{row['precision']:4} batch {row['batch_size']:2} {'checkpointing' if row['gradient_checkpointing'] else '':13}"
    if "failed" in row:
        return f"{name} {row['failed']}"
    mfu = "   -  " if row["mfu"] is None else f"{100 * row['mfu']:5.1f}%"
    return (
        f"{name} {row['fps']:8.3f} FPS  {1000 * row['step_s']:9.1f} ms  MFU {mfu}  matmul "
        f"{100 * row['matmul_utilisation']:5.1f}%  {row['peak_memory_gib']:6.1f} GiB"
    )


def main() -> int:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch_sizes", default="1,2,4,8")
    parser.add_argument("--precisions", default="bf16,fp16")
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each setting")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of gpu-<date>.json")
    parser.add_argument("--rehearse", action="store_true", help="run the code on tiny sizes, on whatever is here")
    options = parser.parse_args()
    device = choose("auto")
    if device.module is None and not options.rehearse:
        print(f"not measured on a GPU: {device.reason}")
        return 0
    torch.backends.cudnn.allow_tf32 = False  # the fp32 checks are of fp32; set back below
    print(
        f"{device.describe()['name']}, torch {torch.__version__}{' (rehearsal: no figure of a GPU)' * options.rehearse}"
    )
    checks = [*check_attention(device, options.rehearse), *check_steps(device, 64)]
    torch.backends.cudnn.allow_tf32 = True
    for row in checks:
        told = f"{row['error']:.1e} (limit {row['limit']:.0e})" if "error" in row else f"{row['skipped']} skipped"
        print(f"  {'PASS' if row['passed'] else 'FAIL'}  {row['check']}: {told}")
    speed = measure_speed(device, options)
    if not options.rehearse:
        found = {
            "date": time.strftime("%Y-%m-%d"),
            "device": device.describe(),
            "versions": versions(device.describe()),
        }
        found |= {"code": code_version(), "resolution": options.resolution, "checks": checks, "speed": speed}
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"gpu-{found['date']}.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written to {path}")
    return 0 if all(row["passed"] for row in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
