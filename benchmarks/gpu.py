"""Training on an accelerator: first whether it is right, then how fast SDXL-base trains at 1024 px and SD3-Light at 256.

    python benchmarks/gpu.py                       everything; about twenty minutes and 60 GiB of card memory
    python benchmarks/gpu.py --batch_sizes=1,2 --light_batch_sizes=16     a smaller card
    python benchmarks/gpu.py --models=sd3_light    one of the two
    python benchmarks/gpu.py --rehearse            the same code on any machine, on tiny sizes: no figure of a GPU

Right: attention against fp32 mathematics, forward and backward; bf16 and fp16 steps against fp32 ones; the engine's
losses against a hand-written loop's, and the device's against the CPU's. Fast: FPS, MFU, matmul utilisation and peak
memory of the denoiser with random fp32 weights, on latents and text states that are there already (no VAE, no text
encoder, no loading). Prints a table, writes gpu-<date>.json, and exits with 1 where a check fails. Without an accelerator: says so, 0.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import gpu_sd3
import torch
from gpu_trainer import Trainer, config, measure_speed, same
from plain_sdxl import PlainSDXL
from torch import Tensor

from difftrain.contracts import Batch, Bucket, Parts
from difftrain.device import Device, attention, choose
from difftrain.models.flops import unet_flops
from difftrain.models.root import DenoiserRoot
from difftrain.models.sdxl import SDXLFamily
from difftrain.report.environment import code_version, versions

TEXT_TOKENS, LIGHT_SIDE = 77, 256
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
        unet = self.source.build("unet")
        if meta:
            return Parts(DenoiserRoot(self, "unet", unet))
        unet.to_empty(device="cpu")
        for module in unet.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        if self.cfg.training.gradient_checkpointing:
            unet.enable_gradient_checkpointing()
        return Parts(DenoiserRoot(self, "unet", unet))

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
        latent = (bucket.height // self.vae.factor, bucket.width // self.vae.factor)
        return 3.0 * unet_flops(self.source.sizes["unet"], latent, TEXT_TOKENS)

    def batch(self, side: int, size: int, seed: int) -> Batch:
        """Make a batch of latents of unit spread, the same for a seed."""
        unet, draw = self.source.sizes["unet"], torch.Generator().manual_seed(seed)
        pooled = unet["projection_class_embeddings_input_dim"] - 6 * unet["addition_time_embed_dim"]
        shape = (size, unet["in_channels"], side // self.vae.factor, side // self.vae.factor)
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


def sdxl_trainer(
    size: str, device: Device, precision: str, *, checkpointing: bool = False, weights: Any = None
) -> Trainer:
    """Return the engine with the UNet alone."""
    cfg = config({"init_from_config": size}, precision, LR, checkpointing=checkpointing)
    family = LatentFamily(cfg)
    return Trainer(cfg, family, family.load(), device, weights=weights, watched=size != "base")


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
    reference = sdxl_trainer("tiny", choose("cpu"), "no")
    batches = [reference.family.batch(side, 4, seed) for seed in range(STEPS)]
    start = copy.deepcopy(reference.first)
    on_cpu, _ = reference.losses(batches)
    rows = []
    exact = sdxl_trainer("tiny", device, "no", weights=start)
    plain = PlainSDXL(exact.parts, device.torch_device, lr=LR)
    by_hand = [plain.step([batch]) for batch in batches]
    in_fp32, _ = exact.losses(batches)
    rows.append(same("engine against the hand-written loop, fp32", in_fp32, by_hand, LOSS_LIMIT["no"]))
    rows.append(same("this device against the CPU, fp32", in_fp32, on_cpu, LOSS_LIMIT["no"]))
    for precision in ("bf16", "fp16"):
        trainer = sdxl_trainer("tiny", device, precision, weights=start)
        losses, skipped = trainer.losses(batches)
        rows.append(same(f"{precision} against fp32", losses, in_fp32, LOSS_LIMIT[precision]))
        fine = all(map(math.isfinite, losses)) and trainer.moved() and skipped <= STEPS // 2
        rows.append({"check": f"{precision}: finite, every weight moved", "skipped": skipped, "passed": fine})
    return rows


def measured(name: str, device: Device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one model. Raises ValueError for one that is not known."""
    if name == "sdxl":
        size, side, sizes, make = "base", options.resolution, options.batch_sizes, sdxl_trainer
    elif name == "sd3_light":
        size, side, sizes, make = "light", LIGHT_SIDE, options.light_batch_sizes, gpu_sd3.trainer
    else:
        raise ValueError(f"--models knows sdxl and sd3_light, not {name!r}")
    if options.rehearse:
        size, side = "tiny", 64

    def made(precision: str, checkpointing: bool) -> Trainer:
        return make(size, device, precision, checkpointing=checkpointing)

    return measure_speed(device, options, name, side, sizes, made)


def main() -> int:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="sdxl,sd3_light")
    parser.add_argument("--batch_sizes", default="1,2,4,8", help="of SDXL")
    parser.add_argument("--light_batch_sizes", default="16,32,64,128", help="of SD3-Light")
    parser.add_argument("--precisions", default="bf16,fp16")
    parser.add_argument("--resolution", type=int, default=1024, help="of SDXL; SD3-Light's is 256")
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
    checks = [*check_attention(device, options.rehearse), *check_steps(device, 64), *gpu_sd3.check_steps(device, 64)]
    torch.backends.cudnn.allow_tf32 = True
    for row in checks:
        told = f"{row['error']:.1e} (limit {row['limit']:.0e})" if "error" in row else f"{row['skipped']} skipped"
        print(f"  {'PASS' if row['passed'] else 'FAIL'}  {row['check']}: {told}")
    speed = [row for name in options.models.split(",") for row in measured(name, device, options)]
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
