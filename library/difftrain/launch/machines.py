"""Which processes run where: what the machine has, what was asked for, and torchrun's words for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from difftrain.config.paths import checkout
from difftrain.device.choice import ONE_CARD, VISIBLE
from difftrain.device.launch_variables import launch_variables
from difftrain.launch import schedulers
from difftrain.launch.flags import SCRIPTS, Caller, LaunchFlags

LIBRARY = Path(__file__).resolve().parents[2]
PORT = 8989
WAIT_MIN = 30  # as ranks wait for one another where --ddp_timeout says nothing
# Where a batch system signals torchrun itself, past the launcher: what saving may take before torchrun kills the ranks.
# Versions of torch that do not know the variable give 30 s.
SHUTDOWN_S = 1800
# What an outer launcher or a cluster leaves behind, and torchrun would take for its own.
INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")


@dataclass(frozen=True)
class Devices:
    """The best kind of device of this machine and how many of it can be used; for the CPU, its cores."""

    kind: str
    count: int


@dataclass(frozen=True)
class Where:
    """Processes of one launch."""

    devices: Devices
    nodes: int
    node_rank: int
    processes: int  # on this machine
    master: str
    port: int
    port_given: bool
    device_id: int | None
    sentence: str
    restarts: int = 0  # after a rank has failed
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Return the number of processes on all machines."""
        return self.nodes * self.processes

    @property
    def threads(self) -> int:
        """Return the CPU threads of one process."""
        if self.devices.kind == "cpu":
            return min(self.devices.count, 8) if self.processes == 1 else 1
        return max(1, min(8, cores() // self.processes))

    def torchrun(self, wait_s: float = 0) -> list[str]:
        """Return torchrun's own arguments. wait_s: how long machines wait for one another."""
        words = [f"--nnodes={self.nodes}", f"--nproc_per_node={self.processes}"]
        words += [f"--max_restarts={self.restarts}"] if self.restarts else []
        if self.nodes == 1 and not self.port_given:  # two runs on one machine never ask for one port
            # without the address torchrun hands the host's name to the ranks, and nothing listens there
            return [*words, "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local_addr=127.0.0.1"]
        return [
            *words,
            f"--node_rank={self.node_rank}",
            f"--master_addr={self.master or 'localhost'}",
            f"--master_port={self.port}",
            *([f"--rdzv_conf=timeout={wait_s:.0f}"] if wait_s and self.nodes > 1 else []),
        ]

    def environment(self, environ: dict[str, str]) -> dict[str, str]:
        """Return the environment of the ranks: torchrun's variables are torchrun's to set."""
        kept = {
            name: value
            for name, value in environ.items()
            if name not in INHERITED and not name.startswith(("PET_", "TORCHELASTIC_"))
        }
        kept.setdefault("OMP_NUM_THREADS", str(self.threads))
        kept.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
        # torchrun needs no device, and a torch_npu without CANN would end its import of torch
        kept.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        kept["PYTHONUNBUFFERED"] = "1"
        kept.update(launch_variables(self.devices.kind, kept, self.master if self.nodes > 1 else ""))
        if self.device_id is not None and self.processes == 1:
            kept[ONE_CARD[self.devices.kind]] = str(self.device_id)
        return kept

    def dry_environment(self) -> dict[str, str]:
        """Return what tells a single process that it speaks for all ranks."""
        return {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": self.master or "localhost",
            "MASTER_PORT": str(self.port),
        }


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_library(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which the package is found first; what CANN put on the path stays on it."""
    if checkout() is None:  # installed: every interpreter of this environment finds it
        return dict(environ)
    path = [str(LIBRARY), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}


def find_devices() -> Devices:
    """Ask the device room what this machine can train on."""
    environ = with_library(os.environ)
    done = subprocess.run([sys.executable, "-m", "difftrain.device"], capture_output=True, text=True, env=environ)
    words = done.stdout.split()
    if done.returncode or len(words) < 2:
        raise SystemExit(f"detecting devices failed:\n{done.stdout}{done.stderr}")
    return Devices("cpu", cores()) if words[-2] == "cpu" else Devices(words[-2], int(words[-1]))


def device_index(environ: Mapping[str, str]) -> int:
    """Return the index that names the output folder where --device_id does not."""
    text = environ.get("ASCEND_DEVICE_ID", "").strip()
    return int(text) if text.isdecimal() else 0


def where(
    layout: str,
    cards: int | None,
    flags: LaunchFlags,
    device: Devices,
    environ: Mapping[str, str],
    caller: Caller = SCRIPTS,
) -> Where:
    """Place the processes. Faults are collected in the answer."""
    faults: list[str] = []
    notes: list[str] = []

    # machines: several only for the layout that is made for them
    nodes, rank, master = 1, 0, ""
    if layout == "nm_np":
        nodes, rank, master = _machines(flags, environ, faults, notes)
    else:
        for name, only in (("nnodes", 1), ("node_rank", 0)):
            if flags.number(name, only) != only:
                faults.append(
                    f"{flags.origins[name]}: this {caller.noun} runs on one machine, got {flags.number(name, only)} "
                    f"({caller.layout('nm_np')} is for several)"
                )
        master = flags.text("master_ip")
        around = schedulers.read(environ)
        if int(around.values.get("nnodes", 1)) > 1:
            notes.append(
                f"{around.origins['nnodes']}={around.values['nnodes']}: {around.scheduler} gave this job several "
                f"machines, and this {caller.noun} trains on this one only ({caller.layout('nm_np')} is for several)"
            )

    # processes: as many as the script or the user says, on an accelerator at most one a card
    accelerator = device.kind != "cpu"
    processes = flags.number("nproc_per_node", cards or (device.count if accelerator else 1))
    if processes < 1:
        faults.append(f"{flags.origins['nproc_per_node']}: must be at least 1, got {processes}")
    if layout == "1m_1p" and processes != 1:
        faults.append(
            f"{flags.origins['nproc_per_node']}: this {caller.noun} runs one device, got {processes} "
            f"({caller.layout('1m_8p')} is for several)"
        )
    if accelerator and processes > device.count:
        origin = flags.origins.get("nproc_per_node", f"this {caller.noun}")
        faults.append(
            f"{origin}: {processes} {device.kind} devices are requested, {device.count} found "
            f"(--nproc_per_node={device.count})"
        )

    # the card of a one-card run, and the port where ranks meet
    device_id = _device_id(flags, device, processes, environ, faults)
    port = flags.number("master_port", _number(environ.get("MASTER_PORT", "")) if nodes > 1 else 0) or PORT
    return Where(
        device,
        nodes,
        rank,
        processes,
        master,
        port,
        nodes > 1 or "master_port" in flags.values or "master_ip" in flags.values,
        device_id,
        _sentence(device, nodes, rank, processes, master, port, flags),
        flags.number("max_restarts", 0),
        faults,
        notes,
    )


def _number(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0


def _machines(
    flags: LaunchFlags, environ: Mapping[str, str], faults: list[str], notes: list[str]
) -> tuple[int, int, str]:
    """Return number of machines, rank of this one, master address; what no flag says is the scheduler's."""
    reading = schedulers.read(environ, flags.values)
    flags.values.update(reading.values)
    flags.origins.update(reading.origins)
    faults += reading.faults
    notes += [reading.sentence] if reading.sentence else []

    nodes, rank = flags.number("nnodes", 1), flags.number("node_rank", 0)
    if nodes < 1:
        faults.append(f"{flags.origins['nnodes']}: must be at least 1, got {nodes}")
    elif rank >= nodes and ("nnodes" in flags.values or not reading.faults):
        named = flags.origins.get("node_rank", "--node_rank")
        faults.append(f"{named}: must be below the number of machines, {nodes}, got {rank}")

    # machine 0 may ask itself; the others have to be told
    master = flags.text("master_ip") or environ.get("MASTER_ADDR", "").strip()
    if not master and rank == 0:
        master = own_address()
    if not master and not any("--master_ip" in fault for fault in faults):
        faults.append(f"--master_ip: machine {rank} needs the address of machine 0, which prints it when it starts")
    return nodes, rank, master


def own_address() -> str:
    """Return the address of this machine that others most likely reach it by. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _device_id(
    flags: LaunchFlags, device: Devices, processes: int, environ: Mapping[str, str], faults: list[str]
) -> int | None:
    """Return the card that a one-card run was told to take; where several are visible, it must be one of them."""
    if "device_id" not in flags.values or device.kind == "cpu" or processes != 1:
        return None
    device_id = flags.number("device_id", 0)
    variable = VISIBLE[device.kind]
    visible = [part.strip() for part in environ.get(variable, "").split(",") if part.strip()]
    allowed = visible or [str(number) for number in range(device.count)]
    if str(device_id) not in allowed:
        beside = f" with {variable}={environ[variable]}" if visible else ""
        faults.append(
            f"{flags.origins['device_id']}: {device_id} is not among the devices {', '.join(allowed)}{beside}"
        )
    return device_id


def _sentence(
    device: Devices, nodes: int, rank: int, processes: int, master: str, port: int, flags: LaunchFlags
) -> str:
    count = "1 process" if processes == 1 else f"{processes} processes"
    on = f"the CPU ({device.count} cores)" if device.kind == "cpu" else f"{device.kind} ({device.count} found)"
    text = f"{count} on {on}"
    if device.kind == "cpu" and processes > 1:
        text += ", one thread each, over gloo: there is no NPU and no CUDA device here"
    if nodes == 1:
        return text
    derived = "" if "master_ip" in flags.values else f"; the other machines need --master_ip={master}"
    return f"machine {rank} of {nodes}, {text}; machine 0 is {master}:{port}{derived}"
