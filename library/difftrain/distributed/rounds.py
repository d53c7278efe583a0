"""A meeting of the ranks under a name that no earlier one had, for launchers that start ranks again.

torchrun keeps one store through all its restarts, and what ranks that are gone have left in it, their addresses among it,
must not be taken for that of those that are there now: two machines waited for one another for ever. So the first rank
draws a name, the others answer it with a token of their own, and it counts once the first rank has confirmed their
tokens: nobody has the tokens of earlier attempts any more.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from difftrain.distributed.launch import Launch

FIRST_POLL_S, LAST_POLL_S = 0.02, 0.5
_PREFIX = "difftrain/rounds"


def needed(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the ranks' store is the launcher's, which outlives them."""
    env = os.environ if environ is None else environ
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_round(launch: Launch, timeout: timedelta) -> Any:
    """Connect to the launcher's store and return it under this round's name. Raises RuntimeError where ranks do not come."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(launch.master_addr, launch.master_port, launch.size, False, timeout)
    return PrefixStore(f"{_PREFIX}/{agree_on_name(store, launch.rank, launch.size, timeout.total_seconds())}", store)


def agree_on_name(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """Return the name of this round; every rank calls it. Raises RuntimeError after the time-out."""
    from torch.distributed import PrefixStore

    table, token, end = PrefixStore(_PREFIX, store), uuid.uuid4().hex, time.monotonic() + timeout_s
    return _lead(table, token, size, end) if rank == 0 else _follow(table, token, rank, end)


def _lead(table: Any, name: str, size: int, end: float) -> str:
    """Offer a name and confirm everybody's token."""
    table.set("round", name)
    answers = [f"{name}/{rank}" for rank in range(1, size)]
    for pause in _pauses(end):
        if table.check(answers):
            table.set(f"{name}/begun", b" ".join(table.multi_get(answers)))
            return name
        time.sleep(pause)
    missing = [rank for rank, answer in enumerate(answers, 1) if not table.check([answer])]
    raise RuntimeError(f"timed out waiting for ranks {', '.join(map(str, missing[:8]))}")


def _follow(table: Any, token: str, rank: int, end: float) -> str:
    """Answer the name that is offered, each one that is new, until one is confirmed with this token."""
    answered = ""
    for pause in _pauses(end):
        name = table.get("round").decode() if table.check(["round"]) else ""
        if name and name != answered:
            table.set(f"{name}/{rank}", token)
            answered = name
        if name and table.check([f"{name}/begun"]) and token in table.get(f"{name}/begun").decode().split(" "):
            return name
        time.sleep(pause)
    raise RuntimeError("timed out waiting for rank 0")


def _pauses(end: float) -> Iterator[float]:
    """Yield the pauses between looks, longer ones later, until the time is over."""
    pause = FIRST_POLL_S
    while time.monotonic() < end:
        yield min(pause, LAST_POLL_S)
        pause *= 1.3
