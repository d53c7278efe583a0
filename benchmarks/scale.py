"""Ten million records: open < 1 s, a batch of 64 < 1 ms, any position < 1 ms, worker memory that does not grow.

    python benchmarks/scale.py                      10 million records, some minutes and 4 GB in the temporary folder
    python benchmarks/scale.py --records=200000     the same checks in seconds

Prints each figure beside its limit, PASS or FAIL, and ratios against the plain way: shuffling all ids in memory, as a
sampler does. Exit code 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import numpy as np
from figures import Report

from difftrain.config import TrainConfig
from difftrain.contracts import Draw
from difftrain.data.index.index import Index
from difftrain.data.loader import data_loader, items_of
from difftrain.data.plan.plan import EpochPlan
from difftrain.data.prepare import make_plan, make_tables, open_data
from difftrain.testing.synthetic_index import write_synthetic_index

BATCH = 64
MICRO_BATCH = 4  # of epochs that use every record: a step has 16 of them, each of a bucket of its own
ORDERS = ("random", "sequential", "every")
SETTINGS = {
    "dirs": ("/nowhere",),
    "resolution": (1024, 1024),
    "enable_bucket": True,
    "min_bucket_reso": 512,
    "max_bucket_reso": 2048,
}


def config(order: str) -> TrainConfig:
    """Return SDXL's usual buckets, a validation split, and an order of reading: of whole batches, or of every record."""
    how = {"epoch_batches": "every"} if order == "every" else {"tar_order": order}
    training = {"seed": 1, "batch_size": MICRO_BATCH if order == "every" else BATCH}
    return TrainConfig.model_validate({"data": SETTINGS | how, "training": training, "validation": {"split": 0.01}})


def batch(plan: EpochPlan, step: int) -> list[Draw]:
    """Return the draws of a step."""
    return [draw for uses in plan.parts(step) for draw in plan.draws(uses)]


class Probe:
    """Do a worker's part of planning, item by item, and report the worker's memory."""

    def __init__(self, cfg: TrainConfig, folder: Path, batches: int) -> None:
        self.data = open_data(cfg, folder)
        self.plan = make_plan(self.data, cfg, BATCH)
        self.batches = batches

    def __getitem__(self, n: int) -> dict[str, float]:
        for step in range(n * self.batches, (n + 1) * self.batches):
            draws = batch(self.plan, step * 7919)  # far apart
            self.data.index.records(draw.record_id for draw in draws)
        gc.collect()
        return memory()


def memory() -> dict[str, float]:
    """Return this process's memory in MiB: all (rss), what is its own (uss), what no file backs (anonymous)."""
    fields = dict.fromkeys(("Rss", "Private_Clean", "Private_Dirty", "Anonymous"), 0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in fields:
            fields[name] = int(value.split()[0])
    return {
        "rss": fields["Rss"] / 1024,
        "uss": (fields["Private_Clean"] + fields["Private_Dirty"]) / 1024,
        "anonymous": fields["Anonymous"] / 1024,
    }


def worker_memory(cfg: TrainConfig, folder: Path) -> dict[str, float]:
    """Return the memory of a loader worker after 600 batches."""
    readings = list(items_of(data_loader(Probe(cfg, folder, 200), range(3), workers=1)))  # type: ignore[arg-type]
    return readings[-1]


def timed(call: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    """Return seconds of one call, of the processor where nothing else is asked for: other work adds to the clock."""
    start = clock()
    call()
    return clock() - start


def check_plan(report: Report, name: str, plan: EpochPlan, limit_far: float, slowness: float) -> None:
    """Time batches in sequence and far apart. limit_far: in ms."""
    near = [timed(functools.partial(batch, plan, step)) * 1e3 for step in range(2000)]
    rng = np.random.Generator(np.random.Philox(key=1))
    steps = rng.integers(0, plan.total_steps(1000), 500).tolist()
    located = [timed(functools.partial(plan.locate, step)) * 1e3 for step in steps]
    far = [timed(functools.partial(batch, plan, step)) * 1e3 for step in steps]
    tail = f"90 % below {np.quantile(near, 0.9):.3f}"
    report.check(f"{name}: batch of {BATCH}, one after another", statistics.median(near), slowness, "ms", tail)
    report.check(f"{name}: locate any position", statistics.median(located), slowness, "ms")
    tail = f"90 % below {np.quantile(far, 0.9):.3f}"
    report.check(f"{name}: locate and batch at any position", statistics.median(far), limit_far * slowness, "ms", tail)


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="keep the index here, and use it again")
    slow = "how many times slower this machine is than an idle one of the usual kind: times are allowed as much more"
    parser.add_argument("--slowness", type=float, default=1.0, help=slow)
    args = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.folder or Path(temporary)
        large = written(root / f"{args.records}", args.records)
        small = written(root / f"{args.records // 100}", args.records // 100)
        plans = {}
        for order in ORDERS:
            cfg = config(order)
            for index in (large, small):
                seconds = timed(lambda index=index, cfg=cfg: make_tables(cfg, index))
                print(f"      tables ({order}, {index.count} records): {seconds:.1f} s")
            opened = timed(
                lambda cfg=cfg: batch(make_plan(open_data(cfg, large.folder), cfg, BATCH), 0), time.perf_counter
            )
            report.check(f"{order}: open index, tables and plan", opened, args.slowness, "s")
            plans[order] = make_plan(open_data(cfg, large.folder), cfg, BATCH)
        check_plan(report, "random", plans["random"], 1.0, args.slowness)
        check_plan(report, "sequential", plans["sequential"], 5.0, args.slowness)
        check_plan(report, "every", plans["every"], 2.0, args.slowness)
        for order in plans:
            check_memory(report, order, large.folder, small.folder)
        compare(plans["random"])
    return int(report.failed)


def written(folder: Path, records: int) -> Index:
    """Write a synthetic index, or open the one that is there."""
    if (folder / "current").is_file():
        return Index.open(folder)
    start = time.perf_counter()
    index = write_synthetic_index(folder, records)
    print(f"      index of {records} records: {time.perf_counter() - start:.1f} s")
    return index


def check_memory(report: Report, order: str, large: Path, small: Path) -> None:
    """Compare a worker over many records with one over a hundredth of them."""
    cfg = config(order)
    many, few = (worker_memory(cfg, folder) for folder in (large, small))
    for kind, name in (("rss", "resident"), ("uss", "own"), ("anonymous", "not file-backed")):
        note = f"{few[kind]:.1f} MiB -> {many[kind]:.1f} MiB at 100 times the records"
        report.check(f"{order}: growth of a worker's memory, {name}", many[kind] - few[kind], 4.0, "MiB", note)


def compare(plan: EpochPlan) -> None:
    """Print ratios against shuffling all ids in memory at the start of an epoch."""
    rng = np.random.Generator(np.random.Philox(key=1))
    uses = plan.uses
    shuffled = timed(lambda: rng.permutation(uses))
    far = statistics.median(timed(functools.partial(batch, plan, s)) for s in range(10_000, 500_000, 4_999))
    print(f"ratio: a shuffle of all {uses} ids takes {shuffled / far:.0f} times as long as any batch of the plan")
    print(f"ratio: it holds {uses * 8 / 2**20:.0f} MiB in every process, the plan none that grows")


if __name__ == "__main__":
    sys.exit(main())
