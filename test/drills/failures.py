"""Break a run in a random way at a random moment, let it go on, and compare its end with that of an unbroken run, bit by bit.

    python test/drills/failures.py --rounds=50 --minutes=30 [--seed=0] [--state=FILE] [--only=EVENT,...] [--cold_every=10]

A round takes one topology (one process; DDP, FSDP, accelerate, DeepSpeed or two stages of a pipeline on two), one event
(a rank, the launcher or a loader process is killed, all get SIGTERM, a rank is stopped, the machine is announced to go
away) and one moment (while it starts, caches, trains, saves a checkpoint, exports), on two processes also with torchrun's
own restarts, and in every second round a thread writes the checkpoints (--save_async). Weights, averages and losses must
be those of the unbroken run of the same topology. With --state a count is kept, and the next call goes on from it. Every
tenth round starts fresh interpreters; the processes of the others are forked from one that has imported torch, which
takes a fourth of the time (test/support/warm.py). Prints a line a round, and sums; exits with 1 at the first difference,
or where something hangs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path[:0] = [
    str(Path(__file__).resolve().parents[levels] / name) for levels, name in ((0, ""), (1, "support"), (2, "library"))
]
import warm  # noqa: E402
from doors import DOOR, Door, family_of, losses, write_pictures  # noqa: E402
from random_kills import MOST_STARTS, power_cut  # noqa: E402

STEPS = 24
PATIENCE_S = 300.0  # no start takes as long, whatever happens to it
TIMEOUT_MIN = 1  # of ranks that wait for one another
# torchrun shows a traceback of its own where a rank has failed, or it was told to end
OF_TORCHRUN = re.compile(r"Traceback \(most recent call last\):\n(?: .*\n)+torch\.distributed\.elastic\.")


@dataclass(frozen=True)
class Topology:
    """How many processes run which engine."""

    name: str
    ranks: int
    flags: tuple[str, ...] = ()


def topologies() -> list[Topology]:
    """Return the engines, each on as many ranks as a small machine has."""
    on_two = {
        "ddp": (), "fsdp": ("--engine=fsdp",), "pipeline": ("--pipeline_stages=2",), "accelerate": ("--engine=accelerate",),
        "zero2": ("--deepspeed", "--zero_stage=2"),
    }  # fmt: skip
    return [Topology("single", 1), *(Topology(name, 2, flags) for name, flags in on_two.items())]


@dataclass
class Start:
    """One start of a run. launcher: the process that was started; it is the only rank where there is one."""

    process: subprocess.Popen[str]
    out: Path
    topology: Topology
    notice: Path

    @property
    def ranks(self) -> list[int]:
        """Return the processes of the ranks that live now."""
        if self.topology.ranks == 1:
            return [self.process.pid]
        return children_of(self.process.pid)

    @property
    def workers(self) -> list[int]:
        """Return the loader processes."""
        return [pid for rank in self.ranks for pid in family_of(rank)[1:]]


def children_of(pid: int) -> list[int]:
    """Return the processes that one has started itself, or has had forked for it."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        forks = [child for child in children if Path(f"/proc/{child}/comm").read_text().strip() == warm.HOST]
    except OSError:
        return []
    return [each for child in children for each in (children_of(child) if child in forks else [child])]


def send(pids: list[int], number: int) -> bool:
    """Send a signal to processes that may have gone; return whether there was any."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(pids)


# --- events: each returns whether there was somebody that it could happen to


def kill_rank(start: Start, chance: random.Random) -> bool:
    """Kill one rank."""
    ranks = start.ranks
    return bool(ranks) and send([chance.choice(ranks)], signal.SIGKILL)


def kill_launcher(start: Start, chance: random.Random) -> bool:
    """Kill what has started the ranks, and nobody else."""
    return send([start.process.pid], signal.SIGKILL)


def kill_worker(start: Start, chance: random.Random) -> bool:
    """Kill a process that decodes images."""
    workers = start.workers
    return bool(workers) and send([chance.choice(workers)], signal.SIGKILL)


def cut_power(start: Start, chance: random.Random) -> bool:
    """Kill everything at once."""
    power_cut(start.process.pid)
    return True


def stop_all(start: Start, chance: random.Random) -> bool:
    """Ask every rank to stop, as schedulers do."""
    return send(start.ranks, signal.SIGTERM)


def save_now(start: Start, chance: random.Random) -> bool:
    """Ask one rank to save, which ends nothing."""
    ranks = [pid for pid in start.ranks if catches(pid, signal.SIGUSR1)]
    return bool(ranks) and send([chance.choice(ranks)], signal.SIGUSR1)


def freeze_rank(start: Start, chance: random.Random) -> bool:
    """Stop one rank of several for ever: the others give up, and the launcher ends it."""
    ranks = start.ranks
    return len(ranks) > 1 and send([chance.choice(ranks)], signal.SIGSTOP)


def announce(start: Start, chance: random.Random) -> bool:
    """Write the notice that this machine is about to go away."""
    start.notice.write_text(str(chance.random()))
    return True


def catches(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal, which would end it otherwise."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


EVENTS: dict[str, Callable[[Start, random.Random], bool]] = {
    "kill_rank": kill_rank, "kill_launcher": kill_launcher, "kill_worker": kill_worker, "cut_power": cut_power,
    "stop_all": stop_all, "save_now": save_now, "freeze_rank": freeze_rank, "announce": announce,
}  # fmt: skip
OFTEN = {"freeze_rank": 1}  # it takes minutes; others weigh 6
DOWN = ("kill_rank", "kill_worker")  # torchrun starts all anew after these


# --- moments: each tells whether it has come


def steps_done(out: Path) -> int:
    """Return how many lines of steps there are."""
    with contextlib.suppress(OSError, ValueError):
        return len(losses(out))
    return 0


def moments(chance: random.Random, out: Path, cache: Path) -> dict[str, Callable[[], bool]]:
    """Return what to wait for, by name."""
    begun, delay = time.monotonic(), chance.uniform(0.5, 6.0)
    step = steps_done(out) + chance.randrange(1, STEPS // 2)
    there = {path.name for path in out.iterdir()} if out.is_dir() else set()

    def saves(word: str) -> bool:
        """Tell whether something is being written: under a name that is not its own yet, or just now under it."""
        return out.is_dir() and any(word in path.name and path.name not in there for path in out.iterdir())

    return {
        "start": lambda: time.monotonic() - begun > delay,
        "caching": lambda: cache.is_dir() and any(cache.rglob("*.*")),
        "step": lambda: steps_done(out) >= step,
        "checkpoint": lambda: saves("tmp-"),
        "export": lambda: saves(".tmp"),
    }


# --- a round


def begin(door: Door, topology: Topology, folder: Path, restarts: int = 0, more: tuple[str, ...] = ()) -> Start:
    """Start a run, or go on with it."""
    out, notice = folder / "out", folder / "notice"
    flags = door.flags(
        out, "--resume=auto", "--use_ema", "--cache_latents", "--cache_latents_to_disk", f"--cache_dir={folder / 'cache'}",
        "--max_data_loader_n_workers=1", "--epoch_batches=whole", f"--ddp_timeout={TIMEOUT_MIN}", f"--preempt_file={notice}",
        *topology.flags, *more, batch=global_batch(topology), steps=STEPS,
    )  # fmt: skip
    if topology.ranks == 1:
        return Start(door._start([sys.executable, str(DOOR), *flags]), out, topology, notice)
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={topology.ranks}", f"--max-restarts={restarts}"]
    words = [sys.executable, *torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(DOOR), *flags]
    return Start(door._start(words), out, topology, notice)


def global_batch(topology: Topology) -> int:
    """Return images a rank and step: four images a step, whoever shares them."""
    return 4 if topology.name in ("single", "pipeline") else 4 // topology.ranks


def ended(start: Start) -> str:
    """Wait for a start to end with all of its processes, and return what it printed. Raises AssertionError where it hangs."""
    family = family_of(start.process.pid)
    try:
        text, _ = start.process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        power_cut(start.process.pid)
        text, _ = start.process.communicate(timeout=60)
        raise AssertionError(f"it hung for {PATIENCE_S:g} s:\n{text[-6000:]}") from None
    end = time.monotonic() + 60
    while left := [pid for pid in family if is_alive(pid)]:
        if time.monotonic() > end:
            send(left, signal.SIGKILL)
            raise AssertionError(f"processes {left} were left behind:\n{text[-6000:]}")
        time.sleep(0.1)
    return text


def is_alive(pid: int) -> bool:
    """Tell whether a process lives; one that has ended and is not waited for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def one_round(
    door: Door, folder: Path, topology: Topology, event: str, moment: str, chance: random.Random
) -> tuple[int, bool, str]:
    """Break a run once for certain, and later starts now and then; return the starts, whether it happened, and its output."""
    folder.mkdir()
    restarts = 2 if topology.ranks > 1 and event in DOWN and chance.random() < 0.5 else 0
    happened, text, more = False, "", ("--save_async",) if chance.random() < 0.5 else ()
    for starts in range(1, MOST_STARTS):
        start = begin(door, topology, folder, restarts, more)
        has_come = moments(chance, start.out, folder / "cache")[moment if starts == 1 else "step"]
        if starts == 1 or (not happened) or chance.random() < 0.3:
            while start.process.poll() is None and not has_come():
                time.sleep(0.005)
            while start.process.poll() is None and not EVENTS[event](start, chance):
                time.sleep(0.005)  # there is nobody yet whom it could happen to
            happened |= start.process.poll() is None or start.process.returncode != 0
        text = ended(start)
        if start.process.returncode == 0:
            return starts, happened, text
        ours = OF_TORCHRUN.sub("", text)
        assert "Traceback" not in ours or event.startswith(("kill", "freeze", "cut")), text[-6000:]
    raise AssertionError(f"no end after {MOST_STARTS} starts:\n{text[-6000:]}")


def differences(run: Path, unbroken: Path) -> list[str]:
    """Name what of the end is not bit by bit that of the unbroken run."""
    parted = [] if losses(run) == losses(unbroken) else ["losses"]
    for name in ("NAME.safetensors", "NAME-ema.safetensors"):
        left, right = load_file(run / name), load_file(unbroken / name)
        same = left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
        parted += [] if same else [name]
    return parted


def drawn_round(number: int, seed: int, only: list[str]) -> tuple[Topology, str, str, random.Random]:
    """Draw a round from its number: the same again with the same seed."""
    chance = random.Random(seed * 100_003 + number)
    fit = [topology for topology in topologies() if topology.ranks > 1 or only != ["freeze_rank"]]
    topology = fit[number % len(fit)]
    names = [name for name in EVENTS if (not only or name in only) and (topology.ranks > 1 or name != "freeze_rank")]
    event = chance.choices(names, [OFTEN.get(name, 6) for name in names])[0]
    moment = chance.choice(["start", "caching", "step", "step", "checkpoint", "export"])
    return topology, event, moment, chance


def main(argv: list[str] | None = None) -> int:
    """Drill until the rounds or the minutes are over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="JSON file of the rounds that are done")
    parser.add_argument("--only", default="", help="events, separated by commas")
    parser.add_argument("--cold_every", type=int, default=10, help="which rounds start fresh interpreters; 1: all")
    wanted = parser.parse_args(argv)
    only = [name for name in wanted.only.split(",") if name]
    end = time.monotonic() + 60 * wanted.minutes
    done: collections.Counter[str] = collections.Counter()
    if wanted.state and wanted.state.exists():
        done.update(json.loads(wanted.state.read_text()))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        door = Door(write_pictures(root / "pictures"), root / "xdg")
        unbroken: dict[str, Path] = {}
        first = sum(done.values())
        for number in range(first, first + wanted.rounds):
            if time.monotonic() > end:
                break
            topology, event, moment, chance = drawn_round(number, wanted.seed, only)
            cold = number % wanted.cold_every == 0
            Door.popen = staticmethod(subprocess.Popen if cold else warm.popen)
            if topology.name not in unbroken:
                (root / topology.name).mkdir()
                straight = begin(door, topology, root / topology.name)
                text = ended(straight)
                assert straight.process.returncode == 0, text
                unbroken[topology.name] = straight.out
            head = f"round {number}: {topology.name}, {event} at {moment}{', cold' if cold else ''}"
            try:
                starts, happened, text = one_round(door, root / f"round{number}", topology, event, moment, chance)
            except AssertionError as failure:
                print(f"{head}: FAILED\n{failure}", flush=True)
                return 1
            parted = differences(root / f"round{number}" / "out", unbroken[topology.name])
            what = f"{starts} starts" + ("" if happened else ", done before it")
            print(f"{head}: {what}: {'DIFFERENT ' + ', '.join(parted) if parted else 'equal'}", flush=True)
            if parted:
                print(text[-6000:], flush=True)
                return 1
            done[f"{topology.name} {event}"] += 1
            if wanted.state:
                wanted.state.write_text(json.dumps(done))
    print(f"{sum(done.values())} rounds equal: " + ", ".join(f"{name} {count}" for name, count in sorted(done.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
