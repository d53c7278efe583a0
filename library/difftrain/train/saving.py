"""When checkpoints and exports are written, under kohya's names or by step, and what of them is kept.

Checkpoint: everything to resume, a folder `NAME-step00000004-state`, `NAME-000001-state` or `NAME-state`.
Export: weights for inference, `NAME-step00000004`, `NAME-000001` or `NAME` in the layout of --save_model_as; with
--use_ema the averaged weights beside it as `NAME-ema`, with --ema_profiles snapshots in ema_snapshots/.
By step: checkpoints are global_step4; exports are folders step4 and epoch1, with step4-ema and epoch1-ema beside them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from difftrain import checkpoint
from difftrain.checkpoint import STEPS, Naming, SaveName
from difftrain.checkpoint.find import ONE_FILE
from difftrain.config import TrainConfig
from difftrain.config.schema.families import row_of
from difftrain.contracts import RunFacts
from difftrain.distributed.collective import heartbeat
from difftrain.train.averages import store_snapshots, write_averages
from difftrain.train.meter import Meter
from difftrain.train.run_dir import how_to_go_on
from difftrain.train.state import Run
from difftrain.train.streams import Weights, all_tried, to_the_end
from difftrain.train.triggers import NOTHING, SaveWatch

log = logging.getLogger("difftrain")
CLOCK_FILE = "clock.json"
DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Saving:
    """Write checkpoints and exports at the steps and epochs that the flags ask for."""

    def __init__(self, run: Run, meter: Meter) -> None:
        self._meter = meter
        save = run.cfg.save
        self._saved_at = -1  # the step of the last checkpoint that this session has committed
        self._exported_at = -1
        self._by_step = save.naming == STEPS.value
        self._names: Naming = STEPS if self._by_step else run.name
        self._watch: SaveWatch | None = None
        self.every_n_epochs = save.every_n_epochs
        epochs = run.cfg.training.max_epochs
        if save.n_epoch_ratio and epochs:
            self.every_n_epochs = max(1, epochs // save.n_epoch_ratio)

    def before_training(self, run: Run) -> None:
        """Nothing is due before the first step; files and the time are looked at from here on, by one rank."""
        if run.ranks.is_logger:
            self._watch = SaveWatch(run.out if self._by_step else None, run.cfg.save.checkpoint_every_n_minutes)

    def asked(self) -> int:
        """Return what a file or the time asks for, where this rank looks."""
        return NOTHING if self._watch is None else self._watch.asked()

    def after_step(self, run: Run) -> None:
        """Save where a step, a number of examples or an epoch is due; under kohya's names the last epoch is the end's."""
        save = run.cfg.save
        if self._step_is_due(run):
            self._save(run, SaveName("step", run.progress.step), state=save.state)
        epoch = run.epoch_end()
        if not epoch:
            return
        if self.every_n_epochs and epoch % self.every_n_epochs == 0 and (run.steps_left or self._by_step):
            self._save(run, SaveName("epoch", epoch), state=save.state)
        due = save.checkpoint_every_n_epochs and epoch % save.checkpoint_every_n_epochs == 0
        if due and self._saved_at != run.progress.step:
            self._checkpoint(run, SaveName("epoch", epoch))

    def _step_is_due(self, run: Run) -> bool:
        save, step, seen = run.cfg.save, run.progress.step, run.progress.samples_seen
        if save.every_n_steps and step % save.every_n_steps == 0:
            return True
        examples = save.every_n_examples
        if not examples:
            return False
        return seen // examples > (seen - run.plan.size(step - 1)) // examples  # this step has passed a multiple

    def save_now(self, run: Run, *, export: bool = False) -> bool:
        """Write a checkpoint because somebody asked for one, unless this very step has one; return whether there is one.

        export: weights for inference as well.
        """
        name = SaveName("step", run.progress.step)
        if self._saved_at != run.progress.step:
            self._checkpoint(run, name)
        if export and self._exported_at != run.progress.step:
            self._save(run, name, state=False)
        return self._saved_at == run.progress.step

    def after_training(self, run: Run) -> None:
        """Write what a finished run leaves: the last export, and its checkpoint where asked for; by step, always both."""
        save, step, epoch = run.cfg.save, run.progress.step, run.epoch_end() if self._by_step else None
        if not self._by_step:
            if save.state or save.state_on_train_end:
                self._checkpoint(run, SaveName("end"), must=True)
        elif self._saved_at != step:
            self._checkpoint(run, SaveName("step", step), must=True)
        if self._by_step and self._exported_at == step:
            return
        with run.clock.paused("saving"):
            last = SaveName("epoch", epoch) if epoch else SaveName("step", step)
            self._export(run, last if self._by_step else SaveName("end"))

    def _save(self, run: Run, name: SaveName, *, state: bool) -> None:
        if state and not (self._by_step and self._saved_at == run.progress.step):
            self._checkpoint(run, name)
        failed = False
        with run.clock.paused("saving"):
            try:
                self._export(run, name)
            except OSError as error:  # a full disk: training goes on, what was saved before stays
                log.error("export %s was not written: %s; earlier ones are untouched", name.of(self._names), error)
                run.failed_saves += 1
                failed = True
            if run.ranks.any(failed):
                run.snapshots_at = None  # on every rank: storing them is work of all
            else:
                self._exported_at = run.progress.step
            with heartbeat(run.ranks, run.claim.owned):
                if run.claim.owned:
                    checkpoint.retain_exports(
                        run.out, self._names, run.cfg.save, run.progress.step, log.info, run.uploads.holds
                    )

    def _checkpoint(self, run: Run, save: SaveName, *, must: bool = False) -> None:
        """Commit a checkpoint; a failure stops the run only where nothing later can make up for it."""
        name = (SaveName("step", run.progress.step) if self._by_step else save).of(self._names, state=True)
        with run.clock.paused("saving"):
            run.claim.check()
            self._meter.update_progress(run)
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
                path = checkpoint.commit(run.out, name, write, run.ranks, self._meta(run, save.kind))
            except checkpoint.SaveFault as error:
                if must:
                    how = f"mend that, then {how_to_go_on(run.cfg.save)} from the newest that is whole"
                    raise checkpoint.SaveFault(f"checkpoint {name} was not written: {error}; {how}") from error
                log.error("checkpoint %s was not written: %s; earlier ones are untouched", name, error)
                self._time_begins()  # else each step would try
                run.failed_saves += 1
                return
            self._saved_at = run.progress.step
            self._time_begins()
            if run.ranks.is_logger:
                log.info("checkpoint %s at step %d", path.name, run.progress.step)
            if run.cfg.hub.save_state:
                self._send(run, path)
            with heartbeat(run.ranks, run.claim.owned):
                if run.claim.owned:
                    checkpoint.retain_states(
                        run.out, self._names, run.cfg.save, run.progress.step, log.info, run.uploads.holds
                    )

    def _time_begins(self) -> None:
        """Count the minutes to the next checkpoint from here."""
        if self._watch is not None:
            self._watch.saved()

    def _send(self, run: Run, path: Path) -> None:
        """Send a checkpoint to the hub where all of it lies on this machine."""
        with heartbeat(run.ranks, run.ranks.is_logger):
            if not run.ranks.is_logger:
                return
            if checkpoint.Manifest.read(path).spread:
                log.warning("%s is not sent to the hub: its parts lie on the disks of several machines", path.name)
            else:
                run.uploads.add(path, f"{path.name}, step {run.progress.step}")

    def _meta(self, run: Run, kind: str) -> dict[str, object]:
        step = run.progress.step
        place = {"epoch": run.plan.locate(step)[0], "data_offset": run.plan.offset}
        return {**run.identity, "step": step, "kind": kind, **place, "schedule_from": run.schedule_from}

    def _export(self, run: Run, save: SaveName) -> None:
        """Export the weights, and the averaged ones, and store snapshots; every rank takes part in gathering them."""
        name = save.of(self._names)
        with heartbeat(run.ranks, run.ranks.is_logger):
            all_tried(self._exports(run, name))

    def _exports(self, run: Run, name: str) -> Iterator[Callable[[], None]]:
        def trained() -> None:
            with run.engine.averaged_weights():
                self._export_weights(run, name, run.engine.full_weights())

        yield trained
        if (ema := run.ema) is not None:
            yield lambda: self._export_weights(run, f"{name}-ema", run.engine.full_weights(ema.weights))
        yield lambda: store_snapshots(run)

    def _export_weights(self, run: Run, name: str, weights: Weights) -> None:
        with to_the_end(weights):
            if run.ranks.is_logger:
                self._write(run, name, weights)

    def _write(self, run: Run, name: str, weights: Weights) -> None:
        save = run.cfg.save
        dtype = DTYPES[run.cfg.export_precision] if run.cfg.export_precision else None
        broken: list[str] = []
        layout, path = save.model_as or "safetensors", run.out / name
        with _folder_for(path, self._by_step and is_one_file(run.cfg, layout)) as target:
            written = run.family.export(
                _watched(weights, broken),
                run.parts,
                layout,
                target,
                dtype=dtype,
                metadata={} if save.no_metadata else run.family.metadata(name, time.time(), facts_of(run)),
            )
        path = path if self._by_step else written
        log.info("export %s", written.relative_to(run.out))
        if broken:
            said = f"{len(broken)} tensors of {path.name} hold values that are not finite, such as {broken[0]}"
            log.error("%s; a smaller rate, or --master_weights=fp32 with half weights", said)
            run.not_finite = said
        run.uploads.add(path, f"{path.name}, step {run.progress.step}")


def is_one_file(cfg: TrainConfig, layout: str) -> bool:
    """Tell whether an export in this layout is one file, not a folder."""
    return not row_of(cfg).folder_only and layout in ("safetensors", "ckpt")


@contextlib.contextmanager
def _folder_for(path: Path, one_file: bool) -> Iterator[Path]:
    """Give the path to export to: itself, or a file in a folder of its name, which goes where nothing was written."""
    if not one_file:
        yield path
        return
    path.mkdir(exist_ok=True)
    try:
        yield path / ONE_FILE
    finally:
        with contextlib.suppress(OSError):  # it holds an export
            path.rmdir()


def _watched(weights: Weights, broken: list[str]) -> Weights:
    """Hand weights on, and note the names of those that are not finite: an optimizer can break what it is given whole."""
    for name, tensor in weights:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            broken.append(name)
        yield name, tensor


def facts_of(run: Run) -> RunFacts:
    """Return what the header of an export says of this run."""
    return RunFacts(
        step=run.progress.step,
        epoch=run.epoch,
        total_steps=run.total_steps,
        num_epochs=run.cfg.training.max_epochs or run.epoch_of(run.total_steps),
        global_batch=run.global_batch,
        started_at=run.started_at,
        session_id=run.session_id,
        data=run.data.summary(),
    )
