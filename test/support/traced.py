"""Steps traced by hand: one engine a family, which can be stepped again and again because nothing it does changes a weight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Engine, Family, Parts
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.train.diagnosis.tracing import Tracing
from difftrain.train.state import Position, TrainedModel

CLOCK: Any = SimpleNamespace(paused=lambda _: contextlib.nullcontext())


@dataclass
class Stepped:
    """A family with its engine, and micro batches."""

    cfg: TrainConfig
    family: Family
    parts: Parts
    engine: Engine
    micro: list[Batch]
    ranks: Ranks

    @property
    def samples(self) -> float:
        """Return how many samples all ranks have."""
        return float(sum(len(each.record_id) for each in self.micro) * self.ranks.size)

    @property
    def model(self) -> TrainedModel:
        """Return what hooks take."""
        return TrainedModel(self.family, self.parts, self.engine, None)  # type: ignore[arg-type]

    def step(self) -> float:
        """Make a step; return its loss."""
        return float(self.engine.step(self.micro, {"samples": self.samples}).sums["loss"])

    def traced(self, folder: Path, step: int = 1) -> Path:
        """Make a step that counts as that number, and return the folder of its trace."""
        save = self.cfg.save.model_copy(update={"output_dir": str(folder)})
        logging = self.cfg.logging.model_copy(update={"trace": str(step)})
        cfg = self.cfg.model_copy(update={"save": save, "logging": logging})
        tracing = Tracing(cfg, self.model, choose("cpu"), self.ranks, CLOCK)
        tracing.before_training(Position(step - 1, steps_left=1))
        self.step()
        tracing.after_step(Position(step))
        return folder


def stepped(cfg: TrainConfig, family: Family, micro: Any, ranks: Ranks | None = None) -> Stepped:
    """Build the engine. micro: of the parts. The rate is 0 where the configuration has none of its own."""
    ranks = ranks or Ranks()
    parts = family.load()
    engine, batches = make_engine(cfg, choose("cpu"), ranks), micro(parts)
    engine.build(
        family,
        parts,
        lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=ranks.size),
        lambda optimizer: make_schedule(cfg.optimizer, optimizer, 20),
        batches[:1],
    )
    return Stepped(cfg, family, parts, engine, batches, ranks)


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put something in the place of an attribute for a while; one that was not the object's own goes again."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
