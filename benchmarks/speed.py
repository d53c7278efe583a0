"""How fast steps are: warm-up, repeats and their spread, operations, memory; and the table and file they end in."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from workload import LORA_LABEL, Case, counted_flops, free

from difftrain.contracts import Batch, Parts
from difftrain.device import Device
from difftrain.device.memory import ran_out
from difftrain.io.files import write_text
from difftrain.models.family import ModelFamily
from difftrain.report.clock import Clock
from difftrain.report.environment import code_version, versions
from difftrain.report.peaks import measure_matmul, vendor_peak

OURS = "difftrain"
WIDTH = 88  # of a case in the table
BATCHES = 4  # different ones, in turns


class Step(Protocol):
    """What is measured: the engine's step, or a loop that somebody wrote by hand (plain_loops.py)."""

    family: ModelFamily
    parts: Parts
    notes: list[str]

    def batch(self, seed: int) -> Batch: ...
    def step(self, batch: Batch) -> Any: ...
    def loss(self, batch: Batch) -> float: ...
    def close(self) -> None: ...


class Budget:
    """Seconds that a whole command may take. seconds: None for as long as it takes."""

    def __init__(self, seconds: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, None if seconds is None else now() + seconds

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self._end is None else self._end - self._now()


def measured(
    run: Step, batches: list[Batch], device: Device, *, warm_up: int, steps: int, repeats: int, budget: Budget
) -> dict[str, Any]:
    """Measure rounds of steps after a warm-up: images a second, their spread over rounds, peak memory.

    spread: of the rounds, (largest - smallest) / median. A round begins only while the budget has room for one more.
    """
    count, began = len(batches), time.perf_counter()
    device.reset_peak_memory()
    run.step(batches[0])
    device.synchronise()
    first_s = time.perf_counter() - began
    for number in range(1, warm_up):
        run.step(batches[number % count])

    images, rounds, steps_s = len(batches[0].record_id), [], []
    for _ in range(repeats):
        if steps_s and steps * steps_s[-1] > budget.left_s:
            break
        clock = Clock(device.synchronise)
        clock.start()
        for number in range(steps):
            run.step(batches[number % count])
            clock.stepped(images)
        span = clock.read()
        rounds.append(span.fps)
        steps_s.append(span.step_s)
    fps = statistics.median(rounds)
    return {
        "fps": fps,
        "spread": (max(rounds) - min(rounds)) / fps,
        "rounds": rounds,
        "steps": steps,
        "warm_up": warm_up,
        "step_s": statistics.median(steps_s),
        "first_step_s": first_s,
        "peak_memory_gib": device.peak_memory_gib(),
    }


class Ceilings:
    """What the device could do: its vendor's peak, and the matmul rate measured here, once a precision."""

    def __init__(self, device: Device, seconds: float | None = None) -> None:
        self.device, self._seconds = device, seconds
        self._matmul: dict[str, float] = {}

    def of(self, precision: str, fps: float, flops: float) -> dict[str, Any]:
        """Say which share of both a rate of images with so many operations each is."""
        if precision not in self._matmul:
            self._matmul[precision] = measure_matmul(
                self.device.torch_device, precision, self.device.synchronise, budget_s=self._seconds
            )
        matmul, peak = self._matmul[precision], vendor_peak(str(self.device.describe()["name"]), precision)
        return {
            "flops_per_s": fps * flops,
            "matmul_flops_per_s": matmul,
            "matmul_utilisation": fps * flops / matmul,
            "mfu": fps * flops / peak[0] if peak else None,
            "mfu_peak": f"{peak[0]:.4g} FLOP/s, {peak[1]}" if peak else "this device's peak is not known",
        }


def measured_row(
    case: Case,
    make: Callable[[], Step],
    ceilings: Ceilings,
    loop: str = OURS,
    *,
    warm_up: int,
    steps: int,
    repeats: int,
    budget: Budget,
) -> dict[str, Any]:
    """Measure a case; one that does not fit the memory is named, any other fault too. loop: who makes the step."""
    device = ceilings.device
    row = row_of(case) | {"title": case.title, "loop": loop}
    try:
        run = make()
    except (RuntimeError, ImportError) as error:
        free(device)
        return row | failure(error)
    try:
        batches = [run.batch(seed) for seed in range(BATCHES)]
        row |= measured(run, batches, device, warm_up=warm_up, steps=steps, repeats=repeats, budget=budget)
        row |= {"loss": run.loss(batches[0]), "notes": run.notes, "flops_per_sample": counted_flops(run.family, case)}
        # the formula is of all that the family trains: adapters have none
        full = case.trains == "full"
        row["formula_flops_per_sample"] = run.family.flops_per_sample(run.parts, case.bucket) if full else None
        row |= ceilings.of(case.precision, row["fps"], row["flops_per_sample"])
    except RuntimeError as error:
        row |= failure(error)
    finally:
        run.close()
    return row


def row_of(case: Case) -> dict[str, Any]:
    """Return a case as a row of the file has it."""
    row = {name: getattr(case, name) for name in case.__dataclass_fields__}
    row["sizes"] = json.loads(case.sizes) if case.sizes else {}
    return row | ({"lora": LORA_LABEL} if case.trains == "lora" else {})


def failure(error: BaseException) -> dict[str, Any]:
    """Say why a case was not measured. does_not_fit: for want of memory, which is a result; impossible: on any such device."""
    where = ran_out(error)
    if where is not None:
        return {"failed": f"out of the {where}'s memory", "does_not_fit": True}
    told = str(error).strip() or "no more is said"
    if type(error).__name__ == "NoSuchStep":
        return {"failed": told, "impossible": True}
    return {"failed": f"{type(error).__name__}: {told.splitlines()[0]}"}


# --- what a person reads, and the file


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    name = row["title"] if row["loop"] == OURS else f"{row['title']}: {row['loop']}"
    if "failed" in row:
        return f"  {name:{WIDTH}} {row['failed']}"
    mfu = "    -" if row.get("mfu") is None else f"{100 * row['mfu']:4.1f}%"
    work = f"{row['flops_per_sample']:9.3e}" if row.get("flops_per_sample") else "        -"
    formula = f"{row['formula_flops_per_sample']:9.3e}" if row.get("formula_flops_per_sample") else "        -"
    used = f"{100 * row['matmul_utilisation']:5.1f}%" if "matmul_utilisation" in row else "     -"
    return (
        f"  {name:{WIDTH}} {row['fps']:9.3f} {100 * row['spread']:5.1f}% {1000 * row['step_s']:9.1f} {work} {formula} "
        f"{mfu:>6} {used:>6} {row['peak_memory_gib']:7.2f}"
    )


HEAD = f"  {'case':{WIDTH}} {'FPS':>9} {'spread':>6} {'ms/step':>9} {'counted':>9} {'formula':>9} {'MFU':>6} {'matmul':>6} {'GiB':>7}"


def left_out(title: str, why: str) -> str:
    """Return the row of a case that was not measured."""
    return f"  {title:{WIDTH}} left out: {why}"


def about(device: Device) -> dict[str, Any]:
    """Say where and of what code figures are."""
    described = device.describe()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": described,
        "versions": versions(described),
        "code": code_version(),
        "threads": torch.get_num_threads(),
    }


def write(path: Path, found: dict[str, Any]) -> None:
    """Write what there is, whole; called after every case, so that a command that is ended keeps what it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found, indent=1) + "\n")
