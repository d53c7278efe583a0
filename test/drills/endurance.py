"""Train thousands of tiny steps with samples, checkpoints, evaluation and cache, and see that nothing grows.

    python test/drills/endurance.py [--steps=5000] [--ranks=1]

Memory, descriptors, threads and shared memory of all processes of the run are read twice a second. Prints a line each: the
median of the first and of the last quarter after a warm-up, and the slope; ends with 1 where one grows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from doors import Door, family_of, metrics, write_pictures

WARM_UP = 0.2  # of the steps: allocators and caches fill
BINS = 20
PAUSE_S = 0.5


@dataclass(frozen=True)
class Limit:
    """What a measure may grow: its unit, and how many of them in a thousand steps, as a slope and on the whole."""

    unit: str
    a_thousand: float
    on_the_whole: float


# an allocator gives and takes; a tensor of one step that is kept is 12 KiB of pixels, 12 MiB in a thousand steps
LIMITS = {
    "memory": Limit("MiB", 2.0, 8.0),
    "descriptors": Limit("", 0.3, 1.0),
    "threads": Limit("", 0.3, 1.0),
    "shared memory": Limit("MiB", 0.5, 1.0),
}


@dataclass(frozen=True)
class Trend:
    """One measure over the steps. slope: in a thousand steps, of the medians of bins."""

    name: str
    first: float
    last: float
    slope: float

    @property
    def grows(self) -> bool:
        """Tell whether it rises steadily and by more than it may."""
        limit = LIMITS[self.name]
        return self.slope > limit.a_thousand and self.last - self.first > limit.on_the_whole

    def __str__(self) -> str:
        unit = LIMITS[self.name].unit
        word = "GROWS" if self.grows else "flat"
        return (
            f"{self.name}: {self.first:.1f} -> {self.last:.1f} {unit}, {self.slope:+.3f} {unit} in 1,000 steps: {word}"
        )


def trend(name: str, steps: Sequence[int], values: Sequence[float]) -> Trend:
    """Fit a line to the medians of bins after the warm-up: a save or a sample is a peak, and no growth."""
    begin, end = WARM_UP * max(steps), max(steps)
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for step, value in zip(steps, values, strict=True):
        if begin <= step < end:  # at the end the processes of a run leave
            bins[min(BINS - 1, int(BINS * (step - begin) / max(1, end - begin)))].append(value)
    middles = [begin + (number + 0.5) * (end - begin) / BINS for number, some in enumerate(bins) if some]
    medians = [statistics.median(some) for some in bins if some]
    if len(medians) < BINS / 2:
        raise ValueError(f"{len(medians)} of {BINS} bins have readings: too few steps, or too quick ones")
    slope = statistics.linear_regression(middles, medians).slope
    quarter = max(1, len(medians) // 4)
    return Trend(name, statistics.median(medians[:quarter]), statistics.median(medians[-quarter:]), 1000 * slope)


def reading(pid: int) -> dict[str, float]:
    """Read what a process and all below it hold now. Those of shared memory are counted once a file."""
    total = dict.fromkeys(LIMITS, 0.0)
    shared: dict[int, int] = {}
    for each in family_of(pid):
        place = Path(f"/proc/{each}")
        try:
            status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
            entries = list((place / "fd").iterdir())
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if str(entry.readlink()).startswith("/dev/shm/"):
                        found = entry.stat()
                        shared[found.st_ino] = found.st_size
        except (OSError, ValueError):  # ended meanwhile
            continue
        if "RssAnon" not in status:  # ended, and nobody has asked how
            continue
        total["memory"] += int(status["RssAnon"].split()[0]) / 1024
        total["threads"] += int(status["Threads"])
        total["descriptors"] += len(entries)
    # what lies there without a file of ours, too: a name that nobody removes
    named = sum(path.stat().st_size for path in Path("/dev/shm").glob(f"torch_{pid}_*"))
    total["shared memory"] = (sum(shared.values()) + named) / 2**20
    return total


def watched(process: subprocess.Popen[str], lines: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, reading) until the process ends."""
    step, at = 0, 0
    while process.poll() is None:
        if lines.exists():
            with lines.open() as file:
                file.seek(at)
                new = file.read()
            if whole := new[: new.rfind("\n") + 1]:
                step, at = step + whole.count("\n"), at + len(whole.encode())
        if step:
            yield step, reading(process.pid)
        time.sleep(PAUSE_S)


def drill(root: Path, steps: int, ranks: int) -> list[Trend]:
    """Run and measure. Raises RuntimeError where the run fails."""
    door = Door(write_pictures(root / "pictures", 24), root / "cache")
    (root / "prompts.txt").write_text("a picture, soft colours\n")
    out, often = root / "out", max(20, steps // 40)
    flags = door.flags(
        out, "--log_every=1", f"--save_every_n_steps={often}", f"--save_last_n_steps={2 * often}", "--save_state",
        f"--save_last_n_steps_state={2 * often}", f"--sample_every_n_steps={often}", f"--sample_prompts={root / 'prompts.txt'}",
        "--use_ema", "--cache_latents", "--cache_latents_to_disk", f"--cache_dir={root / 'features'}",
        "--max_data_loader_n_workers=2", batch=1, steps=steps,
    )  # fmt: skip
    log = (root / "printed").open("w")
    process = subprocess.Popen(
        door.command(flags, ranks), stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, **door.env},
    )  # fmt: skip
    numbers, series = [], {name: [] for name in LIMITS}  # type: ignore[var-annotated]
    for step, values in watched(process, out / "metrics.jsonl"):
        numbers.append(step)
        for name, value in values.items():
            series[name].append(value)
    log.close()
    if process.returncode or len(metrics(out)) != steps:
        raise RuntimeError(f"the run ended with {process.returncode}:\n{(root / 'printed').read_text()[-3000:]}")
    return [trend(name, numbers, values) for name, values in series.items()]


def main() -> int:
    """Drill once; return 0 where nothing grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=1)
    wanted = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        trends = drill(Path(scratch), wanted.steps, wanted.ranks)
    print(f"{wanted.steps} steps on {wanted.ranks} ranks in {(time.monotonic() - began) / 60:.1f} min")
    for found in trends:
        print(found)
    return int(any(found.grows for found in trends))


if __name__ == "__main__":
    sys.exit(main())
