"""The tables of docs/scaling.md: a full fine-tune of SDXL on up to 1,024 cards by the cost model, nothing measured.

`python benchmarks/scaling_plan.py` prints them; with --write they are put into the page between their marks. A test holds the
page to them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import Bucket
from difftrain.models.registry import make_family
from difftrain.train.estimate.communication import FP32, HALF, Cluster, Scaling, Spread, kinds, scaling, size_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
SIDE, MICRO_BATCH, PER_MACHINE = 1024, 4, 8
GIB = float(1 << 30)
COUNTS = (8, 64, 256, 1024)

# of the cluster, beside Cluster's
STORAGE = 20e9  # bytes a second of the shared storage, all machines together
WRITER = 2e9  # bytes a second that one process writes or reads
DEVICE_HOURS = 50_677.0  # a card between two failures of a job: 16,384 cards x 54 days / 419 interruptions
DETECT_S, START_S = 60.0, 240.0  # until the others have ended; containers, imports, rendezvous, first step


class Model(NamedTuple):
    """What the tables are about."""

    elements: int
    sharding: object
    flops: float  # of an image


@cache
def model() -> Model:
    """Measure SDXL without its weights."""
    cfg = TrainConfig.model_validate({"model": {"family": "sdxl", "init_from_config": "base"}})
    family = make_family(cfg)
    parts = family.load(meta=True)
    size = size_of(parts.root, family.repeated(parts))
    return Model(size.elements, size, family.flops_per_sample(parts, Bucket(SIDE, SIDE)))


WAYS: dict[str, Spread] = {
    "native (DDP)": Spread("ddp", 1),
    "native, oss": Spread("oss", 1),
    "DeepSpeed ZeRO 2": Spread("zero2", 1, weight_bytes=HALF, gradient_bytes=HALF),
    "fsdp, full": Spread("fsdp", 1, weight_bytes=HALF),
    "fsdp, hybrid of 8": Spread("fsdp", 1, weight_bytes=HALF, shard=8),
}


def outlook(way: str, ranks: int) -> Scaling:
    """Estimate an update of a way on so many ranks: bf16, no accumulation."""
    spread = replace(WAYS[way], ranks=ranks)
    if way == "fsdp, full":
        spread = replace(spread, shard=ranks)
    return scaling(spread, model().sharding, model().flops * MICRO_BATCH, Cluster(per_machine=PER_MACHINE))  # type: ignore[arg-type]


def standing(way: str, ranks: int) -> float:
    """Return the bytes of weights, gradients and AdamW's state that a rank holds, without activations."""
    spread = outlook(way, ranks).spread
    halves = spread.way.startswith("zero")
    weights = (HALF if halves else FP32) * spread.weights_share
    masters = FP32 * spread.state_share if halves else 0.0
    return model().elements * (
        weights + masters + spread.gradient_bytes * spread.gradients_share + 2 * FP32 * spread.state_share
    )


# --- failures


def young(save_s: float, between_s: float) -> float:
    """Return the seconds of work between two checkpoints that lose least: sqrt(2 d M).

    Source: Young, A first order approximation to the optimum checkpoint interval, 1974.
    """
    return math.sqrt(2 * save_s * between_s)


def daly(save_s: float, between_s: float) -> float:
    """Return the same to a higher order: sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d, for d < 2M.

    Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006, equation 37.
    """
    x = save_s / (2 * between_s)
    return young(save_s, between_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s if x < 1 else between_s


def goodput(work_s: float, save_s: float, restart_s: float, between_s: float) -> float:
    """Return the share of the time that is work which counts: t / (M e^(R/M) (e^((t + d)/M) - 1)).

    Failures come at random with a mean of M seconds, also while saving and restarting.
    Source: Daly, 2006, equation 20.
    """
    spent = between_s * math.exp(restart_s / between_s) * math.expm1((work_s + save_s) / between_s)
    return work_s / spent


class Saving(NamedTuple):
    """How checkpoints are written: seconds until one is whole, seconds that training stands still, seconds to read it."""

    written_s: float
    stall_s: float
    read_s: float


def checkpoint_bytes() -> float:
    """Return the bytes of a checkpoint: fp32 weights, AdamW's two moments, and averaged weights."""
    return model().elements * 4.0 * FP32


def savings(ranks: int) -> dict[str, Saving]:
    """Return three ways to save, on so many ranks. Every machine reads all of it, but for shards, which share it."""
    size, machines = checkpoint_bytes(), max(1, ranks // PER_MACHINE)
    one = size / min(WRITER, STORAGE)
    pieces = size / min(WRITER * ranks, STORAGE)
    read = size / min(WRITER, STORAGE / machines)
    return {
        "one rank writes, training waits": Saving(one, one, read),
        "every rank writes its rows, training waits": Saving(pieces, pieces, pieces),
        "every rank writes its rows, `--save_async`": Saving(pieces, 0.1 * pieces, pieces),
    }


# --- the tables


def _table(head: str, rows: Iterator[str]) -> str:
    columns = head.count("|") - 1
    return "\n".join([head, "|" + "---|" * columns, *rows])


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def communication() -> str:
    """Say what each engine sends and how fast it is."""

    def rows() -> Iterator[str]:
        for way in WAYS:
            for ranks in COUNTS:
                figures = outlook(way, ranks)
                worst, best = figures.efficiency
                sent = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in kinds(figures.exchanged).items())
                quick, slow = figures.step_s
                yield (
                    f"| {way} | {ranks:,} | {standing(way, ranks) / GIB:.1f} | {sent} | {figures.sent / GIB:.1f} "
                    f"| {quick:.1f} to {slow:.1f} s | {100 * worst:.0f} to {100 * best:.0f} % |"
                )

    return _table("| engine | cards | GiB held | GiB sent a step, by kind | in all | step | efficiency |", rows())


def reading() -> str:
    """Say what data are read while that trains."""

    def rows() -> Iterator[str]:
        for ranks in COUNTS:
            step_s = outlook("fsdp, hybrid of 8", ranks).step_s[0]
            images = ranks * MICRO_BATCH / step_s
            jpeg, cached = 0.5e6 * images, (256 + 310) * 1024 * images
            machines = ranks / PER_MACHINE
            yield (
                f"| {ranks:,} | {images:,.0f} | {jpeg / 1e6:,.0f} MB/s | {cached / 1e6:,.0f} MB/s "
                f"| {cached / machines / 1e6:,.0f} MB/s | {images / machines:,.0f} |"
            )

    head = (
        "| cards | images/s | JPEGs of 0.5 MB | bf16 cache, latents and text | of it a machine | images/s a machine |"
    )
    return _table(head, rows())


def checkpoints() -> str:
    """Say what a checkpoint takes, how often to write one, and what failures leave of the time."""

    def rows() -> Iterator[str]:
        for ranks in COUNTS:
            between = DEVICE_HOURS * 3600 / ranks
            for name, saving in savings(ranks).items():
                restart = DETECT_S + START_S + saving.read_s
                work = max(daly(saving.stall_s, between), saving.written_s)
                share = goodput(work, saving.stall_s, restart, between)
                yield (
                    f"| {ranks:,} | {_time(between)} | {name} | {_time(saving.written_s)} | {_time(saving.stall_s)} "
                    f"| {_time(restart)} | {_time(work)} | {100 * share:.2f} % |"
                )

    head = "| cards | failure every | checkpoint | whole after | stall | restart | interval | goodput |"
    return _table(head, rows())


def figures() -> str:
    """Say what is put in."""
    cluster = Cluster(per_machine=PER_MACHINE)
    rows = {
        "parameters of SDXL's UNet": f"{model().elements:,}",
        f"work of an image at {SIDE} px": f"{model().flops / 1e12:.1f} TFLOP, forward and backward",
        "images of a card in a step": f"{MICRO_BATCH}",
        "speed of a card": f"{cluster.flops / 1e12:.0f} TFLOP/s reached, assumed",
        "cards of a machine": f"{PER_MACHINE}",
        "links": f"{cluster.inside / 1e9:.0f} GB/s from a card within its machine, {cluster.outside / 1e9:.0f} GB/s to others, assumed",
        "checkpoint": f"{checkpoint_bytes() / GIB:.1f} GiB: fp32 weights, AdamW's moments, averaged weights, 16 B a parameter",
        "storage": f"{STORAGE / 1e9:.0f} GB/s in all, {WRITER / 1e9:.0f} GB/s of a process, assumed",
        "failures": f"one in {DEVICE_HOURS:,.0f} hours of a card",
        "restart": f"{DETECT_S:.0f} s until the others have ended, {START_S:.0f} s to start, then reading the checkpoint",
    }
    return _table("| figure | value |", (f"| {name} | {value} |" for name, value in rows.items()))


TABLES = {"figures": figures, "communication": communication, "reading": reading, "checkpoints": checkpoints}


def written(page: str) -> str:
    """Return the page with every table between its marks."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", "\n<!-- end -->"
        before, found, remaining = page.partition(begin)
        assert found, f"{PAGE} has no place for {name}"
        page = before + begin + table() + end + remaining.partition(end)[2]
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        for name, table in TABLES.items():
            print(f"{name}\n{table()}\n")
