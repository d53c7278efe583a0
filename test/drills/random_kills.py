"""Kill a run at random moments until it is done, and compare its weights with those of an unbroken run, bit by bit.

    python test/drills/random_kills.py --minutes=10 --seed=0 [--door=train]

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from doors import Door, losses, write_pictures
from run_dirs import Trainer, family_of, runs, same_end

STEPS = 40
MOST_STARTS = 200


def power_cut(pid: int) -> None:
    """Kill everything at once, as far as that can be done one by one."""
    for each in family_of(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


# torchrun's ranks are in groups of their own: killed alone, it leaves them behind, and they must end by themselves
WAYS = (power_cut, lambda pid: os.killpg(pid, signal.SIGKILL), lambda pid: os.killpg(pid, signal.SIGTERM))


def drill(door: Any, folder: Path, straight: Path, ranks: int, chance: random.Random) -> tuple[bool, int]:
    """Run to the end through random kills; return whether everything is equal, and the number of starts."""
    flags = door.flags(folder, "--resume=auto", "--use_ema", batch=4 // ranks, steps=STEPS)
    starts = killed_until_done(lambda: door.start(flags, ranks), chance)
    same = losses(folder) == losses(straight)
    for name in ("NAME", "NAME-ema"):
        left, right = (load_file(run / f"{name}.safetensors") for run in (folder, straight))
        same = same and left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    return same, starts


def killed_until_done(start: Callable[[], subprocess.Popen[str]], chance: random.Random) -> int:
    """Start again and again, end each start at a random moment, and return the number of starts.

    Moments come later and later, so that a slow machine gets to its end too.
    """
    for starts in range(1, MOST_STARTS + 1):
        process = start()
        try:
            process.communicate(timeout=chance.uniform(3.0, 20.0 + 2.0 * starts))
        except subprocess.TimeoutExpired:
            chance.choice(WAYS)(process.pid)
            process.communicate(timeout=120)
            continue
        if process.returncode == 0:
            return starts
    return MOST_STARTS


def drill_of_train(door: Any, folder: Path, straight: Path, ranks: int, chance: random.Random) -> tuple[bool, int]:
    """Do the same with train.py, whose run directories go on by themselves."""
    starts = killed_until_done(lambda: door.begin(folder, "--resume_from_checkpoint=auto", ranks=ranks), chance)
    try:
        same_end(runs(folder)[-1], straight)
    except AssertionError as difference:
        print(difference)
        return False, starts
    return True, starts


def unbroken(root: Path) -> tuple[Door, dict[int, Path]]:
    """Run to the end without a break on one and two ranks."""
    door = Door(write_pictures(root / "pictures"), root / "cache")
    straight = {ranks: root / f"straight{ranks}" for ranks in (1, 2)}
    for ranks, out in straight.items():
        door.run(door.flags(out, "--use_ema", batch=4 // ranks, steps=STEPS), ranks)
    return door, straight


def unbroken_of_train(root: Path) -> tuple[Trainer, dict[int, Path]]:
    """Do the same with train.py, on one and three."""
    door, straight = Trainer(root), {}
    for ranks in (1, 3):
        door.train(root / f"straight{ranks}", ranks=ranks)
        (straight[ranks],) = runs(root / f"straight{ranks}")
    return door, straight


def main() -> int:
    """Drill on one rank and on several in turn until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--door", choices=("sdxl", "train"), default="sdxl")
    wanted = parser.parse_args()
    end = time.monotonic() + 60 * wanted.minutes
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        door, straight = unbroken_of_train(root) if wanted.door == "train" else unbroken(root)
        number = 0
        while time.monotonic() < end:
            ranks = list(straight)[number % len(straight)]
            chance = random.Random(wanted.seed * 1000 + number)
            drilled = drill_of_train if isinstance(door, Trainer) else drill
            same, starts = drilled(door, root / f"drill{number}", straight[ranks], ranks, chance)
            print(f"drill {number}: {ranks} ranks, {starts} starts: {'equal' if same else 'DIFFERENT'}", flush=True)
            if not same:
                return 1
            number += 1
    return 0 if number else 1


if __name__ == "__main__":
    sys.exit(main())
