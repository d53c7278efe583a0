"""Which machines see the same cache folder: they build one cache together, the others build for themselves."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.train.together import for_all

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks

_LOOK_S = 3.0  # for a file that another machine has just made


@dataclass(frozen=True)
class Group:
    """Ranks that build one cache. leader: does what one process does. leaders: those of all groups of the job."""

    leader: int
    members: tuple[int, ...]
    leaders: tuple[int, ...]


def machine_groups(ranks: Ranks) -> Group:
    """Return the ranks of this machine: they share its memory, if nothing else. Every rank calls it."""
    return _group(ranks, {each: each for each in _machines(ranks)})


def folder_groups(ranks: Ranks, folder: Path) -> Group:
    """Find out which machines see each other's files in a folder, and return this rank's group. Every rank calls it.

    A folder that cannot be written to is each machine's own: nothing is built there.
    """
    machines = _machines(ranks)
    token = ranks.broadcast(uuid.uuid4().hex)
    if len(set(machines)) == 1:
        return machine_groups(ranks)

    def probe(machine: int) -> Path:
        return folder / f"probe-{token}-{machine}"

    def leave() -> None:
        with contextlib.suppress(OSError):
            probe(ranks.rank).touch()

    for_all(ranks, ranks.leads_node, leave)
    try:
        seen = ranks.gather(_seen(machines, probe) if ranks.leads_node else frozenset())
    finally:
        if ranks.leads_node:
            with contextlib.suppress(OSError):
                probe(ranks.rank).unlink()
    home = {}
    for each in set(machines):
        home[each] = min(other for other in {each, *seen[each]} if other == each or each in seen[other])
    return _group(ranks, home)


def _seen(machines: list[int], probe: Callable[[int], Path]) -> frozenset[int]:
    """Look for the files of all machines; a network disk may show them late."""
    end = time.monotonic() + _LOOK_S
    while True:
        found = frozenset(each for each in machines if probe(each).exists())
        if len(found) == len(set(machines)) or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _machines(ranks: Ranks) -> list[int]:
    """Return the first rank of each rank's machine."""
    return ranks.gather(ranks.rank - ranks.local_rank)


def _group(ranks: Ranks, home: dict[int, int]) -> Group:
    """Put together the ranks whose machines have one home."""
    homes = [home[machine] for machine in _machines(ranks)]
    leader = homes[ranks.rank]
    members = tuple(rank for rank, each in enumerate(homes) if each == leader)
    return Group(leader, members, tuple(sorted(set(homes))))
