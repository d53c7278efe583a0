"""Counts of attention calls: by the way each took, and why it was not fused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from difftrain.device import counters

_FUSED = "fused"
_KIND = re.compile(r"(recomputed )?(?:fused|sdpa \((.*)\))")


def count(why: str | None) -> None:
    """Count a call: fused where nothing is said against it, else by torch's SDPA.

    Apart where a backward pass computes it again, as gradient checkpointing does.
    """
    if not torch.compiler.is_compiling():  # in a graph nothing is counted, and what is asked below would break it
        again = torch._C._current_graph_task_id() != -1  # as torch's own checkpointing asks
        counters.count(("recomputed " if again else "") + (_FUSED if why is None else f"sdpa ({why})"))


@dataclass
class AttentionCalls:
    """Sum up what was counted. why: of those by SDPA, how many for each reason; recomputed: in backward passes."""

    fused: int = 0
    sdpa: int = 0
    recomputed: int = 0
    why: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, found: Mapping[str, int]) -> AttentionCalls:
        """Read a counter of `counting()`; what else it counts is left aside."""
        sums = cls()
        for kind, number in found.items():
            match = _KIND.fullmatch(kind)
            if match is None:
                continue
            if match[1]:
                sums.recomputed += number
            elif match[2] is None:
                sums.fused += number
            else:
                sums.sdpa += number
                sums.why[match[2]] += number
        return sums

    @staticmethod
    def counts(kind: str) -> bool:
        """Tell whether a key of `counting()` is about attention."""
        return _KIND.fullmatch(kind) is not None

    def record(self) -> dict[str, Any]:
        """Return it for report.json."""
        return {"fused": self.fused, "sdpa": self.sdpa, "recomputed": self.recomputed, "why": dict(self.why)}

    def sentence(self) -> str:
        """Say it in one line."""
        number = self.fused + self.sdpa
        said = f"{number} calls, {self._share()} fused"
        if self.why:
            said += f" ({', '.join(f'{count} not: {why}' for why, count in self.why.most_common())})"
        return f"{said}; {self.recomputed} more in the backward pass, computed again" if self.recomputed else said

    def _share(self) -> str:
        if not self.fused:
            return "none"
        return str(self.fused) if self.sdpa else "all"
