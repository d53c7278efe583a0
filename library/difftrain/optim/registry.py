"""Optimizers by name: one literal line each; torch.optim's own by their names, any other class by its dotted path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from difftrain.config.schema import names
from difftrain.config.schema.rates import is_named, is_schedule_free
from difftrain.config.schema.sections import OptimizerSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, Group
from difftrain.optim import arguments
from difftrain.optim.making import ARGS, TYPE, OptimizerOrder, construct
from difftrain.optim.schedule import make_schedule
from difftrain.optim.schedule_free import averages, wrap

REGISTRY = {
    "AdamW": "difftrain.optim.builders:make_adamw",
    "oss": "difftrain.optim.builders:make_oss",
    "NpuFusedAdamW": "difftrain.optim.builders:make_npu_adamw",
    "SGDNesterov": "difftrain.optim.builders:make_sgd_nesterov",
    "Lion": "difftrain.optim.builders:make_lion",
    "Muon": "difftrain.optim.muon:make",
    "GenericOptim": "difftrain.optim.generic:make",
    "Automagic": "difftrain.optim.automagic:make",
    "Adafactor": "difftrain.optim.builders:make_adafactor",
    "AdamW8bit": "difftrain.optim.builders:make_eight_bit",
    "PagedAdamW": "difftrain.optim.builders:make_eight_bit",
    "PagedAdamW8bit": "difftrain.optim.builders:make_eight_bit",
    "PagedAdamW32bit": "difftrain.optim.builders:make_eight_bit",
    "Lion8bit": "difftrain.optim.builders:make_eight_bit",
    "PagedLion8bit": "difftrain.optim.builders:make_eight_bit",
    "SGDNesterov8bit": "difftrain.optim.builders:make_eight_bit",
    "AdamW8bitKahan": "difftrain.optim.builders:make_eight_bit",
    "DAdaptation": "difftrain.optim.builders:make_adaptive",
    "DAdaptAdamPreprint": "difftrain.optim.builders:make_adaptive",
    "DAdaptAdaGrad": "difftrain.optim.builders:make_adaptive",
    "DAdaptAdam": "difftrain.optim.builders:make_adaptive",
    "DAdaptAdan": "difftrain.optim.builders:make_adaptive",
    "DAdaptAdanIP": "difftrain.optim.builders:make_adaptive",
    "DAdaptLion": "difftrain.optim.builders:make_adaptive",
    "DAdaptSGD": "difftrain.optim.builders:make_adaptive",
    "Prodigy": "difftrain.optim.builders:make_adaptive",
    "AdamWScheduleFree": "difftrain.optim.schedule_free:make",
    "RAdamScheduleFree": "difftrain.optim.schedule_free:make",
    "SGDScheduleFree": "difftrain.optim.schedule_free:make",
}
_WRAPPER_ARGS = "optimizer.schedulefree_wrapper_args"
Maker = Callable[[OptimizerOrder], Optimizer]


def make_optimizer(
    section: OptimizerSection, groups: list[Group], *, dp_size: int = 1, fused_ok: bool = True, trial: bool = True
) -> Optimizer:
    """Make the optimizer that the configuration names, after the model is wrapped.

    fused_ok: the device runs torch's fused kernels. trial: see Order. Raises ConfigFault for a name or an argument that
    is not known, and for a package that is missing.
    """
    tables = [_table(group) for group in groups]
    arguments_given = arguments.parse(option(ARGS), section.args)
    name = names.proper(section.type, REGISTRY)
    lr = section.learning_rate or groups[0].lr
    order = OptimizerOrder(name or section.type, tables, lr, arguments_given, dp_size, fused_ok, trial, tuple(groups))
    optimizer = _maker(name)(order) if name else _any_class(order)
    if section.schedulefree_wrapper and not is_schedule_free(section):
        optimizer = wrap(optimizer, arguments.parse(option(_WRAPPER_ARGS), section.schedulefree_wrapper_args))
    if averages(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _maker(name: str) -> Maker:
    module, _, attribute = REGISTRY[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _any_class(order: OptimizerOrder) -> Optimizer:
    path = order.name
    if "." not in path:
        if not (own := names.proper(path, names.TORCH_OPTIMIZERS)):
            known = ", ".join((*REGISTRY, *names.TORCH_OPTIMIZERS))
            remedy = f"one of {known}, or package.module.Class such as torch.optim.SGD"
            raise ConfigFault([Fault(option(TYPE), f"got {path!r}", remedy)])
        path = f"torch.optim.{own}"
    kind: Callable[..., Optimizer] = arguments.load(option(TYPE), path, Optimizer)
    return construct(order, kind)


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


def check_optimizer(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that cannot be stepped once for a backward pass; every weight is in a group. Raises ConfigFault."""
    owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
    left = sorted(name for name, weight in weights.items() if id(weight) not in owned)
    assert not left, f"parameters in no group: {left[:5]}"
    closure = inspect.signature(inner(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = f"{type(optimizer).__name__} evaluates the loss several times a step"
        remedy = "use an optimizer that evaluates the loss once per step"
        raise ConfigFault([Fault(option("optimizer.type"), what, remedy)])


# --- what is wrong with an optimizer section, found before any device is touched


def faults(section: OptimizerSection, total_steps: int = 1000) -> list[Fault]:
    """Return every fault of the optimizer's and the schedule's names and arguments, by making both for one number."""
    group = Group("probe", [("probe", torch.nn.Parameter(torch.zeros(1)))], section.learning_rate or 1.0)
    problems: list[Fault] = []
    optimizer: Optimizer = torch.optim.SGD([group.named_params[0][1]], lr=group.lr)
    try:
        optimizer = make_optimizer(section, [group], trial=False)
    except ConfigFault as fault:
        problems += fault.faults
    try:
        make_schedule(section, optimizer, total_steps)
    except ConfigFault as fault:
        problems += fault.faults
    if is_named(section, ("DAdaptSGD",)) and section.learning_rate and not optimizer.param_groups[0]["lr"]:
        what = "DAdaptSGD divides by the first rate, which is 0 with this warm-up"
        problems.append(Fault(option("optimizer.warmup_steps"), what, "no warm-up, or another optimizer"))
    return problems
