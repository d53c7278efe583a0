"""Kill a run at random moments until it is done, and compare its weights with those of an unbroken run, bit by bit.

    python test/drills/random_kills.py --minutes=10 --seed=0

Prints a line a drill and exits with 1 at the first difference; moments come from the seed, so a failure can be repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from doors import Door, losses, write_pictures

STEPS = 40
MOST_STARTS = 200


def family_of(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in family_of(int(child)))]


def power_cut(pid: int) -> None:
    """Kill everything at once, as far as that can be done one by one."""
    for each in family_of(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


# torchrun's ranks are in groups of their own: killed alone, it leaves them behind, and they must end by themselves
WAYS = (power_cut, lambda pid: os.killpg(pid, signal.SIGKILL), lambda pid: os.killpg(pid, signal.SIGTERM))


def drill(door: Door, folder: Path, straight: Path, ranks: int, chance: random.Random) -> tuple[bool, int]:
    """Run to the end through random kills; return whether everything is equal, and the number of starts."""
    flags = door.flags(folder, "--resume=auto", "--use_ema", batch=4 // ranks, steps=STEPS)
    starts = 0
    while starts < MOST_STARTS:
        starts += 1
        process = door.start(flags, ranks)
        try:
            process.communicate(timeout=chance.uniform(3.0, 20.0))
        except subprocess.TimeoutExpired:
            chance.choice(WAYS)(process.pid)
            process.communicate(timeout=120)
            continue
        if process.returncode == 0:
            break
    same = losses(folder) == losses(straight)
    for name in ("NAME", "NAME-ema"):
        left, right = (load_file(run / f"{name}.safetensors") for run in (folder, straight))
        same = same and left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    return same, starts


def main() -> int:
    """Drill on one and two ranks in turn until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    end = time.monotonic() + 60 * wanted.minutes
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        door = Door(write_pictures(root / "pictures"), root / "cache")
        straight = {}
        for ranks in (1, 2):
            straight[ranks] = root / f"straight{ranks}"
            door.run(door.flags(straight[ranks], "--use_ema", batch=4 // ranks, steps=STEPS), ranks)
        number = 0
        while time.monotonic() < end:
            ranks = 1 + number % 2
            chance = random.Random(wanted.seed * 1000 + number)
            same, starts = drill(door, root / f"drill{number}", straight[ranks], ranks, chance)
            print(f"drill {number}: {ranks} ranks, {starts} starts: {'equal' if same else 'DIFFERENT'}", flush=True)
            if not same:
                return 1
            number += 1
    return 0 if number else 1


if __name__ == "__main__":
    sys.exit(main())
