"""Machines of one job agree: the same code, configuration and data on each, or a stop that says what differs where.

Ranks that run other code or another configuration would wait for one another in vain at the first thing that only some of
them do, or sum gradients of different things. So hashes are compared once, at start; what they stand for is only sent
where they differ.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import difftrain
from difftrain.config import TrainConfig
from difftrain.config.digest import of_every_machine
from difftrain.config.schema.validate import fields
from difftrain.config.secrets import redact_text
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.data.plan.plan import EpochPlan, changes
from difftrain.distributed.ranks import Ranks

# what the order of sums, or what ranks tell one another, may depend on
PACKAGES = ("torch", "torch_npu", "diffusers", "transformers", "accelerate", "deepspeed", "fairscale", "numpy")
MOST_NAMED = 6
Facts = dict[str, Any]
Describe = Callable[[Facts, Facts], list[str]]


def agree_on_start(cfg: TrainConfig, ranks: Ranks) -> None:
    """Compare code, packages and configuration. Every rank calls it. Raises ConfigFault that names the machine."""
    if ranks.size == 1:
        return
    agree(ranks, "package", "install the same versions on every machine", packages(), differing)
    code = sources() if ranks.leads_node else None  # the ranks of a machine have the same files
    agree(ranks, "difftrain's source files", "install the same version on every machine", code, differing_files)
    settings = {name: redact_text(str(value)) for name, value in of_every_machine(cfg).items()}
    agree(ranks, "configuration", "start every machine with the same flags and files", settings, differing_fields)


def agree_on_model(model: Any, ranks: Ranks) -> None:
    """Compare the architecture of the model. Every rank calls it. Raises ConfigFault."""
    described = json.loads(json.dumps(model, default=str))
    facts = described if isinstance(described, dict) else {"model": described}
    agree(ranks, "model", "copy the same model to every machine", facts, differing)


def agree_on_data(plan: EpochPlan, ranks: Ranks) -> None:
    """Compare the plans of the machines, which have every record's key. Every rank calls it. Raises ConfigFault."""
    what, remedy = option("data.dirs"), "the paths may differ, the files not: copy the data again"
    agree(ranks, what, remedy, plan.describe(), changes)


def agree(ranks: Ranks, what: str, remedy: str, facts: Facts | None, describe: Describe) -> None:
    """Compare facts of all ranks with those of the first. facts: None where another rank speaks for this one.

    describe: says how two of them differ, the first rank's first. Raises ConfigFault on every rank.
    """
    if ranks.size == 1:
        return
    ours = (
        None if facts is None else hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()
    )
    hashes = ranks.gather(ours)
    others = [rank for rank, theirs in enumerate(hashes) if theirs is not None and theirs != hashes[0]]
    if not others:
        return
    # one rank of each machine that differs is heard: the others there are most likely alike
    places = ranks.gather((ranks.rank - ranks.local_rank, socket.gethostname()))
    machines = {leader: number for number, leader in enumerate(sorted({leader for leader, _ in places}))}
    heard = list({machines[places[rank][0]]: rank for rank in reversed(others)}.values())[::-1]
    full = ranks.gather(facts if ranks.rank in (0, *heard) else None)
    faults = []
    for rank in heard:
        leader, host = places[rank]
        parted = describe(full[0], full[rank])
        named = "; ".join(parted[:MOST_NAMED]) + (
            f"; and {len(parted) - MOST_NAMED} more" if parted[MOST_NAMED:] else ""
        )
        where = f"rank {rank}, on machine {machines[leader]} ({host})"
        faults.append(
            Fault(what, f"differs between rank 0, on machine 0 ({places[0][1]}), and {where}: {named}", remedy)
        )
    raise ConfigFault(faults)


def packages() -> Facts:
    """Return the versions of what is installed; builds of one version for several devices count as one."""
    installed = {"difftrain": difftrain.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return installed


def sources(folder: Path | None = None) -> Facts:
    """Return a short hash of each of this package's source files, by path."""
    folder = folder or Path(difftrain.__file__).resolve().parent
    return {
        path.relative_to(folder).as_posix(): hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
        for path in sorted(folder.rglob("*.py"))
    }


# ---------------------------------------------------------------------- how facts differ, in words


def differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name what differs, with both values."""
    names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    return [f"{name} {_shown(first.get(name))} and {_shown(other.get(name))}" for name in names]


def differing_files(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name files that differ, or that only one of them has."""
    names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    missing = {True: " (only there)", False: " (not there)"}
    return [name + ("" if name in first and name in other else missing[name in other]) for name in names]


def differing_fields(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name settings that differ, as they are given."""
    return differing(
        {_spelled(name): value for name, value in first.items()},
        {_spelled(name): value for name, value in other.items()},
    )


def _spelled(name: str) -> str:
    return option(name) if name in fields() else name


def _shown(value: Any) -> str:
    return "not there" if value is None else str(value)
