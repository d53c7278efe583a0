"""AdamW with kohya's defaults, whole or with its state sharded over the data-parallel ranks."""

from __future__ import annotations

from typing import Any

from torch.optim import AdamW, Optimizer

from difftrain.contracts import ConfigFault, Fault
from difftrain.optim import arguments

_ARGS = "--optimizer_args"
_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def _settings(given: dict[str, Any], fused_ok: bool) -> dict[str, Any]:
    """Merge defaults and arguments. One implementation per device, so that runs can be compared bit by bit.

    The fused one takes found_inf and the loss scale on the device: a skipped update costs no host wait.
    """
    arguments.check(_ARGS, "AdamW", AdamW, given, ("params", "lr"))
    chosen = not {"fused", "foreach"} & given.keys()
    return {**_DEFAULTS, **({"fused": True} if fused_ok and chosen else {}), **given}


def make_adamw(
    tables: list[dict[str, Any]], lr: float, given: dict[str, Any], dp_size: int, fused_ok: bool
) -> Optimizer:
    """Make AdamW; every rank holds the whole state."""
    settings = _settings(given, fused_ok)
    try:
        return AdamW(tables, lr=lr, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigFault([Fault(_ARGS, f"AdamW refuses them: {error}")]) from error


def make_oss(tables: list[dict[str, Any]], lr: float, given: dict[str, Any], dp_size: int, fused_ok: bool) -> Optimizer:
    """Make AdamW with its state sharded over the ranks; on one rank there is nothing to shard."""
    whole = make_adamw(tables, lr, given, dp_size, fused_ok)  # also checks the arguments
    if dp_size == 1:
        return whole
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(tables, AdamW, lr=lr, **_settings(given, fused_ok))
