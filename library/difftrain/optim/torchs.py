"""torch's own: AdamW with kohya's defaults, whole or with its state sharded over the ranks, and SGD with Nesterov."""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, AdamW, Optimizer

from difftrain.config.schema.rates import is_named
from difftrain.config.schema.sections import OptimizerSection
from difftrain.config.spellings.spelling import option
from difftrain.optim import arguments
from difftrain.optim.making import ARGS, OptimizerOrder, construct

_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MOMENTUM = 0.9  # kohya's, where Nesterov is asked for and no momentum is given


def _settings(order: OptimizerOrder) -> dict[str, Any]:
    """Choose one implementation per device, so that runs can be compared bit by bit.

    The fused one takes found_inf and the loss scale on the device: a skipped update costs no host wait.
    """
    chosen = not {"fused", "foreach"} & order.given.keys()
    return {**_DEFAULTS, **({"fused": True} if order.fused_ok and chosen else {})}


def make_adamw(order: OptimizerOrder) -> Optimizer:
    """Make AdamW; every rank holds the whole state."""
    return construct(order, AdamW, _settings(order))


def announce(section: OptimizerSection, choice: str) -> list[str]:
    """Return the sentence about a choice between AdamWs, where the user has not made it."""
    given = arguments.parse(option(ARGS), section.args)
    return (
        [choice] if choice and is_named(section, ("AdamW", "oss")) and not {"fused", "foreach"} & given.keys() else []
    )


def make_oss(order: OptimizerOrder) -> Optimizer:
    """Make AdamW with its state sharded over the ranks; on one rank there is nothing to shard."""
    whole = make_adamw(order)  # also checks the arguments
    if order.dp_size == 1:
        return whole
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(order.tables, AdamW, lr=order.lr, **(_settings(order) | order.given))


def make_sgd_nesterov(order: OptimizerOrder) -> Optimizer:
    """Make SGD with Nesterov momentum."""
    return construct(order, SGD, {"momentum": MOMENTUM}, nesterov=True)
