"""Help and configuration errors within half a second, beside what `import torch` alone would cost.

    python benchmarks/startup.py              some ten seconds

Every command is run in turns with the others; the smallest time counts, since other work on the machine only adds.
Exit code 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOOR = str(ROOT / "sd_scripts_xl" / "sdxl_pretrain.py")
LIMIT_S = 0.5

# name, command, exit code, whether the limit holds for it
COMMANDS: tuple[tuple[str, tuple[str, ...], int, bool], ...] = (
    ("--help", (DOOR, "--help"), 0, True),
    ("a misspelt flag", (DOOR, "--learning_rat=1e-4"), 2, True),
    ("five faults at once", (DOOR, "--train_batch_size=0", "--save_model_as=x", "--v2", "--seed=-1", "--foo"), 2, True),
    ("python difftrain.cli --help", ("-m", "difftrain.cli", "--help"), 0, True),
    ("difftrain cache build --help", ("-m", "difftrain.cli", "cache", "build", "--help"), 0, True),
    ("difftrain cache verify NOWHERE", ("-m", "difftrain.cli", "cache", "verify", "nowhere"), 2, True),
    ("(import torch)", ("-c", "import torch"), 0, False),
    ("(python alone)", ("-c", "pass"), 0, False),
)


def seconds(command: tuple[str, ...], code: int) -> float:
    """Run a command and return how long it took; raises where it ends otherwise than it should."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "library")}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    took = time.perf_counter() - began
    if done.returncode != code:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode} instead of {code}\n{done.stderr}")
    return took


def main() -> int:
    """Measure all commands in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name, *_ in COMMANDS}
    for _ in range(rounds + 1):  # the first round fills the file cache and writes .pyc files
        for name, command, code, _ in COMMANDS:
            times[name].append(seconds(command, code))
    torch_s = min(times["(import torch)"][1:])
    missed = False
    print(f"{'command':30} {'min':>8} {'median':>8}   of `import torch`")
    for name, _, _, limited in COMMANDS:
        best, middle = min(times[name][1:]), statistics.median(times[name][1:])
        judged = "" if not limited else "PASS" if best < LIMIT_S else "FAIL"
        missed |= judged == "FAIL"
        print(f"{name:30} {best:7.3f}s {middle:7.3f}s   {best / torch_s:5.2f}  {judged}")
    print(f"limit {LIMIT_S} s; {rounds} rounds")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
