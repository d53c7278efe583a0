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
from typing import TYPE_CHECKING, Any

import torch

from difftrain import checkpoint
from difftrain.checkpoint import STEPS, Claim, SaveName
from difftrain.checkpoint.find import ONE_FILE
from difftrain.config import TrainConfig
from difftrain.config.schema.families import row_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts import RunFacts
from difftrain.distributed.collective import heartbeat
from difftrain.train.meter import Meter
from difftrain.train.run_dir import how_to_go_on
from difftrain.train.state import Due, Position, TrainedModel
from difftrain.train.streams import Weights, all_tried, to_the_end
from difftrain.train.triggers import NOTHING, SaveWatch

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks
    from difftrain.hub.uploads import Uploads
    from difftrain.report.clock import Clock

log = logging.getLogger("difftrain")
CLOCK_FILE = "clock.json"
DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Saving:
    """Write checkpoints and exports at the steps and epochs that the flags ask for."""

    def __init__(
        self,
        cfg: TrainConfig,
        model: TrainedModel,
        ranks: Ranks,
        clock: Clock,
        claim: Claim,
        meter: Meter,
        exports: Exports,
        meta: Callable[[str], dict[str, object]],
    ) -> None:
        """Begin. claim: on the output folder. meta: says what a checkpoint of a kind holds of the run, as it is now."""
        self._cfg, self._model, self._ranks, self._clock = cfg, model, ranks, clock
        self._claim, self._meter, self.exports, self._meta = claim, meter, exports, meta

        # what is due, and what was done
        save = cfg.save
        self._saved_at = -1  # the step of the last checkpoint that this session has committed
        self._exported_at = -1
        self._by_step = save.naming == STEPS.value
        self._names = checkpoint.naming_of(save)
        self._due = Due(save.every_n_steps, None, save.every_n_examples, at_end=False)
        self._watch: SaveWatch | None = None
        self.failed = 0  # saves that were not written
        self.every_n_epochs = save.every_n_epochs
        epochs = cfg.training.max_epochs
        if save.n_epoch_ratio and epochs:
            self.every_n_epochs = max(1, epochs // save.n_epoch_ratio)

    def before_training(self, at: Position) -> None:
        """Nothing is due before the first step; files and the time are looked at from here on, by one rank."""
        self._due.begin(at.samples_seen)
        if self._ranks.is_logger:
            folder = self._cfg.output_dir if self._by_step else None
            self._watch = SaveWatch(folder, self._cfg.save.checkpoint_every_n_minutes)

    def asked(self) -> int:
        """Return what a file or the time asks for, where this rank looks."""
        return NOTHING if self._watch is None else self._watch.asked()

    def after_step(self, at: Position) -> None:
        """Save where a step, a number of examples or an epoch is due; under kohya's names the last epoch is the end's."""
        save, epoch = self._cfg.save, at.epoch_end
        if self._due(at):
            self._save(at, SaveName("step", at.step), state=save.state)
        if not epoch:
            return
        if self.every_n_epochs and epoch % self.every_n_epochs == 0 and (at.steps_left or self._by_step):
            self._save(at, SaveName("epoch", epoch), state=save.state)
        due = save.checkpoint_every_n_epochs and epoch % save.checkpoint_every_n_epochs == 0
        if due and self._saved_at != at.step:
            self._checkpoint(at, SaveName("epoch", epoch))

    def save_now(self, at: Position, *, export: bool = False) -> bool:
        """Write a checkpoint because somebody asked for one, unless this very step has one; return whether there is one.

        export: weights for inference as well.
        """
        name = SaveName("step", at.step)
        if self._saved_at != at.step:
            self._checkpoint(at, name)
        if export and self._exported_at != at.step:
            self._save(at, name, state=False)
        return self._saved_at == at.step

    def after_training(self, at: Position) -> None:
        """Write what a finished run leaves: the last export, and its checkpoint where asked for; by step, always both."""
        save, epoch = self._cfg.save, at.epoch_end if self._by_step else None
        if not self._by_step:
            if save.state or save.state_on_train_end:
                self._checkpoint(at, SaveName("end"), must=True)
        elif self._saved_at != at.step:
            self._checkpoint(at, SaveName("step", at.step), must=True)
        if self._by_step and self._exported_at == at.step:
            return
        with self._clock.paused("saving"):
            last = SaveName("epoch", epoch) if epoch else SaveName("step", at.step)
            self.exports.write((last if self._by_step else SaveName("end")).of(self._names), at.step)

    def _save(self, at: Position, save: SaveName, *, state: bool) -> None:
        if state and not (self._by_step and self._saved_at == at.step):
            self._checkpoint(at, save)
        failed, name = False, save.of(self._names)
        with self._clock.paused("saving"):
            try:
                self.exports.write(name, at.step)
            except OSError as error:  # a full disk: training goes on, what was saved before stays
                log.error("export %s was not written: %s; earlier ones are untouched", name, error)
                self.failed += 1
                failed = True
            if self._ranks.any(failed):
                self._model.averages.snapshots_at = None  # on every rank: storing them is work of all
            else:
                self._exported_at = at.step
            self._retain(checkpoint.retain_exports, at)

    def _checkpoint(self, at: Position, save: SaveName, *, must: bool = False) -> None:
        """Commit a checkpoint; a failure stops the run only where nothing later can make up for it."""
        cfg, ranks = self._cfg, self._ranks
        name = (SaveName("step", at.step) if self._by_step else save).of(self._names, state=True)
        with self._clock.paused("saving"):
            # --- every rank's part, and what is the run's alone
            self._claim.check()
            progress = self._meter.update_progress()
            snapshot = self._model.engine.snapshot()

            def write(folder: Path) -> list[Path]:
                files = snapshot.write(folder)
                if ranks.is_logger:
                    files.append(progress.write(folder))
                    files.append(folder / CLOCK_FILE)
                    files[-1].write_text(json.dumps(self._clock.state()))
                    files += self._model.averages.write(folder)
                return files

            # --- commit it, or say why not
            try:
                path = checkpoint.commit(cfg.output_dir, name, write, ranks, self._meta(save.kind))
            except checkpoint.SaveFault as error:
                if must:
                    how = f"mend that, then {how_to_go_on(cfg.save)} from the newest that is whole"
                    raise checkpoint.SaveFault(f"checkpoint {name} was not written: {error}; {how}") from error
                log.error("checkpoint %s was not written: %s; earlier ones are untouched", name, error)
                self._time_begins()  # else each step would try
                self.failed += 1
                return
            self._saved_at = at.step
            self._time_begins()

            # --- tell of it, send it, and remove what it replaces
            if ranks.is_logger:
                log.info("checkpoint %s at step %d", path.name, at.step)
            if cfg.hub.save_state:
                self._send(path, at.step)
            self._retain(checkpoint.retain_states, at)

    def _retain(self, retain: Callable[..., object], at: Position) -> None:
        """Remove what the flags do not keep, on the rank that owns the folder."""
        with heartbeat(self._ranks, self._claim.owned):
            if self._claim.owned:
                out, uploads = self._cfg.output_dir, self.exports.uploads
                retain(out, self._names, self._cfg.save, at.step, log.info, uploads.holds)

    def _time_begins(self) -> None:
        """Count the minutes to the next checkpoint from here."""
        if self._watch is not None:
            self._watch.saved()

    def _send(self, path: Path, step: int) -> None:
        """Send a checkpoint to the hub where all of it lies on this machine."""
        with heartbeat(self._ranks, self._ranks.is_logger):
            if not self._ranks.is_logger:
                return
            if checkpoint.Manifest.read(path).spread:
                log.warning("%s is not sent to the hub: its parts lie on the disks of several machines", path.name)
            else:
                self.exports.uploads.add(path, f"{path.name}, step {step}")


class Exports:
    """Write weights for inference, averaged ones beside them, and snapshots of averages by width."""

    def __init__(
        self,
        cfg: TrainConfig,
        model: TrainedModel,
        ranks: Ranks,
        uploads: Uploads,
        identity: dict[str, Any],
        facts: Callable[[], RunFacts],
    ) -> None:
        """Begin. identity, facts: of the run, for snapshots and for the header of an export, as it is now."""
        self._cfg, self._model, self._ranks, self.uploads = cfg, model, ranks, uploads
        self._identity, self._facts = identity, facts
        self.not_finite = ""  # which exported weights are not, in a sentence

    def write(self, name: str, step: int) -> None:
        """Export under a name; every rank takes part in gathering the weights. Raises OSError."""
        with heartbeat(self._ranks, self._ranks.is_logger):
            all_tried(self._jobs(name, step))

    def _jobs(self, name: str, step: int) -> Iterator[Callable[[], None]]:
        engine, averages = self._model.engine, self._model.averages

        def trained() -> None:
            with engine.averaged_weights():
                self._gather(name, engine.full_weights(), step)

        yield trained
        if (ema := averages.ema) is not None:
            yield lambda: self._gather(f"{name}-ema", engine.full_weights(ema.weights), step)
        yield lambda: averages.store_snapshots(self._cfg.output_dir, step, self._ranks, self._identity)

    def _gather(self, name: str, weights: Weights, step: int) -> None:
        with to_the_end(weights):
            if self._ranks.is_logger:
                self._write(name, weights, step)

    def _write(self, name: str, weights: Weights, step: int) -> None:
        cfg, save, family = self._cfg, self._cfg.save, self._model.family
        dtype = DTYPES[cfg.export_precision] if cfg.export_precision else None
        broken: list[str] = []
        layout, path, by_step = save.model_as or "safetensors", cfg.output_dir / name, save.naming == STEPS.value
        with _folder_for(path, by_step and is_one_file(cfg, layout)) as target:
            written = family.export(
                _watched(weights, broken),
                self._model.parts,
                layout,
                target,
                dtype=dtype,
                metadata={} if save.no_metadata else family.metadata(name, time.time(), self._facts()),
            )

        # say what was written, and send it
        path = path if by_step else written
        log.info("export %s", written.relative_to(cfg.output_dir))
        if broken:
            said = f"{len(broken)} tensors of {path.name} hold values that are not finite, such as {broken[0]}"
            log.error(f"%s; a smaller rate, or {option('training.master_weights')}=fp32 with half weights", said)
            self.not_finite = said
        self.uploads.add(path, f"{path.name}, step {step}")


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
