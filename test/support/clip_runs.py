"""The made-up family of clips, trained on pictures of a folder in one process: online, or from what is cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftrain.cache.build import CachedData, with_cache
from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Parts
from difftrain.data.loader import make_loader
from difftrain.data.prepare import Data, make_plan, open_data, prepare
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.clips import ClipFamily

GLOBAL = 2  # samples of an update
ON_DISK = {"latents_to_disk": True, "text_to_disk": True}
IN_MEMORY = {"latents": True, "text": True}


def config(pictures: Path, cache: dict[str, Any] | None = None, **sections: Any) -> TrainConfig:
    """Return a configuration of a folder of pictures; the cache lies beside it."""
    data = {
        "dirs": (str(pictures),),
        "resolution": (64, 64),
        "enable_bucket": True,
        "min_bucket_reso": 32,
        "max_bucket_reso": 128,
        "bucket_reso_steps": 32,
        "flip": True,
        "workers": 0,
        "cache_dir": str(pictures.parent / "cache"),
    } | sections.pop("data", {})
    given = {"data": data, "training": {"batch_size": GLOBAL, "seed": 1, "device": "cpu"}, "cache": cache or {}}
    return TrainConfig.model_validate(given | {"captions": {"dropout_rate": 0.2}} | sections)


def opened(cfg: TrainConfig, parts: Parts, ranks: Ranks | None = None) -> Data:
    """Open the data, with what is cached of them."""
    return cached(cfg, parts, ranks).data


def cached(cfg: TrainConfig, parts: Parts, ranks: Ranks | None = None) -> CachedData:
    """Open the data, with what is cached of them and what could not be."""
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    return with_cache(cfg, choose("cpu"), ranks or Ranks(), ClipFamily(seed=1), parts, data)  # type: ignore[arg-type]


def batches(
    cfg: TrainConfig, family: ClipFamily, parts: Parts, data: Data, ranks: Ranks | None = None
) -> Iterator[list[Batch]]:
    """Yield the micro batches of every update of two epochs, this rank's."""
    plan, ranks = make_plan(data, cfg, GLOBAL), ranks or Ranks()
    yield from make_loader(
        data, plan, family.features, family.tokenizer(parts), cfg,
        dp_rank=ranks.rank, dp_size=ranks.size, first_step=0, last_step=plan.total_steps(2),
    )  # fmt: skip


def losses(cfg: TrainConfig, family: ClipFamily, parts: Parts, data: Data, ranks: Ranks | None = None) -> list[float]:
    """Train for two epochs."""
    engine = make_engine(cfg, choose("cpu"), ranks or Ranks())
    engine.build(
        family,  # type: ignore[arg-type]
        parts,
        lambda groups: make_optimizer(cfg.optimizer, groups),
        lambda optimizer: make_schedule(cfg.optimizer, optimizer, 20),
        next(batches(cfg, family, parts, data, ranks))[:1],
    )
    counts = {"samples": float(GLOBAL)}
    return [float(engine.step(micro, counts).sums["loss"]) for micro in batches(cfg, family, parts, data, ranks)]
