"""How many machines a scheduler gave a job, which one this is and where they meet: from the variables that it sets.

One table says which variable of which scheduler holds what. The first scheduler of the table that shows itself is read, and
no other; a flag that the user gave counts more than any variable. Variables that are half set are an error: a job that
guesses the rest would wait for machines that never come, or train twice.

Sources: torch.distributed.run (PET_*), the manual pages of srun and sbatch, ModelArts' documents on training with several
servers, Kubeflow's training operator (RANK, WORLD_SIZE count pods), Volcano's svc, env and pytorch plugins, Kubernetes'
indexed jobs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

SETTINGS = ("nnodes", "node_rank", "master_ip", "master_port", "nproc_per_node")
NEEDED = ("nnodes", "node_rank", "master_ip")  # with several machines; the others have defaults
LOWEST_PORT, PORTS = 10_000, 20_000  # below those that systems hand out by themselves


# --- how a value is read; each raises ValueError with what would be right


def number(text: str) -> int:
    """Read a whole number."""
    if not text.isdecimal():
        raise ValueError("must be a whole number")
    return int(text)


def count(text: str) -> int | None:
    """Read a number of processes; torchrun's "auto", "gpu" and "cpu" leave it to what is found."""
    return int(text) if text.isdecimal() else None


def address(text: str) -> str:
    """Take an address as it is."""
    return text


def first_listed(text: str) -> str:
    """Return the first of several hosts with commas between."""
    return text.split(",")[0].strip()


def number_listed(text: str) -> int:
    """Count hosts with commas between."""
    return len([host for host in text.split(",") if host.strip()])


def endpoint_host(text: str) -> str:
    """Return the host of HOST:PORT."""
    return text.rpartition(":")[0] or text


def endpoint_port(text: str) -> int | None:
    """Return the port of HOST:PORT."""
    return count(text.rpartition(":")[2])


def first_node(text: str) -> str:
    """Return the first host of a list as Slurm writes it."""
    hosts = list(expand_nodes(text))  # all of them: a list that is cut off is an error
    return hosts[0]


def port_of_job(text: str) -> int | None:
    """Return a port for a job's number, so that two jobs of one machine do not meet at the same."""
    return LOWEST_PORT + int(text) % PORTS if text.isdecimal() else None


Reader = Callable[[str], "int | str | None"]


@dataclass(frozen=True)
class Scheduler:
    """One scheduler. signs: any of them shows it. variables: for each setting, the first that is set, and how to read it."""

    name: str
    signs: tuple[str, ...]
    variables: Mapping[str, tuple[tuple[str, Reader], ...]]
    hidden_by: str = ""  # a variable that shows that the signs are another's


SCHEDULERS: tuple[Scheduler, ...] = (
    Scheduler(
        "torchrun's variables",
        ("PET_NNODES", "PET_NODE_RANK"),
        {
            "nnodes": (("PET_NNODES", number),),
            "node_rank": (("PET_NODE_RANK", number),),
            "master_ip": (
                ("PET_MASTER_ADDR", address),
                ("MASTER_ADDR", address),
                ("PET_RDZV_ENDPOINT", endpoint_host),
            ),
            "master_port": (
                ("PET_MASTER_PORT", number),
                ("MASTER_PORT", number),
                ("PET_RDZV_ENDPOINT", endpoint_port),
            ),
            "nproc_per_node": (("PET_NPROC_PER_NODE", count),),
        },
    ),
    Scheduler(
        "Slurm",
        ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NODEID"),
        {
            "nnodes": (("SLURM_STEP_NUM_NODES", number), ("SLURM_NNODES", number), ("SLURM_JOB_NUM_NODES", number)),
            "node_rank": (("SLURM_NODEID", number),),
            "master_ip": (
                ("MASTER_ADDR", address),
                ("SLURM_STEP_NODELIST", first_node),
                ("SLURM_JOB_NODELIST", first_node),
                ("SLURM_NODELIST", first_node),
            ),
            "master_port": (("MASTER_PORT", number), ("SLURM_JOB_ID", port_of_job)),
            "nproc_per_node": (("SLURM_GPUS_ON_NODE", count),),
        },
    ),
    Scheduler(
        "ModelArts",
        ("MA_NUM_HOSTS",),
        {
            "nnodes": (("MA_NUM_HOSTS", number),),
            "node_rank": (("VC_TASK_INDEX", number), ("MA_TASK_INDEX", number)),
            "master_ip": (("MASTER_ADDR", address), ("VC_WORKER_HOSTS", first_listed)),
            "master_port": (("MASTER_PORT", number),),
            "nproc_per_node": (("MA_NUM_GPUS", count),),
        },
    ),
    Scheduler(
        "Kubernetes PyTorchJob",
        ("RANK", "WORLD_SIZE"),
        {
            "nnodes": (("WORLD_SIZE", number),),
            "node_rank": (("RANK", number),),
            "master_ip": (("MASTER_ADDR", address),),
            "master_port": (("MASTER_PORT", number),),
            "nproc_per_node": (("NPROC_PER_NODE", count), ("PET_NPROC_PER_NODE", count)),
        },
        hidden_by="LOCAL_RANK",  # what torchrun leaves in the shells that it starts: there they count processes
    ),
    Scheduler(
        "Volcano",
        ("VC_TASK_INDEX", "VK_TASK_INDEX", "VC_WORKER_HOSTS"),
        {
            "nnodes": (("VC_WORKER_NUM", number), ("VC_WORKER_HOSTS", number_listed)),
            "node_rank": (("VC_TASK_INDEX", number), ("VK_TASK_INDEX", number)),
            "master_ip": (("MASTER_ADDR", address), ("VC_WORKER_HOSTS", first_listed)),
            "master_port": (("MASTER_PORT", number),),
        },
    ),
    Scheduler(
        "Kubernetes indexed job (JobSet)",
        ("JOB_COMPLETION_INDEX",),
        {
            "nnodes": (("NNODES", number),),
            "node_rank": (("JOB_COMPLETION_INDEX", number),),
            "master_ip": (("MASTER_ADDR", address),),
            "master_port": (("MASTER_PORT", number),),
            "nproc_per_node": (("NPROC_PER_NODE", count),),
        },
    ),
)


@dataclass
class Reading:
    """What a scheduler said of the settings that the user did not give. origins: the variable of each value."""

    scheduler: str = ""
    values: dict[str, int | str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """Return what was read from where, in one line; empty where nothing was."""
        pairs = (f"{name}={value} from {self.origins[name]}" for name, value in self.values.items())
        return f"{self.scheduler}: {', '.join(pairs)}" if self.values else ""


def find(environ: Mapping[str, str]) -> Scheduler | None:
    """Return the first scheduler of the table that shows itself."""
    for scheduler in SCHEDULERS:
        if any(_get(environ, name) for name in scheduler.signs) and not _get(environ, scheduler.hidden_by):
            return scheduler
    return None


def read(environ: Mapping[str, str], explicit: Mapping[str, object] | None = None) -> Reading:
    """Read what the job's scheduler says of the settings that the user has not given as flags.

    explicit: values of flags by the names of SETTINGS. Wrong, missing and contradictory variables are in `faults`.
    """
    explicit = explicit or {}
    scheduler = find(environ)
    if scheduler is None:
        return Reading()
    reading = Reading(scheduler.name)

    # what the variables say
    broken: set[str] = set()
    for setting in SETTINGS:
        nodes = explicit.get("nnodes", reading.values.get("nnodes"))
        if setting in explicit or (nodes == 1 and setting.startswith("master_")):  # alone, a machine asks nobody
            continue
        variable, reader = _first_set(environ, scheduler.variables.get(setting, ()))
        if reader is None:
            continue
        try:
            value = reader(_get(environ, variable))
        except ValueError as error:
            reading.faults.append(f"{variable}: {error}, got {_get(environ, variable)!r} (or give --{setting})")
            broken.add(setting)
            continue
        if value is not None:
            reading.values[setting], reading.origins[setting] = value, variable

    # what they leave open: one machine needs nothing more
    nodes = explicit.get("nnodes", reading.values.get("nnodes"))
    if nodes == 1:
        return reading
    has = ", ".join(f"{name}={_get(environ, name)}" for name in scheduler.signs if _get(environ, name))
    for setting in NEEDED:
        if setting not in explicit and setting not in reading.values and setting not in broken:
            names = " or ".join(name for name, _ in scheduler.variables[setting])
            reading.faults.append(f"{names}: is missing, though {scheduler.name} has set {has} (or give --{setting})")
    if "node_rank" not in explicit:
        reading.faults += _contradictions(scheduler.name, environ, explicit)
    return reading


def _contradictions(name: str, environ: Mapping[str, str], explicit: Collection[str]) -> list[str]:
    """Name what is complete and yet would not work: a launcher on one machine only, or several on each."""
    if name == "Volcano" and _get(environ, "VC_MASTER_HOSTS"):
        return [
            "VC_MASTER_HOSTS: VC_TASK_INDEX restarts from 0 for each kind of task, and this job has masters and workers; "
            "give it one kind, `worker`, or Volcano's pytorch plugin, which sets RANK and WORLD_SIZE (or give --node_rank)"
        ]
    if name != "Slurm" or not _get(environ, "SLURM_NODEID"):
        return []
    if not _get(environ, "SLURM_STEP_ID") and not _get(environ, "SLURM_STEP_NODELIST"):
        return [
            "SLURM_STEP_ID: is missing: a batch script runs on the first machine only "
            "(start the launcher with srun --ntasks-per-node=1, as examples/slurm does)"
        ]
    nodes, tasks = _get(environ, "SLURM_STEP_NUM_NODES"), _get(environ, "SLURM_STEP_NUM_TASKS")
    if nodes.isdecimal() and tasks.isdecimal() and int(tasks) > int(nodes):
        return [
            f"SLURM_STEP_NUM_TASKS: {tasks} tasks on {nodes} machines, and each of them would start one process per device "
            "(srun --ntasks-per-node=1: the launcher starts the processes itself)"
        ]
    return []


def _get(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def _first_set(environ: Mapping[str, str], candidates: tuple[tuple[str, Reader], ...]) -> tuple[str, Reader | None]:
    for variable, reader in candidates:
        if _get(environ, variable):
            return variable, reader
    return "", None


# --- Slurm's lists: node[01-03,7],login1,rack[0-1]n[1-2]

_BRACKETS = re.compile(r"\[([^][]*)\]")


def expand_nodes(text: str) -> Iterator[str]:
    """Yield the hosts of a list as Slurm writes it, in its order. Raises: ValueError."""
    entries = re.split(r",(?![^[]*\])", text.strip())
    for entry in entries:
        parts = _BRACKETS.split(entry.strip())
        if not entry.strip() or any(mark in part for part in parts[::2] for mark in "[]"):
            raise ValueError("must be a list of machines such as node[01-03,7]")
        ranges = [list(_numbers(part)) if at % 2 else [part] for at, part in enumerate(parts)]
        for combination in itertools.product(*ranges):
            yield "".join(combination)


def _numbers(text: str) -> Iterator[str]:
    """Yield the numbers of "01-03,7", with their leading zeros."""
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and (not last.isdecimal() or int(last) < int(first))):
            raise ValueError("must be a list of machines such as node[01-03,7]")
        for value in range(int(first), int(last or first) + 1):
            yield f"{value:0{len(first)}d}"
