"""When checkpoints and exports are written, under kohya's names or by step, and what of them is kept.

Checkpoint: everything to resume, a folder `NAME-step00000004-state`, `NAME-000001-state` or `NAME-state`.
Export: weights for inference, `NAME-step00000004`, `NAME-000001` or `NAME` in the layout of --save_model_as; with
--use_ema the averaged weights beside it as `NAME-ema`, with --ema_profiles snapshots in ema_snapshots/.
By step: checkpoints are global_step4; exports are folders step4 and epoch1, with step4-ema and epoch1-ema beside them.
As diffusers' examples do: checkpoints are checkpoint-4; the last export, of the averaged weights where the run has some, is
a pipeline in the run's folder itself.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain import checkpoint
from difftrain.cache.request import bytes_text
from difftrain.checkpoint import DIFFUSERS, STEPS, Claim, Own, SaveName
from difftrain.checkpoint.find import ONE_FILE, PIPELINE_INDEX
from difftrain.config import TrainConfig
from difftrain.config.schema.families import row_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts import RunFacts
from difftrain.distributed.collective import heartbeat, run_on
from difftrain.io.files import aside_of, fsync_folder, link_or_copy, size_of
from difftrain.models.adapted import as_one_file
from difftrain.models.weights.folder_export import inside, new_folder
from difftrain.report.notices import Notices
from difftrain.train.checkpoints import Checkpoints
from difftrain.train.meter import Meter
from difftrain.train.state import Due, Position, TrainedModel
from difftrain.train.streams import Weights, all_tried, to_the_end
from difftrain.train.triggers import NOTHING, ControlFiles

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks
    from difftrain.hub.uploads import Uploads
    from difftrain.report.clock import Clock

log = logging.getLogger("difftrain")
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
        epochs: int = 0,
    ) -> None:
        """Begin. claim: on the output folder. meta: says what a checkpoint of a kind holds of the run, as it is now.

        epochs: of the whole run, those that are begun by the last step counted.
        """
        self._cfg, self._model, self._ranks, self._clock = cfg, model, ranks, clock
        self._claim, self.exports = claim, exports
        self.checkpoints = Checkpoints(
            cfg, model, ranks, clock, claim, meter, exports.uploads, exports.notices, meta, self._time_begins
        )

        # what is due, and what was done
        save = cfg.save
        self._exported_at = -1
        self._names = checkpoint.naming_of(save)
        self._numbered = isinstance(self._names, Own)  # a checkpoint is called by its step alone
        self._by_step = self._names is STEPS  # and the end is a step like others
        self._due = Due(save.every_n_steps, None, save.every_n_examples, at_end=False)
        self._state_due = Due(save.checkpoint_every_n_steps, None, at_end=False)
        self._watch: ControlFiles | None = None
        self._failed_exports = self._written_exports = 0
        self.every_n_epochs = save.every_n_epochs
        if save.n_epoch_ratio:
            self.every_n_epochs = max(1, (cfg.training.max_epochs or epochs) // save.n_epoch_ratio)

        # whether checkpoints come again and again
        due = [save.checkpoint_every_n_steps, save.checkpoint_every_n_epochs, save.checkpoint_every_n_minutes]
        due += [save.every_n_steps, save.every_n_examples, self.every_n_epochs] if save.state else []
        self._recurs = any(due)

    @property
    def newest(self) -> Path | None:
        """Return the last checkpoint that this session has committed."""
        return self.checkpoints.newest

    @property
    def failed(self) -> int:
        """Count the saves that were not written."""
        return self._failed_exports + self.checkpoints.failed

    @property
    def written(self) -> int:
        """Count those that were, checkpoints and exports."""
        return self._written_exports + self.checkpoints.written

    def before_training(self, at: Position) -> None:
        """Nothing is due before the first step; files and the time are looked at from here on, by one rank."""
        self._due.begin(at.samples_seen)
        if self._ranks.is_logger:
            self._watch = ControlFiles(self._cfg.output_dir, self._cfg.save.checkpoint_every_n_minutes)

    def requested(self) -> int:
        """Return what a file or the time asks for, where this rank looks."""
        return NOTHING if self._watch is None else self._watch.requested()

    def sampled(self) -> None:
        """Take note that samples that a file asked for are about to be drawn."""
        if self._watch is not None:
            self._watch.sampled()

    def after_step(self, at: Position) -> None:
        """Save where a step, a number of examples or an epoch is due; under kohya's names the last epoch is the end's."""
        save, epoch = self._cfg.save, at.epoch_end
        self.checkpoints.finish_pending(wait=False)
        self.checkpoints.reserve(due=self._recurs)
        if self._due(at):
            self._save(at, SaveName("step", at.step), state=save.state)
        if self._state_due(at) and not self.checkpoints.has(at):
            self.checkpoints.write(at, SaveName("step", at.step))
        if not epoch:
            return
        if self.every_n_epochs and epoch % self.every_n_epochs == 0 and (at.steps_left or self._by_step):
            self._save(at, SaveName("epoch", epoch), state=save.state)
        due = save.checkpoint_every_n_epochs and epoch % save.checkpoint_every_n_epochs == 0
        if due and not self.checkpoints.has(at):
            self.checkpoints.write(at, SaveName("epoch", epoch))

    def save_now(self, at: Position, *, export: bool = False, wait: bool = True) -> bool:
        """Write a checkpoint because somebody asked for one, unless this very step has one; return whether there is one.

        export: weights for inference as well. wait: until it is complete, as one in the background is not yet.
        """
        name = SaveName("step", at.step)
        if wait:
            self.checkpoints.finish_pending(wait=True)
        if not self.checkpoints.has(at):
            self.checkpoints.write(at, name, wait=wait)
        if export and self._exported_at != at.step:
            self._save(at, name, state=False)
        return self.checkpoints.has(at)

    def after_training(self, at: Position) -> None:
        """Write what a finished run leaves: the last export, and its checkpoint where asked for; by step, always both."""
        save, epoch = self._cfg.save, at.epoch_end if self._by_step else None
        self.checkpoints.finish_pending(wait=True)
        if not self._by_step:
            if (save.state or save.state_on_train_end) and not (
                self._numbered and self.checkpoints.saved_at == at.step
            ):
                self.checkpoints.write(at, SaveName("end"), must=True)
        elif self.checkpoints.saved_at != at.step:
            self.checkpoints.write(at, SaveName("step", at.step), must=True)
        if self._by_step and self._exported_at == at.step:
            return
        with self._clock.paused("saving"):
            if self._names is DIFFUSERS:
                self.exports.write_pipeline(at.step)
                return
            last = SaveName("epoch", epoch) if epoch else SaveName("step", at.step)
            self.exports.write((last if self._by_step else SaveName("end")).of(self._names), at.step)

    def _save(self, at: Position, save: SaveName, *, state: bool) -> None:
        if state and not (self._numbered and self.checkpoints.has(at)):
            self.checkpoints.write(at, save)
        failed, name = False, save.of(self._names)
        with self._clock.paused("saving"):
            try:
                self.exports.write(name, at.step)
            except OSError as error:  # a full disk: training goes on, what was saved before stays
                log.error("export %s was not written: %s; earlier ones are untouched", name, error)
                self._failed_exports += 1
                failed = True
            if self._ranks.any(failed):
                self._model.averages.snapshots_at = None  # on every rank: storing them is work of all
            else:
                self._exported_at = at.step
                self._written_exports += 1
            with heartbeat(self._ranks, self._claim.owned):
                if self._claim.owned:
                    out, in_use = self._cfg.output_dir, self.exports.uploads.holds
                    checkpoint.retain_exports(out, self._names, self._cfg.save, at.step, log.info, in_use)

    def _time_begins(self) -> None:
        """Count the minutes to the next checkpoint from here."""
        if self._watch is not None:
            self._watch.saved()


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
        notices: Notices | None = None,
    ) -> None:
        """Begin. identity, facts: of the run, for snapshots and for the header of an export, as it is now."""
        self._cfg, self._model, self._ranks, self.uploads = cfg, model, ranks, uploads
        self._identity, self._facts = identity, facts
        self.notices = notices or Notices()
        self.not_finite = ""  # which exported weights are not, in a sentence
        self._last = (-1, "")  # step and name of the last export
        self._is_complete = False  # all of it was written
        self.newest: dict[Path, int] = {}  # what the last export wrote -> bytes, on the rank that writes

    def write(self, name: str, step: int) -> None:
        """Export under a name; every rank takes part in gathering the weights. Raises OSError.

        What was exported after the same step under another name gets a second one, which costs no room.
        """
        of_step, earlier = self._last
        if of_step == step and run_on(self._ranks, self._ranks.is_logger, self._is_there):
            if self._ranks.is_logger:
                self._name_again(earlier, name, step)
            return
        self._last, self._is_complete, self.newest = (step, name), False, {}
        with heartbeat(self._ranks, self._ranks.is_logger):
            all_tried(self._jobs(name, step))
        self._is_complete = True

    def _is_there(self) -> bool:
        return self._is_complete and bool(self.newest) and all(path.exists() for path in self.newest)

    def _name_again(self, earlier: str, name: str, step: int) -> None:
        named = {path: path.with_name(name + path.name.removeprefix(earlier)) for path in self.newest}
        self.newest = {target: self.newest[path] for path, target in named.items()}
        for path, target in named.items():
            second_name(path, target)
            log.info("export %s: the same weights as %s", target.name, path.name)
            self.uploads.add(target, f"{target.name}, step {step}")

    def write_pipeline(self, step: int) -> None:
        """Export into the run's folder itself, the averaged weights where there are some. Every rank takes part."""
        with heartbeat(self._ranks, self._ranks.is_logger):
            engine, ema = self._model.engine, self._model.averages.ema
            if ema is not None:
                self._gather("", engine.full_weights(ema.weights), step)
            else:
                with engine.averaged_weights():
                    self._gather("", engine.full_weights(), step)
            self._model.averages.store_snapshots(self._cfg.output_dir, step, self._ranks, self._identity)

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
        layout, path = layout_of(cfg), cfg.output_dir / name
        by_step, began = isinstance(checkpoint.naming_of(save), Own), time.monotonic()
        at_top = path == cfg.output_dir
        folder = inside(path, last=PIPELINE_INDEX) if at_top else _folder_for(path, by_step and is_one_file(cfg))
        with folder as target:
            written = family.export(
                _watched(weights, broken),
                self._model.parts,
                layout,
                target,
                dtype=dtype,
                metadata={}
                if save.no_metadata
                else family.metadata(name or cfg.output_dir.name, time.time(), self._facts()),
            )
            pieces = sorted(entry.name for entry in target.iterdir()) if at_top else []

        # say what was written, and send it
        path = path if by_step else written
        self.newest[path] = sum(size_of(path / piece) for piece in pieces) if at_top else size_of(path)
        what, size = cfg.output_dir if at_top else written.relative_to(cfg.output_dir), bytes_text(self.newest[path])
        log.info("export %s: %s in %.1f s", what, size, time.monotonic() - began)
        self.notices.send("saved", f"export {path.name}", step=step, export=path.name)
        if broken:
            message = f"{len(broken)} tensors of {path.name} contain non-finite values, such as {broken[0]}"
            log.error(f"%s; a smaller rate, or {option('training.master_weights')}=fp32 with half weights", message)
            self.not_finite = message
        # of a pipeline at the top each part goes by itself, and what names them last
        for piece in sorted(pieces, key=lambda name: name == PIPELINE_INDEX):
            self.uploads.add(path / piece, f"{piece}, step {step}")
        if not at_top:
            self.uploads.add(path, f"{path.name}, step {step}")


def second_name(source: Path, target: Path) -> None:
    """Give an export a second name in one step, in place of what had it. Raises OSError."""
    if source.is_dir():
        with new_folder(target) as aside:
            for path in sorted(source.rglob("*")):
                if path.is_file():
                    link_or_copy(path, aside / path.relative_to(source))
    else:
        aside = aside_of(target)
        try:
            link_or_copy(source, aside)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)  # where the target had this name already, both stay
    fsync_folder(target.parent)


def layout_of(cfg: TrainConfig) -> str:
    """Return the layout of a run's exports: what is asked for, else the family's."""
    return str(cfg.save.model_as or row_of(cfg).defaults.get("save.model_as", "safetensors"))


def is_one_file(cfg: TrainConfig) -> bool:
    """Tell whether an export of a run is one file, not a folder."""
    return as_one_file(cfg) if cfg.adapter.type else layout_of(cfg) in ("safetensors", "ckpt")


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
