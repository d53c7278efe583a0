"""What speed-ups of SD3 cost or save a step on this machine, over a plain step of the same model, in turns.

    python benchmarks/sd3_speedups.py              some three minutes on two cores

A small SD3 (the tiny one with more blocks) at 512 px, so 1024 picture tokens beside 333 of text, on features as a cache
holds them. Printed beside each ratio of step times is the ratio of counted operations; no limits, and nothing of what
such a step is worth: that is what papers measured (docs/speedups.md).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import torch
from workload import built_engine

from difftrain.config import TrainConfig
from difftrain.contracts import EVERY, Batch, Bucket, Parts
from difftrain.device import choose, use_attention
from difftrain.models.registry import make_family
from difftrain.testing.batches import cached_batch

WARM_UP, WIDTH = 2, 768
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tread, half of the tokens": {"tread": {"share": 0.5, "start": 2}},
    "masking, half of the patches": {"patch_masking": {"share": 0.5, "mixer_layers": 2}},
    "masking, three quarters": {"patch_masking": {"share": 0.75, "mixer_layers": 2}},
    "repa, features cached": {"repa": {"layer": 3, "hidden": 256}},
    "muon": {"optimizer": {"type": "Muon", "learning_rate": 1e-4}},
}


class Way:
    """One way of training, and how long its steps took."""

    def __init__(self, sections: dict[str, Any], depth: int, vision: Path) -> None:
        model = {"family": "sd3", "init_from_config": "tiny", "num_layers": depth}
        given = {"model": model, "training": {"seed": 1}, "optimizer": {"learning_rate": 1e-4}, **sections}
        if "repa" in given:
            given["repa"] = {**given["repa"], "encoder": str(vision)}
        cfg = TrainConfig.model_validate(given)
        self.family: Any = make_family(cfg)
        parts = self.family.load(deferred=EVERY)
        parts.fill_root()
        self.parts, device = Parts(parts.root, config=parts.config), choose("cpu")  # features are all there
        use_attention(parts.root, device, fused=True, choice="auto", precision="no")
        self.aligned = "repa" in given
        self.engine = built_engine(self.family, self.parts, device)
        self.times: list[float] = []

    def batch(self, side: int, size: int, seed: int) -> Batch:
        """Make a batch; with what an image encoder makes of it where that counts."""
        batch = cached_batch(self.family, Bucket(side, side), size, seed=seed)
        if self.aligned:
            batch.features["vision"] = torch.randn(size, WIDTH, side // 16, side // 16).bfloat16()
        return batch

    def step(self, batch: Batch) -> None:
        """Take a step."""
        began = time.perf_counter()
        self.engine.step([batch], dict(batch.counts))
        self.times.append(time.perf_counter() - began)


def write_vision(folder: Path) -> Path:
    """Write an image encoder of one small layer with DINOv2-B's width: only its width counts here."""
    import json

    from transformers import Dinov2Config, Dinov2Model

    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 14,
    }
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    return folder


def main() -> int:
    """Take turns, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--depth", type=int, default=12)
    options = parser.parse_args()
    side, size = options.resolution, options.batch_size
    with tempfile.TemporaryDirectory(prefix="sd3-speedups-") as folder:
        vision = write_vision(Path(folder) / "vision")
        ways = {name: Way(sections, options.depth, vision) for name, sections in WAYS.items()}
        for seed in range(options.steps + WARM_UP):
            for way in ways.values():
                way.step(way.batch(side, size, seed))
        plain = ways["plain"]
        work = {name: way.family.flops_per_sample(way.parts, Bucket(side, side)) for name, way in ways.items()}
    print(
        f"{options.depth} blocks, batch {size} at {side} px, {options.steps} turns, {torch.get_num_threads()} threads"
    )
    for name, way in ways.items():
        pairs = [a / b for a, b in zip(way.times[WARM_UP:], plain.times[WARM_UP:])]
        minima = min(way.times[WARM_UP:]) / min(plain.times[WARM_UP:])
        told = f"step {statistics.median(pairs):5.2f} (of the minima {minima:5.2f})"
        print(f"  {name:30} {told}   operations {work[name] / work['plain']:5.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
