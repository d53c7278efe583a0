"""Optimizers by name: one literal line each, any other class by its dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from difftrain.config.sections import OptimizerSection
from difftrain.contracts import ConfigFault, Fault, Group
from difftrain.optim import arguments

REGISTRY = {
    "AdamW": "difftrain.optim.adamw:make_adamw",
    "oss": "difftrain.optim.adamw:make_oss",
}
_TYPE, _ARGS = "--optimizer_type", "--optimizer_args"

# (parameter groups, learning rate, arguments, data-parallel size, fused allowed) -> optimizer
Maker = Callable[[list[dict[str, Any]], float, dict[str, Any], int, bool], Optimizer]


def make_optimizer(
    section: OptimizerSection, groups: list[Group], *, dp_size: int = 1, fused_ok: bool = True
) -> Optimizer:
    """Make the optimizer that the configuration names, after the model is wrapped.

    fused_ok: the device runs torch's fused kernels. Raises ConfigFault for a name or an argument that is not known.
    """
    given = arguments.parse(_ARGS, section.args)
    tables = [_table(group) for group in groups]
    names = {name.lower(): name for name in REGISTRY}
    if section.type.lower() in names:
        module, _, attribute = REGISTRY[names[section.type.lower()]].partition(":")
        maker: Maker = getattr(importlib.import_module(module), attribute)
        return maker(tables, section.learning_rate, given, dp_size, fused_ok)
    if "." not in section.type:
        known = ", ".join(REGISTRY)
        remedy = f"one of {known}, or package.module.Class such as torch.optim.SGD"
        raise ConfigFault([Fault(_TYPE, f"got {section.type!r}", remedy)])
    return _dotted(section, tables, given)


def _dotted(section: OptimizerSection, tables: list[dict[str, Any]], given: dict[str, Any]) -> Optimizer:
    kind: Callable[..., Optimizer] = arguments.load(_TYPE, section.type, Optimizer)
    arguments.check(_ARGS, section.type, kind, given, ("params", "lr"))
    try:
        return kind(tables, lr=section.learning_rate, **given)
    except (TypeError, ValueError) as error:
        raise ConfigFault([Fault(_ARGS, f"{section.type} refuses them: {error}")]) from error


def _table(group: Group) -> dict[str, Any]:
    """Turn a Group into torch's form; the name stays in it, for logs."""
    table: dict[str, Any] = {"params": [param for _, param in group.named_params], "lr": group.lr, "name": group.name}
    if group.weight_decay is not None:
        table["weight_decay"] = group.weight_decay
    return table


def inner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds this rank's state and does the update: itself, or what a sharding one wraps.

    found_inf and grad_scale belong on this one.
    """
    wrapped = getattr(optimizer, "optim", None)
    return wrapped if isinstance(wrapped, torch.optim.Optimizer) else optimizer
