"""Optimizers that torch and other packages bring, a function each: what kohya's names and defaults make of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from difftrain.config.constructors import NPU_FUSED_ADAMW
from difftrain.config.hidden_imports import is_installed
from difftrain.config.schema.names import FIRST_RATE
from difftrain.config.schema.rates import is_named
from difftrain.config.schema.sections import OptimizerSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.device import combined
from difftrain.optim import arguments
from difftrain.optim.making import ARGS, TYPE, OptimizerOrder, construct, package_of

_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MOMENTUM = 0.9  # kohya's, where Nesterov is asked for and no momentum is given


def _settings(order: OptimizerOrder) -> dict[str, Any]:
    """Choose one implementation per device, so that runs can be compared bit by bit.

    The fused one takes found_inf and the loss scale on the device: a skipped update costs no host wait.
    """
    chosen = not {"fused", "foreach"} & order.arguments.keys()
    return {**_DEFAULTS, **({"fused": True} if order.fused_ok and chosen else {})}


def make_adamw(order: OptimizerOrder) -> Optimizer:
    """Make AdamW; every rank holds the whole state."""
    return construct(order, AdamW, _settings(order))


def announce(section: OptimizerSection, choice: str) -> list[str]:
    """Return the sentence about a choice between AdamWs, where the user has not made it."""
    arguments_given = arguments.parse(option(ARGS), section.args)
    return (
        [choice]
        if choice and is_named(section, ("AdamW", "oss")) and not {"fused", "foreach"} & arguments_given.keys()
        else []
    )


def make_oss(order: OptimizerOrder) -> Optimizer:
    """Make AdamW with its state sharded over the ranks; on one rank there is nothing to shard."""
    unsharded = make_adamw(order)  # also checks the arguments
    if order.dp_size == 1:
        return unsharded
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(order.tables, AdamW, lr=order.lr, **(_settings(order) | order.arguments))


def make_sgd_nesterov(order: OptimizerOrder) -> Optimizer:
    """Make SGD with Nesterov momentum."""
    return construct(order, SGD, {"momentum": MOMENTUM}, nesterov=True)


# --- AdamW of torch_npu, over combined tensors (device/combined.py says when it is worth a try)


def make_npu_adamw(order: OptimizerOrder) -> Optimizer:
    """Make it. Raises ConfigFault where the parameters are not what it updates.

    Where arguments are only checked, or state only counted, no NPU is at hand: torch's AdamW stands in, which has both.
    """
    wrong = [name for name in order.arguments if name not in NPU_FUSED_ADAMW]
    if wrong:
        remedy = f"it takes {', '.join(NPU_FUSED_ADAMW)}"
        raise ConfigFault([Fault(option(ARGS), f"{order.name} takes no {', '.join(wrong)} here", remedy)])
    if not order.trial:
        with package_of(order.name):
            _look_for("torch_npu")
    if not (order.trial and order.fused_ok):
        return construct(order, AdamW)
    reason = combined.why_not([param for table in order.tables for param in table["params"]])
    if reason:
        raise ConfigFault([Fault(option(TYPE), f"{order.name}: {reason}", f"{option('optimizer.type')}=AdamW")])
    with package_of(order.name):
        kind = combined.load()
    return construct(order, kind)


def _look_for(module: str) -> None:
    """Raise ImportError where a package is missing; it is not imported."""
    if not is_installed(module):
        raise ImportError(f"no module named {module}", name=module)


# --- Lion (Chen et al. 2023), of the package lion-pytorch


def make_lion(order: OptimizerOrder) -> Optimizer:
    """Make Lion."""
    with package_of(order.name):
        from lion_pytorch import Lion
    return construct(order, Lion)


# --- Adafactor (Shazeer and Stern 2018), transformers' as in kohya's scripts, and the schedule that shows its rate


def make_adafactor(order: OptimizerOrder) -> Optimizer:
    """Make Adafactor. As kohya: it computes its own rate unless relative_step=False, and warmup_init forces that."""
    from transformers.optimization import Adafactor

    relative = order.arguments.get("relative_step", True) or order.arguments.get("warmup_init", False)
    if not relative:
        return _waiting_less(construct(order, Adafactor))
    settings = {**order.arguments, "relative_step": True}
    tables = [{key: value for key, value in table.items() if key != "lr"} for table in order.tables]
    return _waiting_less(construct(OptimizerOrder(order.name, tables, order.lr, settings), Adafactor, {"lr": None}))


def _waiting_less(optimizer: Optimizer) -> Optimizer:
    """Let every tensor's rate stay on its device: transformers compares the tensor's size with a number, on the host."""
    original: Callable[[dict[str, Any], dict[str, Any]], Any] = optimizer._get_lr  # type: ignore[attr-defined]

    def rate(group: dict[str, Any], state: dict[str, Any]) -> Any:
        size = state.get("RMS")
        if not group["scale_parameter"] or not isinstance(size, Tensor) or size.device.type == "cpu":
            return original(group, state)
        return original({**group, "scale_parameter": False}, state) * size.clamp(min=group["eps"][1])

    optimizer._get_lr = rate  # type: ignore[attr-defined]
    return optimizer


class AdafactorSchedule(LRScheduler):
    """Show the rate that a relative Adafactor computed for the first tensor of every group; it reads none of it.

    Unlike transformers' it goes by the optimizer's state, so it is right after a restart and without gradients too.
    """

    def __init__(self, optimizer: Optimizer, initial: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = initial
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the last update's rates, before the first one the initial ones."""
        return [self._rate(group, base) for group, base in zip(self.optimizer.param_groups, self.base_lrs)]

    def _rate(self, group: dict[str, Any], base: float | Tensor) -> float:
        state = self.optimizer.state.get(group["params"][0], {})
        return float(self.optimizer._get_lr(group, state)) if state else float(base)  # type: ignore[attr-defined]


# --- Optimizers that estimate the learning rate: D-Adaptation (Defazio and Mishchenko 2023) and Prodigy (2024)
# The estimate d and what it is made of live in the parameter groups; the rate of a group is a factor of d, about 1.


def make_adaptive(order: OptimizerOrder) -> Optimizer:
    """Make the named one. Raises ConfigFault where groups have rates of their own and it would stop at them."""
    rates = {table["lr"] for table in order.tables}
    if len(rates) > 1 and order.name not in FIRST_RATE:
        what = f"{order.name} takes one rate for all groups, but there are {', '.join(f'{r:g}' for r in sorted(rates))}"
        raise ConfigFault([Fault(option(TYPE), what, "give one rate for everything")])
    return construct(order, _class(order.name))


def _class(name: str) -> Callable[..., Optimizer]:
    with package_of(name):
        if name == "Prodigy":
            from prodigyopt import Prodigy

            return Prodigy
        import dadaptation
        from dadaptation import experimental
    name = {"DAdaptation": "DAdaptAdamPreprint"}.get(name, name)
    return getattr(experimental if name in ("DAdaptAdamPreprint", "DAdaptAdanIP") else dadaptation, name)


def estimate(optimizer: Optimizer) -> float | Tensor | None:
    """Return d where the optimizer estimates it, as the next update will use it; where that keeps it, so no wait."""
    d = optimizer.param_groups[0].get("d")
    if isinstance(d, Tensor):  # DAdaptAdanIP's
        return d.detach().clone() if d.ndim == 0 else None
    return d if isinstance(d, float) else None


# --- Optimizers of bitsandbytes: state in 8 bits, or in memory that is paged between the device and the host


_TRIED = 4096  # elements; smaller tensors have their state in 32 bits
_PAGED = ("state1", "state2")


def make_eight_bit(order: OptimizerOrder) -> Optimizer:
    """Make the named one. Raises ConfigFault where this bitsandbytes cannot update on the parameters' device."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about kernels of 4-bit inference
    with package_of(order.name):
        from bitsandbytes import optim

        if order.name == "AdamW8bitKahan":
            from difftrain.optim.adamw_8bit_kahan import AdamW8bitKahan
    if order.name == "AdamW8bitKahan":
        made = construct(order, AdamW8bitKahan)
    elif order.name == "SGDNesterov8bit":
        made = construct(order, optim.SGD8bit, {"momentum": MOMENTUM}, nesterov=True)
    else:
        made = construct(order, getattr(optim, order.name))
    if order.trial:
        _try(optim.AdamW8bit, made.param_groups[0]["params"][0].device)
    return made


def _try(kind: Any, device: torch.device) -> None:
    """Make one update of a throw-away parameter: not every version has kernels for every device."""
    parameter = torch.nn.Parameter(torch.zeros(_TRIED, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        kind([parameter], lr=1e-3).step()
    except (RuntimeError, NotImplementedError, ValueError, OSError, AttributeError) as error:
        import bitsandbytes

        what = f"bitsandbytes {bitsandbytes.__version__} cannot update on {device}: {str(error).splitlines()[0]}"
        remedy = f"a newer bitsandbytes (0.50 does on a CPU), or {option('optimizer.type')}=AdamW, Lion or Adafactor"
        raise ConfigFault([Fault(option(TYPE), what, remedy)]) from error


def page_again(optimizer: Any, parameter: Tensor) -> None:
    """Move state that was loaded into paged memory, where this optimizer keeps it; nothing with any other."""
    if getattr(optimizer, "is_paged", False) and hasattr(optimizer, "get_state_buffer"):
        state = optimizer.state[parameter]
        for key in _PAGED:
            if key in state:
                state[key] = optimizer.get_state_buffer(parameter, dtype=state[key].dtype).copy_(state[key])
