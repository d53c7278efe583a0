"""What a step that trains an adapter costs over one that trains all weights, at equal batch, in turns.

    python benchmarks/adapters.py                  some three minutes on two cores

A Flux.1 of width 1024 with 2 double and 4 single blocks at 384 px, so 576 image tokens beside the text, on features as a
cache holds them, in fp32. Without weight gradients a step has two thirds of the products; printed beside each ratio of
step times is that of counted operations. Exit code 1 where LoRA's ratio is above its limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import torch
from figures import Report
from workload import built_engine

from difftrain.config import TrainConfig
from difftrain.contracts import EVERY, Bucket, Parts
from difftrain.device import choose, use_attention
from difftrain.models.registry import make_family
from difftrain.testing.batches import cached_batch

LIMIT = 0.8
FAMILY, SIZE = "flux", {
    "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 64, "num_attention_heads": 16, "axes_dims_rope": [16, 24, 24],
}  # fmt: skip
RANK = 16
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"type": "lora", "rank": RANK},
    "dora": {"type": "dora", "rank": RANK},
    "lokr": {"type": "lokr", "rank": RANK},
    "ia3": {"type": "ia3"},
}


class Way:
    """One way of training, and how long its steps took."""

    def __init__(self, adapter: dict[str, Any], size: Path) -> None:
        given = {
            "model": {"family": FAMILY, "init_from_config": str(size)},
            "training": {"seed": 1},
            "optimizer": {"learning_rate": 1e-4},
            "adapter": adapter,
        }
        self.family: Any = make_family(TrainConfig.model_validate(given))
        parts = self.family.load(deferred=EVERY)
        parts.fill_root()
        self.parts, device = Parts(parts.root, config=parts.config, base=parts.base), choose("cpu")
        use_attention(parts.root, device, fused=True, choice="auto", precision="no")
        self.engine = built_engine(self.family, self.parts, device)
        self.times: list[float] = []

    def step(self, seed: int, side: int) -> None:
        """Take a step."""
        batch = cached_batch(self.family, Bucket(side, side), 1, seed=seed)
        began = time.process_time()  # of one thread: others of the machine do not count
        self.engine.step([batch], dict(batch.counts))
        self.times.append(time.process_time() - began)


def main() -> int:
    """Run; return 1 where the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=384, help="pixels of a side (384)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each way that count (12)")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS)[1:], default=list(WAYS)[1:])
    options = parser.parse_args()
    torch.set_num_threads(1)

    # --- a size of our own
    tiny: Any = make_family(TrainConfig.model_validate({"model": {"family": FAMILY, "init_from_config": "tiny"}}))
    sizes = tiny.architecture()
    sizes["transformer"] = {**sizes["transformer"], **SIZE}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.json"
        path.write_text(json.dumps(sizes, default=list))
        ways = {name: Way(WAYS[name], path) for name in ("full", *options.ways)}

        # --- in turns
        for number in range(options.steps + 2):
            for way in ways.values():
                way.step(number, options.side)
        bucket, report = Bucket(options.side, options.side), Report()
        full = ways["full"]
        counted = full.family.flops_per_sample(full.parts, bucket)
        for name in options.ways:
            way = ways[name]
            ratio = statistics.median(one / other for one, other in zip(way.times[2:], full.times[2:], strict=True))
            share = way.family.flops_per_sample(way.parts, bucket) / counted
            text, note = f"{name}, a step over a full one", f"operations {share:.3f}"
            report.check(text, ratio, LIMIT, "x", note) if name == "lora" else report.log(text, ratio, "x", note)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
