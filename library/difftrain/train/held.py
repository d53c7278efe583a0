"""What a card holds for weights and their update, measured once the first update is done."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from difftrain.engine.halves import weights_kept
from difftrain.train.cache_plan import amount
from difftrain.train.state import Run

log = logging.getLogger("difftrain")


def say_memory(run: Run) -> None:
    """Say it once a session, behind the first update, when the optimizer has its state."""
    if "memory" not in run.facts:
        run.facts["memory"] = memory_held(run)
        log.info("%s", run.facts["memory"])


def memory_held(run: Run) -> str:
    """Say what weights, gradients and optimizer state take, in what precision, activations aside."""
    trained = [each for each in run.parts.root.parameters() if each.requires_grad]
    names = sorted({str(each.dtype).removeprefix("torch.") for each in trained})
    frozen = _bytes(each for part in run.parts.frozen.values() for each in part.parameters())
    weights, state = _bytes(trained), _bytes(_tensors(getattr(getattr(run.engine, "optimizer", None), "state", {})))
    beside = weights_kept(run.cfg.training) if run.cfg.training.full_precision else ""
    kept = f", {beside} beside them" if beside not in ("", "none") else ""
    return (
        f"memory: trained weights {amount(weights)} in {' and '.join(names)}{kept}, as much for gradients, "
        f"optimizer state {amount(state)}; frozen weights {amount(frozen)}; activations come on top"
    )


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors if each.device != torch.device("meta"))
