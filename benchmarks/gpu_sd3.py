"""SD3-Light for gpu.py: 1.26 B parameters at 256 px, on features as a cache holds them; nothing else is there."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpu_trainer import Trainer, config, same
from torch import Tensor

from difftrain.config import TrainConfig
from difftrain.contracts import EVERY, Batch, Bucket, Draw, Parts
from difftrain.data.samples import host_draws
from difftrain.device import Device, choose
from difftrain.models.sd3.family import SD3Family
from difftrain.models.text.encode import features_of

LR, STEPS, SEED = 1e-4, 8, 1
LOSS_LIMIT = {"no": 1e-4, "bf16": 2e-2}


class CachedSD3(SD3Family):
    """SD3 whose batches bring all that its encoders would make: the transformer alone is built."""

    vocabularies = (None, None, None)  # nothing is tokenised

    def alone(self) -> Parts:
        """Build the transformer from the seed; nothing stands where the encoders were."""
        parts = self.load(deferred=EVERY)
        parts.fill_root()
        return Parts(parts.root, config=parts.config)

    def batch(self, side: int, size: int, seed: int) -> Batch:
        """Make a batch of unit spread, in the dtypes of a cache, with the host draws of training."""
        draw, bucket = torch.Generator().manual_seed(seed), Bucket(side, side)
        latents = (size, *self.features.features["latents"].shape(bucket))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        found = {"moments": torch.cat((normal(*latents), torch.full(latents, 0.1)), dim=1)}
        for number, length in enumerate(self.lengths, 1):
            sizes = self.source.complete(f"text_encoder_{number}")
            made = features_of(self.texts, number, length, sizes, "bfloat16")
            found |= {name: normal(size, *feature.shape(bucket)).bfloat16() for name, feature in made.items()}
        draws = [Draw(number, b"%d of %d" % (number, seed), 0) for number in range(size)]
        ids = torch.arange(size)
        return Batch(
            bucket=bucket,
            record_id=ids,
            occurrence=torch.zeros_like(ids),
            features=found,
            draws={name: host_draws(name, spec, bucket, draws, SEED) for name, spec in self.features.draws.items()},
            counts={"samples": float(size)},
            step=0,
        )


def trainer(size: str, device: Device, precision: str, *, checkpointing: bool = False, weights: Any = None) -> Trainer:
    """Return the engine with the transformer alone."""
    cfg: TrainConfig = config({"family": "sd3", "init_from_config": size}, precision, LR, checkpointing=checkpointing)
    family = CachedSD3(cfg)
    return Trainer(cfg, family, family.alone(), device, weights=weights, watched=size == "tiny")


def check_steps(device: Device, side: int) -> list[dict[str, Any]]:
    """Train tiny SD3 in fp32 and bf16 here and on the CPU; compare the losses."""
    reference = trainer("tiny", choose("cpu"), "no")
    batches = [reference.family.batch(side, 4, seed) for seed in range(STEPS)]
    on_cpu, _ = reference.losses(batches)
    in_fp32, _ = trainer("tiny", device, "no").losses(batches)
    half = trainer("tiny", device, "bf16")
    losses, skipped = half.losses(batches)
    fine = all(map(math.isfinite, losses)) and half.moved() and not skipped
    return [
        same("SD3: this device against the CPU, fp32", in_fp32, on_cpu, LOSS_LIMIT["no"]),
        same("SD3: bf16 against fp32", losses, in_fp32, LOSS_LIMIT["bf16"]),
        {"check": "SD3: bf16: finite, every weight moved", "skipped": skipped, "passed": fine},
    ]
