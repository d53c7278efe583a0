"""Which kernels a step takes: counted in the first step of a session, so that no later one pays for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from difftrain.contracts import Batch
from difftrain.device import AttentionCalls, counting
from difftrain.train.state import Run

log = logging.getLogger("difftrain")


@contextlib.contextmanager
def counted(run: Run, micro: list[Batch]) -> Iterator[None]:
    """Count what runs inside, the first time in a session: kept for the report, and said once."""
    if "kernels" in run.facts:
        yield
        return
    with counting() as found:
        yield
    calls, step = AttentionCalls.of(found), run.progress.step + 1
    others = {kind: number for kind, number in sorted(found.items()) if not AttentionCalls.counts(kind)}
    facts: dict[str, Any] = {"step": step, "micro_batches": len(micro), "attention": calls.record(), "others": others}
    run.facts["kernels"] = facts
    beside = "; compiled blocks are not counted" if run.cfg.training.compile else ""
    log.info("attention in step %d: %s%s", step, calls.sentence(), beside)
