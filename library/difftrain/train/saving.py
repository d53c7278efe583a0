"""When checkpoints and exports are written, under kohya's names, and what of them is kept.

Checkpoint: everything to resume, a folder `NAME-step00000004-state`, `NAME-000001-state` or `NAME-state`.
Export: weights for inference, `NAME-step00000004`, `NAME-000001` or `NAME` in the layout of --save_model_as; with
--use_ema the averaged weights beside it as `NAME-ema`, with --ema_profiles snapshots in ema_snapshots/.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from difftrain import checkpoint
from difftrain.contracts import RunFacts
from difftrain.train.averages import load_averages, store_snapshots, write_averages
from difftrain.train.progress import PROGRESS_FILE, Progress
from difftrain.train.state import Run
from difftrain.train.together import company, for_all

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("difftrain")
CLOCK_FILE = "clock.json"
DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Saving:
    """Write checkpoints and exports at the steps and epochs that the flags ask for."""

    def __init__(self, run: Run) -> None:
        save = run.cfg.save
        self._saved_at = -1  # the step of the last checkpoint that this session has committed
        self.every_n_epochs = save.every_n_epochs
        epochs = run.cfg.training.max_epochs
        if save.n_epoch_ratio and epochs:
            self.every_n_epochs = max(1, epochs // save.n_epoch_ratio)

    def before_training(self, run: Run) -> None:
        """Nothing is due before the first step."""

    def after_step(self, run: Run) -> None:
        """Save where a step or an epoch is due; the last epoch is the end's."""
        save = run.cfg.save
        if save.every_n_steps and run.progress.step % save.every_n_steps == 0:
            self._save(run, f"{run.name}-step{run.progress.step:08d}", "step", state=save.state)
        epoch = run.epoch_end()
        if epoch and self.every_n_epochs and epoch % self.every_n_epochs == 0 and run.steps_left:
            self._save(run, f"{run.name}-{epoch:06d}", "epoch", state=save.state)

    def save_now(self, run: Run) -> bool:
        """Write a checkpoint because somebody asked for one, unless this very step has one; return whether there is one."""
        if self._saved_at != run.progress.step:
            self._checkpoint(run, f"{run.name}-step{run.progress.step:08d}-state", "step")
        return self._saved_at == run.progress.step

    def after_training(self, run: Run) -> None:
        """Write what a finished run leaves: the last export, and its checkpoint where asked for."""
        save = run.cfg.save
        if save.state or save.state_on_train_end:
            self._checkpoint(run, f"{run.name}-state", "end", must=True)
        with run.clock.paused("saving"):
            self._export(run, run.name)

    def _save(self, run: Run, name: str, kind: str, *, state: bool) -> None:
        if state:
            self._checkpoint(run, f"{name}-state", kind)
        with run.clock.paused("saving"):
            try:
                self._export(run, name)
            except OSError as error:  # a full disk: training goes on, what was saved before stays
                log.error("export %s was not written: %s; earlier ones are untouched", name, error)
                run.facts["failed_saves"] = run.facts.get("failed_saves", 0) + 1
            with company(run.ranks, run.claim.owned):
                if run.claim.owned:
                    checkpoint.retain_exports(
                        run.out, run.name, run.cfg.save, run.progress.step, log.info, run.uploads.holds
                    )

    def _checkpoint(self, run: Run, name: str, kind: str, *, must: bool = False) -> None:
        """Commit a checkpoint; a failure stops the run only where nothing later can make up for it."""
        with run.clock.paused("saving"):
            run.claim.check()
            run.meter.settle(run)
            snapshot = run.engine.snapshot()

            def write(folder: Path) -> list[Path]:
                files = snapshot.write(folder)
                if run.ranks.is_logger:
                    files.append(run.progress.write(folder))
                    files.append(folder / CLOCK_FILE)
                    files[-1].write_text(json.dumps(run.clock.state()))
                    files += write_averages(run, folder)
                return files

            try:
                path = checkpoint.commit(run.out, name, write, run.ranks, self._meta(run, kind))
            except checkpoint.SaveFault as error:
                if must:
                    raise checkpoint.SaveFault(f"checkpoint {name} was not written: {error}") from error
                log.error("checkpoint %s was not written: %s; earlier ones are untouched", name, error)
                run.facts["failed_saves"] = run.facts.get("failed_saves", 0) + 1
                return
            self._saved_at = run.progress.step
            if run.ranks.is_logger:
                log.info("checkpoint %s at step %d", path.name, run.progress.step)
            if run.cfg.hub.save_state:
                self._send(run, path)
            with company(run.ranks, run.claim.owned):
                if run.claim.owned:
                    checkpoint.retain_states(
                        run.out, run.name, run.cfg.save, run.progress.step, log.info, run.uploads.holds
                    )

    def _send(self, run: Run, path: Path) -> None:
        """Send a checkpoint to the hub where all of it lies on this machine."""
        with company(run.ranks, run.ranks.is_logger):
            if not run.ranks.is_logger:
                return
            if checkpoint.Manifest.read(path).spread:
                log.warning("%s is not sent to the hub: its parts lie on the disks of several machines", path.name)
            else:
                run.uploads.add(path, f"{path.name}, step {run.progress.step}")

    def _meta(self, run: Run, kind: str) -> dict[str, object]:
        return {**run.facts["identity"], "step": run.progress.step, "kind": kind}

    def _export(self, run: Run, name: str) -> None:
        """Export the weights, and the averaged ones, and store snapshots; every rank takes part in gathering them."""
        with company(run.ranks, run.ranks.is_logger):
            with run.engine.settled():
                self._export_weights(run, name, run.engine.full_weights())
            if run.ema is not None:
                self._export_weights(run, f"{name}-ema", run.engine.full_weights(run.ema.weights))
            store_snapshots(run)

    def _export_weights(self, run: Run, name: str, weights: Iterator[tuple[str, Tensor]]) -> None:
        if not run.ranks.is_logger:
            for _ in weights:
                pass
            return
        save = run.cfg.save
        dtype = DTYPES[run.cfg.export_precision] if run.cfg.export_precision else None
        broken: list[str] = []
        path = run.family.export(
            _watched(weights, broken),
            run.parts,
            save.model_as or "safetensors",
            run.out / name,
            dtype=dtype,
            metadata={} if save.no_metadata else run.family.metadata(name, time.time(), facts_of(run)),
        )
        log.info("export %s", path.name)
        if broken:
            said = f"{len(broken)} tensors of {path.name} hold values that are not finite, such as {broken[0]}"
            log.error("%s; a smaller rate, or --master_weights=fp32 with half weights", said)
            run.facts["not_finite"] = said
        run.uploads.add(path, f"{path.name}, step {run.progress.step}")


def _watched(weights: Iterator[tuple[str, Tensor]], broken: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Hand weights on, and note the names of those that are not finite: an optimizer can break what it is given whole."""
    for name, tensor in weights:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            broken.append(name)
        yield name, tensor


def facts_of(run: Run) -> RunFacts:
    """Return what the header of an export says of this run."""
    return RunFacts(
        step=run.progress.step,
        epoch=run.plan.locate(max(run.progress.step - 1, 0))[0] + 1,
        total_steps=run.total_steps,
        num_epochs=run.cfg.training.max_epochs or run.plan.locate(max(run.total_steps - 1, 0))[0] + 1,
        global_batch=run.global_batch,
        started_at=run.facts["started_at"],
        session_id=run.facts["session_id"],
        data=run.data.summary(),
    )


def load_counters(run: Run, folder: Path) -> None:
    """Take counters, clock and averaged weights from a checkpoint; the engine takes the rest. Every rank calls it.

    The logger's disk has them; ranks of machines with disks of their own get them from there.
    """
    texts = for_all(
        run.ranks, run.ranks.is_logger, lambda: [(folder / name).read_text() for name in (PROGRESS_FILE, CLOCK_FILE)]
    )
    run.progress = Progress.of(texts[0])
    run.clock.load(json.loads(texts[1]))
    load_averages(run, folder)
