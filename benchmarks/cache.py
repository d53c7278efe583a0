"""A step from features cached on disk over a step that encodes online: same tiny SDXL, same pictures, step by step in turns.

    python benchmarks/cache.py                some minutes on two cores

Both sides load and train in this process without loader workers, so that a step's time is all the work that it takes: reading
or decoding, encoding or not, forward, backward and update. Also prints what building took beside a bare loop of the same
encoders on ready tensors. The tiny model has tiny encoders: with SDXL's own, on a device that waits for them, the gain is
another. Exit code 1 where the losses differ, or where the cache is no faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import torch

from difftrain import optim
from difftrain.cache.build import with_cache
from difftrain.config import TrainConfig
from difftrain.contracts import Batch
from difftrain.data.loader import make_loader
from difftrain.data.prepare import Data, make_plan, open_data, prepare
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.registry import make_family
from difftrain.testing.pictures import write_folder

WARM_UP = 3
SAME_LOSS = 1e-5  # relative, fp32: the encoders' batches differ


def config(folder: Path, options: argparse.Namespace, **cache: bool) -> TrainConfig:
    """Return a plain configuration of the tiny model."""
    side = options.resolution
    return TrainConfig.model_validate(
        {
            "model": {"init_from_config": "tiny"},
            "data": {"dirs": (str(folder / "data"),), "resolution": (side, side), "workers": 0}
            | {"cache_dir": str(folder / "cache")},
            "cache": cache,
            "training": {"batch_size": options.batch_size, "max_steps": options.steps, "seed": 1},
            "optimizer": {"learning_rate": 1e-4},
        }
    )


class Side:
    """One of the two: its engine, its batches, and the seconds of its steps."""

    def __init__(self, cfg: TrainConfig) -> None:
        ranks, device = Ranks(), choose("cpu")
        family, self.cfg = make_family(cfg), cfg
        parts = family.load()
        data = open_data(cfg, prepare(cfg, log=lambda line: None))
        began = time.perf_counter()
        data = with_cache(cfg, device, ranks, family, parts, data).data
        self.building_s = time.perf_counter() - began
        self.engine = make_engine(cfg, device, ranks)
        self.engine.build(
            family,
            parts,
            lambda groups: optim.make_optimizer(cfg.optimizer, groups, dp_size=1, fused_ok=True),
            lambda optimizer: optim.make_schedule(cfg.optimizer, optimizer, cfg.training.max_steps),
            [],
        )
        self.family, self.parts = family, parts
        self.batches = self._batches(data)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def _batches(self, data: Data) -> Iterator[list[Batch]]:
        plan = make_plan(data, self.cfg, self.cfg.training.batch_size)
        tokenize, last = self.family.tokenizer(self.parts), self.cfg.training.max_steps
        where: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "first_step": 0, "last_step": last}
        return iter(make_loader(data, plan, self.family.features, tokenize, self.cfg, **where))

    def step(self) -> None:
        """Load a batch and train on it."""
        began = time.perf_counter()
        micro = next(self.batches)
        stats = self.engine.step(micro, {"samples": float(self.cfg.training.batch_size)})
        self.losses.append(float(stats.sums["loss"]))
        self.seconds.append(time.perf_counter() - began)


def bare_s(online: Side, options: argparse.Namespace) -> float:
    """Return the seconds that the encoders alone take for all pictures and captions, on ready tensors."""
    (batch,) = next(online.batches)
    encoders = online.family.encoders(online.parts)
    began = time.perf_counter()
    with torch.no_grad():
        for _ in range(options.pictures // options.batch_size):
            encoders["latents"].encode(batch)
        ids = [name for name in batch.features if name.startswith("input_ids")]
        few = {name: batch.features[name].repeat_interleave(32 // options.batch_size, 0) for name in ids}
        for _ in range(options.pictures // 32):
            for each in encoders.values():
                if each.source == {"caption"}:
                    each.encode(dataclasses.replace(batch, features=few))
    return time.perf_counter() - began


def main() -> int:
    """Measure, print, and say whether the cache pays."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--pictures", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="cache-") as name:
        folder, side = Path(name), options.resolution
        write_folder(folder / "data", [(side * 2, side * 2)] * options.pictures)
        online = Side(config(folder, options))
        cached = Side(config(folder, options, latents_to_disk=True, text_to_disk=True))
        for _ in range(options.steps - 1):
            online.step()
            cached.step()
        bare = bare_s(online, options)
    pairs = [a / b for a, b in zip(cached.seconds, online.seconds, strict=True)][WARM_UP:]
    ratio = statistics.median(pairs)
    apart = max(abs(a - b) / abs(b) for a, b in zip(cached.losses, online.losses, strict=True))
    middle = [1000 * statistics.median(each.seconds) for each in (cached, online)]
    good = ratio < 1 and apart <= SAME_LOSS
    print(f"step from the cache over step online: {ratio:.3f} ({middle[0]:.0f} against {middle[1]:.0f} ms)")
    print(f"losses apart: {apart:.1e} (limit {SAME_LOSS:g})")
    print(
        f"building, decoding in the same process: {cached.building_s:.1f} s for {options.pictures} pictures and captions; "
        f"the encoders alone: {bare:.1f} s"
    )
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
