"""What the device refuses of torch's operators and of collectives: tables, each rule with its source.

`check` is asked once for each new pair of operator and dtypes (the kernels keep the answer), so it is a pure function of
its arguments. To add a rule: a `Rule` in RULES; README.md's table and test_policy.py follow RULES by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from simulator.errors import Refused

Dtypes = tuple[torch.dtype | str, ...]
Cann = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """One thing that hardware refuses: when, why, and who says so."""

    name: str
    applies: Callable[[str, Dtypes, Cann], bool]
    why: str
    source: str
    strict_only: bool = False


def base_name(op: str) -> str:
    """Return an operator's name without namespace, overload and the mark of in-place forms: aten::add_.Tensor is add."""
    name = op.rpartition("::")[2].partition(".")[0]
    return name.rstrip("_") or name


RULES: tuple[Rule, ...] = ()


def check(op: str, dtypes: Dtypes, *, cann: Cann, strict: bool) -> None:
    """Say whether the device takes an operator with operands of these dtypes.

    Raises: Refused, naming rule and source.
    """
    name = base_name(op)
    for rule in RULES:
        if (strict or not rule.strict_only) and rule.applies(name, dtypes, cann):
            words = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise Refused(f"{op} of ({words}): {rule.why}. Rule: {rule.name}. Source: {rule.source}")
