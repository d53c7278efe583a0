"""Optimizers of bitsandbytes: state in 8 bits, or in memory that is paged between the device and the host."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.optim.making import TYPE, OptimizerOrder, construct, package_of
from difftrain.optim.torchs import MOMENTUM

_TRIED = 4096  # elements; smaller tensors have their state in 32 bits
_PAGED = ("state1", "state2")


def make(order: OptimizerOrder) -> Optimizer:
    """Make the named one. Raises ConfigFault where this bitsandbytes cannot update on the parameters' device."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about kernels of 4-bit inference
    with package_of(order.name):
        from bitsandbytes import optim
    if order.name == "SGDNesterov8bit":
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
