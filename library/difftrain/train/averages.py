"""Averaged weights of a run: kept beside training, in checkpoints, and for the power-function ones as snapshots.

Snapshots lie in ema_snapshots/ of the run's folder, `WIDTH-UPDATES.safetensors`, a file for each width at every export;
averages of other widths are made from them later. No flag deletes them: each one makes those later averages better.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from difftrain.contracts import ConfigFault, Fault
from difftrain.diffusion.ema import Average, Ema
from difftrain.diffusion.power_ema import PowerEma
from difftrain.engine.shelf import Shelf
from difftrain.models.parts.weight_writers import safetensors_writer
from difftrain.train.state import Run

if TYPE_CHECKING:
    from difftrain.config.sections import EmaSection
    from difftrain.contracts import Engine

log = logging.getLogger("difftrain")
PLAIN, POWER = "ema", "ema_{width}"  # files ema-00000.safetensors, ema_0.05-00000.safetensors
UPDATES = "updates"
SNAPSHOTS = "ema_snapshots"
SNAPSHOT_DTYPES = {"float": torch.float32, "fp16": torch.float16}
GIB = float(1 << 30)


def start_averages(section: EmaSection, engine: Engine) -> tuple[Ema | None, list[PowerEma]]:
    """Make the averages that a run asks for, from the weights as they are."""
    weights = [(name, shard) for name, shard, _ in engine.shards()]
    plain = Ema(weights, section.decay) if section.enable else None
    return plain, [PowerEma(weights, width) for width in section.profiles]


def update_averages(run: Run) -> None:
    """Take in the weights after an update."""
    due = (run.progress.step + 1) % run.cfg.ema.update_every == 0  # by the step's number: a resume keeps the rhythm
    averages: list[Ema | PowerEma] = [*([run.ema] if run.ema is not None and due else []), *run.profiles]
    for average in averages:
        average.update((name, shard) for name, shard, _ in run.engine.shards())


def announce(section: EmaSection, profiles: list[PowerEma], steps: int) -> Iterator[str]:
    """Say what power-function averages cost, and where a run ends before its average ever moves."""
    if section.enable and steps < section.update_every:
        yield (
            f"the average of the weights takes them in every {section.update_every} steps, and the run has {steps}: it stays "
            "what the run began with ([ema] update_every)"
        )
    if not profiles:
        return
    count = sum(tensor.numel() for tensor in profiles[0].weights.values())
    size = count * SNAPSHOT_DTYPES[section.snapshot_precision].itemsize
    widths = ", ".join(f"{each.width} (gamma {each.gamma:.3f})" for each in profiles)
    yield (
        f"averages of relative width {widths}: {4 * count / GIB:.4g} GiB each in memory; at every export a snapshot of "
        f"each in {SNAPSHOTS}/, {size / GIB:.4g} GiB in {section.snapshot_precision}, which nothing deletes"
    )


# ---------------------------------------------------------------------- checkpoints


def write_averages(run: Run, folder: Path) -> list[Path]:
    """Write all averages into a checkpoint; whole on every rank, so the logger's do."""
    written = []
    if run.ema is not None:
        written.append(folder / f"{PLAIN}-00000.safetensors")
        save_file(run.ema.state_dict(), written[-1])
    for each in run.profiles:
        written.append(folder / f"{POWER.format(width=each.width)}-00000.safetensors")
        save_file(each.state_dict(), written[-1], metadata={UPDATES: str(each.updates)})
    return written


def load_averages(run: Run, folder: Path) -> None:
    """Take all averages from a checkpoint. Every rank calls it. Raises ConfigFault where they are not there."""
    shelf = Shelf(folder, PLAIN, run.ranks)
    if run.ema is None:
        if shelf.shapes:
            log.warning("%s has averaged weights, which are not carried on: --use_ema is not given", folder)
    else:
        remedy = "continue without --use_ema, as that run was"
        _load(run.ema, shelf, Fault("--use_ema", f"{folder} has no averaged weights", remedy))
    left = sorted({path.name.rpartition("-")[0] for path in folder.glob("ema_*-*.safetensors")})
    left = [kind for kind in left if kind not in {POWER.format(width=each.width) for each in run.profiles}]
    if left:
        log.warning("%s has averages that are not carried on, as --ema_profiles does not ask: %s", folder, left)
    for each in run.profiles:
        shelf = Shelf(folder, POWER.format(width=each.width), run.ranks)
        what = f"{folder} has no average of relative width {each.width}"
        _load(each, shelf, Fault("--ema_profiles", what, "continue with the widths of that run"))
        each.updates = int(shelf.metadata[0][UPDATES])


def _load(average: Average, shelf: Shelf, missing: Fault) -> None:
    if not shelf.shapes:
        raise ConfigFault([missing])
    average.load_state_dict({name: tensor.clone() for name, tensor in shelf.tensors(lambda name: True)})


# ---------------------------------------------------------------------- snapshots


def store_snapshots(run: Run) -> None:
    """Write a snapshot of every power-function average, once a step. Every rank calls it: gathering is collective."""
    if run.facts.get(SNAPSHOTS) == run.progress.step:  # the export at the end of a run may follow one of its last step
        return
    dtype = SNAPSHOT_DTYPES[run.cfg.ema.snapshot_precision]
    shapes = {name: (dtype, extent.shape) for name, _, extent in run.engine.shards()}
    for each in run.profiles:
        weights = run.engine.full_weights(each.weights)
        if not run.ranks.is_logger:
            for _ in weights:
                pass
            continue
        path = snapshot_path(run.out, each.width, each.updates)
        path.parent.mkdir(exist_ok=True)
        with safetensors_writer(path, shapes, _about(run, each)) as writer:
            for name, tensor in weights:
                if name in shapes:
                    writer.write(name, tensor.to(dtype))
        log.info("snapshot %s/%s", SNAPSHOTS, path.name)
    run.facts[SNAPSHOTS] = run.progress.step


def _about(run: Run, average: PowerEma) -> dict[str, str]:
    identity = run.facts["identity"]
    return {
        "gamma": repr(average.gamma),
        "width": repr(average.width),
        UPDATES: str(average.updates),
        "run": f"{identity['config_digest']} {identity['seed']}",
    }


def snapshot_path(out: Path, width: float, updates: int) -> Path:
    """Return where a snapshot lies."""
    return out / SNAPSHOTS / f"{width}-{updates:08d}.safetensors"
