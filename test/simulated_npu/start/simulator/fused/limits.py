"""How a reference says no: each documented limit with its source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from simulator import switches
from simulator.errors import Refused

WHEEL_DOCS = "torch_npu 2.13.0, torch_npu/_op_plugin_docs.py"
WHEEL_META = "torch_npu 2.13.0, torch_npu/op_plugin/meta/_meta_registrations.py"
OP_PLUGIN = "Ascend/op-plugin"

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def docs(op: str) -> str:
    """Name the page of the wheel's documentation that a limit of an operator comes from."""
    return f"{op} in {WHEEL_DOCS}"


def refuse(op: str, found: str, rule: str, source: str) -> NoReturn:
    """Raise what hardware would raise, in words that say what is allowed.

    Raises: Refused, always.
    """
    raise Refused(f"{op}: {found}. Rule: {rule}. Source: {source}")


def require(holds: bool, op: str, found: str, rule: str, source: str) -> None:
    """Refuse unless a rule holds."""
    if not holds:
        refuse(op, found, rule, source)


def require_dtype(op: str, name: str, tensor: Tensor, allowed: Iterable[torch.dtype], source: str) -> None:
    """Refuse a tensor whose dtype the kernel has no variant for."""
    allowed = tuple(allowed)
    if tensor.dtype not in allowed:
        words = ", ".join(str(each).removeprefix("torch.") for each in allowed)
        refuse(op, f"{name} is {tensor.dtype}", f"{name} has to be one of {words}", source)


def require_same_dtype(op: str, source: str, **tensors: Tensor | None) -> None:
    """Refuse tensors of different dtypes: a kernel is compiled for one."""
    found = {name: each.dtype for name, each in tensors.items() if each is not None}
    if len(set(found.values())) > 1:
        words = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
        refuse(op, words, f"{', '.join(found)} must have one dtype", source)


def cann_at_least(*version: int) -> bool:
    """Tell whether the CANN that is played is at least this version."""
    return switches.cann() >= version
