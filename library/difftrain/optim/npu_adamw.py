"""AdamW of torch_npu, over combined tensors (device/combined.py says when it is worth a try)."""

from __future__ import annotations

from torch.optim import AdamW, Optimizer

from difftrain.config.constructors import NPU_FUSED_ADAMW
from difftrain.config.hidden_imports import is_installed
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.device import combined
from difftrain.optim.making import ARGS, TYPE, OptimizerOrder, construct, package_of


def make(order: OptimizerOrder) -> Optimizer:
    """Make it. Raises ConfigFault where the parameters are not what it updates.

    Where arguments are only checked, or state only counted, no NPU is at hand: torch's AdamW stands in, which has both.
    """
    wrong = [name for name in order.given if name not in NPU_FUSED_ADAMW]
    if wrong:
        remedy = f"it takes {', '.join(NPU_FUSED_ADAMW)}"
        raise ConfigFault([Fault(ARGS, f"{order.name} takes no {', '.join(wrong)} here", remedy)])
    if not order.trial:
        with package_of(order.name):
            _look_for("torch_npu")
    if not (order.trial and order.fused_ok):
        return construct(order, AdamW)
    reason = combined.why_not([each for table in order.tables for each in table["params"]])
    if reason:
        raise ConfigFault([Fault(TYPE, f"{order.name}: {reason}", f"{option('optimizer.type')}=AdamW")])
    with package_of(order.name):
        kind = combined.load()
    return construct(order, kind)


def _look_for(module: str) -> None:
    """Raise ImportError where a package is missing; it is not imported."""
    if not is_installed(module):
        raise ImportError(f"no module named {module}", name=module)
