"""The batches of an epoch of a model that edits, cached as its configuration asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

from difftrain.cache.build import with_cache
from difftrain.config import TrainConfig
from difftrain.contracts import Batch
from difftrain.data.loader import make_loader
from difftrain.data.prepare import Data, make_plan, open_data, prepare
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.models.registry import make_family


def batches(cfg: TrainConfig, change: Any = lambda data: data) -> tuple[Any, Any, Data, list[Batch]]:
    """Return family, parts, data and the batches of an epoch, cached as the configuration asks for."""
    family = make_family(cfg)
    parts = family.load()
    data = change(open_data(cfg, prepare(cfg, log=lambda line: None)))
    data = with_cache(cfg, choose("cpu"), Ranks(), family, parts, data).data
    plan = make_plan(data, cfg, cfg.training.batch_size)
    where = {"first_step": 0, "last_step": plan.total_steps(1), "dp_rank": 0, "dp_size": 1}
    loader = make_loader(data, plan, family.features, family.tokenizer(parts), cfg, **where)
    return family, parts, data, [batch for micro in loader for batch in micro]


def flipped(data: Data) -> Data:
    return dataclasses.replace(data, recipes=tuple(dataclasses.replace(one, flip=True) for one in data.recipes))
