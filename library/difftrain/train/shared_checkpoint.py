"""Which checkpoint is whole on every machine: one process a disk reads its copy, and all hear what was found.

Machines may share a disk, or have one each. Files that are the same to the file server (its number for each, and when
it changed last) are read by one machine only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from difftrain.checkpoint import Manifest, Naming, Torn
from difftrain.checkpoint import fault_of as fault_here
from difftrain.checkpoint.find import candidates
from difftrain.distributed.collective import heartbeat, run_on
from difftrain.distributed.ranks import Ranks

log = logging.getLogger("difftrain")
T = TypeVar("T")
Ask = Callable[[Path], str]  # says why a checkpoint is not whole on every machine, "" where it is


@dataclass(frozen=True)
class _Copy:
    """What a machine sees of a checkpoint before it reads it; equal where it is one copy that several see."""

    fault: str
    commit: str = ""
    files: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def at(cls, path: Path) -> _Copy:
        if not path.is_dir():
            return cls("it is not there")
        if fault := fault_here(path, deep=False):
            return cls(fault)
        try:
            manifest = Manifest.read(path)
            stats = [(path / name).stat() for name in sorted(manifest.files)]
        except (OSError, Torn) as error:  # it is being deleted
            return cls(str(error))
        return cls("", manifest.commit, tuple((stat.st_ino, stat.st_ctime_ns, stat.st_size) for stat in stats))


def fault_of(path: Path, ranks: Ranks) -> str:
    """Say why a checkpoint is not whole on every machine, "" where it is. Every rank calls it, with its own path."""
    mine = _Copy.at(path) if ranks.leads_node else None
    copies = {rank: copy for rank, copy in enumerate(ranks.gather(mine)) if copy is not None}
    faults = {rank: copy.fault for rank, copy in copies.items() if copy.fault}
    if not faults and len({copy.commit for copy in copies.values()}) > 1:
        return "the machines have different checkpoints of this name"
    if not faults:
        reads = mine is not None and min(rank for rank, copy in copies.items() if copy == mine) == ranks.rank
        own_fault = ""
        with heartbeat(ranks, reads):
            if reads:
                own_fault = fault_here(path)
        faults = {rank: fault for rank, fault in enumerate(ranks.gather(own_fault)) if fault}
    return "; ".join(f"rank {rank}: {fault}" if len(copies) > 1 else fault for rank, fault in faults.items())


def newest(parent: Path, naming: Naming, ranks: Ranks) -> Path | None:
    """Return the newest checkpoint that is whole on every machine; every rank calls it and gets it below its parent."""

    def look(ask: Ask) -> str | None:
        for path, _ in candidates(parent, naming, log.warning):
            if not (fault := ask(path)):
                return path.name
            log.warning("checkpoint %s is passed over: %s", path.name, fault)
        return None

    name = with_all(parent, ranks, look)
    return None if name is None else parent / name


def choose(base: Path, ranks: Ranks, chosen: Callable[[Ask], Path | None]) -> Path | None:
    """Let rank 0 choose a checkpoint; each rank gets its own copy of it: below `base`, where rank 0's is below its own."""
    base = base.absolute()

    def relative_choice(ask: Ask) -> Path | None:
        choice = chosen(ask)
        absolute = choice.absolute() if choice is not None else None
        return absolute.relative_to(base) if absolute is not None and absolute.is_relative_to(base) else absolute

    choice = with_all(base, ranks, relative_choice)
    return None if choice is None else base / choice


def with_all(base: Path, ranks: Ranks, choose: Callable[[Ask], T]) -> T:
    """Let rank 0 choose, which may ask about checkpoints on its way; return its choice, or raise its error, everywhere.

    base: this rank's folder, below which a checkpoint has the same path on every machine. Every rank calls it.
    """
    base = base.absolute()

    def choice() -> T:
        if isinstance(made, Exception):
            raise made
        return made

    made: T | Exception
    if not ranks.is_logger:
        while (relative := ranks.broadcast()) is not None:
            fault_of(base / relative, ranks)
        return run_on(ranks, False, choice)

    def ask(path: Path) -> str:
        path = path.absolute()
        ranks.broadcast(path.relative_to(base) if path.is_relative_to(base) else path)
        return fault_of(path, ranks)

    try:
        made = choose(ask)
    except Exception as error:
        made = error
    ranks.broadcast(None)
    return run_on(ranks, True, choice)
