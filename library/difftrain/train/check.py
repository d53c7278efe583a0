"""What can be known to be wrong before a device is touched or data are read: all of it, reported together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from difftrain import optim
from difftrain.config import TrainConfig
from difftrain.contracts import ConfigFault, Family, Fault, Parts
from difftrain.data.sources import own_class
from difftrain.train.drawing import prompts_of


def check(cfg: TrainConfig, family: Family) -> Parts:
    """Look at optimizer, prompts, the user's data set class, weights (their headers are enough) and tokenizers; return the parts without weights.

    Raises ConfigFault with every fault.
    """
    faults: list[Fault] = optim.faults(cfg.optimizer, cfg.training.max_steps)

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ConfigFault as found:
            faults.extend(found.faults)
            return None

    attempt(lambda: prompts_of(cfg.sample))
    if cfg.data.dataset_class:
        attempt(lambda: own_class.make(str(cfg.data.dataset_class), *cfg.data.dirs[:1]))
    parts = attempt(lambda: family.load(meta=True)) or Parts(root=nn.Module())
    attempt(lambda: family.tokenizer(parts))
    if faults:
        raise ConfigFault(faults)
    return parts
