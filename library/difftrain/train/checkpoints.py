"""Checkpoints of a run: all that an exact resume needs, written at once, or by a thread while training goes on.

In the background the way of one is:
 1. all of it is copied between two steps, into memory that the next one uses again: so one is on its way at a time
 2. a thread writes, flushes and commits the copies, and removes what they replace; what it says to the threads of other
    ranks goes through a group of its own
 3. between steps the ranks vote whether all of them have done so; then it counts, and is told of
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from difftrain import checkpoint
from difftrain.cache.request import bytes_text
from difftrain.checkpoint import Claim, Own, SaveName
from difftrain.config import TrainConfig
from difftrain.distributed.collective import heartbeat, run_on
from difftrain.distributed.ranks import RankLost, lost
from difftrain.engine.snapshot import HostBuffers
from difftrain.io.files import link_or_copy
from difftrain.report.notices import Notices
from difftrain.train.meter import Meter, checkpoint_bytes
from difftrain.train.run_dir import how_to_go_on
from difftrain.train.state import PROGRESS_FILE, Position, TrainedModel, TrainProgress

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks
    from difftrain.hub.uploads import Uploads
    from difftrain.report.clock import Clock

log = logging.getLogger("difftrain")
CLOCK_FILE = "clock.json"
VOTE_S = 1.0  # between two votes on whether all ranks have written
T = TypeVar("T")


class Background(Generic[T]):
    """Run an action in a thread that does not outlive the process; hold what came of it.

    No collective of the training's groups may be called from two threads: it takes those of Ranks.beside().
    """

    def __init__(self, action: Callable[[], T], name: str) -> None:
        self._action, self._ended = action, threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._began, self.seconds = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ended(self, wait_s: float | None = 0.0) -> bool:
        """Tell whether it is done, now or within some seconds; None: wait for as long as it takes."""
        return self._ended.wait(wait_s)

    def result(self) -> T:
        """Return what the action returned, or raise what it raised; once it has ended."""
        assert self._ended.is_set(), "it is still going on"
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._action()
        except BaseException as error:  # of any kind: raised where the result is taken
            self._error = error
        self.seconds = time.monotonic() - self._began
        self._ended.set()


@dataclass
class _Pending:
    """A checkpoint on its way: what is said of it once it is complete. work: writes it, where that is in the background."""

    name: str
    step: int
    began: float
    same: str  # the checkpoint whose files it shares
    work: Any = None
    stalled_s: float = 0.0  # for as long training stood still
    lines: list[str] = field(default_factory=list)  # what was removed for it
    fault: Exception | None = None  # of that


class Checkpoints:
    """Write the checkpoints of a run, and know the newest."""

    def __init__(
        self,
        cfg: TrainConfig,
        model: TrainedModel,
        ranks: Ranks,
        clock: Clock,
        claim: Claim,
        meter: Meter,
        uploads: Uploads,
        notices: Notices,
        meta: Callable[[str], dict[str, object]],
        begins: Callable[[], None],
    ) -> None:
        """Begin. As Saving; begins: is called where one begins, and where one that training waits for has ended."""
        self._cfg, self._model, self._ranks, self._clock = cfg, model, ranks, clock
        self._claim, self._meter, self._meta, self._begins = claim, meter, meta, begins
        self._uploads, self._notices = uploads, notices
        self._names = checkpoint.naming_of(cfg.save)

        # what was done
        self.saved_at = -1  # the step of the last checkpoint that this session has committed
        self.newest: Path | None = None  # and itself
        self.written = self.failed = 0
        self._size = 0  # of the newest, in bytes, on this rank's disk

        # in the background: the ranks as a thread meets them, the checkpoint that it writes, memory of its copies
        self._beside = ranks.beside() if cfg.save.asynchronous else None
        self._pending: _Pending | None = None
        self._buffers = HostBuffers()
        self._reserved: Background[None] | None = None

    def has(self, at: Position) -> bool:
        """Tell whether this very step has a checkpoint, or one that is being written."""
        return self.saved_at == at.step or (self._pending is not None and self._pending.step == at.step)

    def write(self, at: Position, save: SaveName, *, must: bool = False, wait: bool = False) -> None:
        """Save a checkpoint; a failure stops the run only where nothing later can make up for it.

        In the background where the run saves so, unless it must succeed or somebody waits for it.
        """
        name = (SaveName("step", at.step) if isinstance(self._names, Own) else save).of(self._names, state=True)
        background = self._beside is not None and not (must or wait)
        with self._clock.paused("saving"):
            # --- one at a time: the memory of its copies is used again
            self._claim.check()
            progress = self._meter.update_progress()
            if (earlier := self._pending) is not None:
                began = time.monotonic()
                self.finish_pending(wait=True)
                if self._ranks.is_logger:
                    waited = time.monotonic() - began
                    log.info("checkpoint %s waited %.1f s until %s was written", name, waited, earlier.name)

            # --- what is written; of a step that has a checkpoint, its files once more
            began = time.monotonic()
            same = self._same_step(at)
            self._announce(name)
            write, meta = self._contents(progress, same, copied=background), self._meta(save.kind)
            self._begins()  # also where it fails: else each step would try
            pending = _Pending(name, at.step, began, same.name if same else "")

            # --- written while training goes on, or now
            if background:
                pending.work = Background(partial(self._commit, pending, write, meta), f"checkpoint {name}")
                pending.stalled_s = time.monotonic() - began
                self._pending = pending
                return
            try:
                path = checkpoint.commit(self._cfg.output_dir, name, write, self._ranks, meta)
            except checkpoint.SaveFault as error:
                self._failed(name, error, must=must)
                return
            self._begins()
            self._committed(pending, path)
            with heartbeat(self._ranks, self._claim.owned):
                if self._claim.owned:
                    self._retain(at.step, log.info)

    def _contents(self, progress: TrainProgress, same: Path | None, *, copied: bool) -> Callable[[Path], list[Path]]:
        """Return what writes this rank's part, and the run's own: weights and states as they are now.

        same: a checkpoint of this very step, whose files get second names. copied: of averages, counters and times, too, what
        is written later is what they are now.
        """
        averages, buffers = self._model.averages, self._buffers if copied else None
        if self._reserved is not None and self._reserved.ended(None):
            self._reserved.result()
        snapshot = None if same else self._model.engine.snapshot()
        write_averages = None if same else averages.snapshot(buffers)
        counters = deepcopy(progress) if copied else progress
        times = self._clock.state() if copied else None

        def write(folder: Path) -> list[Path]:
            files = snapshot.write(folder) if snapshot is not None else []
            files += write_averages(folder) if write_averages is not None else []
            if self._ranks.is_logger:
                files += second_names(same, folder) if same is not None else []
                files.append(counters.write(folder))
                files.append(folder / CLOCK_FILE)
                files[-1].write_text(json.dumps(times or self._clock.state()))
            return files

        return write

    def _commit(self, pending: _Pending, write: Callable[[Path], list[Path]], meta: dict[str, object]) -> Path:
        """Write and commit in a thread, by groups of its own; then remove what it replaces, since that is read for it."""
        out, ranks = self._cfg.output_dir, self._beside
        assert ranks is not None
        path = checkpoint.commit(out, pending.name, write, ranks, meta)
        try:
            if self._claim.owned:
                self._retain(pending.step, pending.lines.append)
        except Exception as error:  # the checkpoint is there, on all ranks
            pending.fault = error
        return path

    def finish_pending(self, *, wait: bool) -> None:
        """Take note of the checkpoint in the background once all ranks have written it. Every rank calls it, between steps.

        Waiting is a vote every second, in which a rank that is lost is missed, while a slow disk may take its time.
        """
        pending = self._pending
        if pending is None or (not wait and self._ranks.any(not pending.work.ended())):
            return
        with self._clock.paused("saving"):
            began = time.monotonic()
            while self._ranks.any(not pending.work.ended(VOTE_S)):
                pass
            self._pending = None
            try:
                path = pending.work.result()
            except checkpoint.SaveFault as error:
                self._failed(pending.name, error)
                return
            pending.stalled_s += time.monotonic() - began
            self._committed(pending, path)
            if pending.fault is not None:
                raise pending.fault

    def _failed(self, name: str, error: checkpoint.SaveFault, *, must: bool = False) -> None:
        """Say that a checkpoint was not written; where it must be, end the run. Every rank calls it."""
        if must:
            how = f"fix that, then {how_to_go_on(self._cfg.save)} from the newest complete one"
            raise checkpoint.SaveFault(f"checkpoint {name} was not written: {error}; {how}") from error
        log.error("checkpoint %s was not written: %s; earlier ones are untouched", name, error)
        self._begins()
        self.failed += 1

    def _committed(self, pending: _Pending, path: Path) -> None:
        """Count a checkpoint that is complete, tell of it, and send it. Every rank calls it."""
        self.saved_at, self.newest = pending.step, path
        self.written += 1
        if self._ranks.is_logger:
            self._tell(pending, path)
        if self._cfg.hub.save_state:
            self._send(path, pending.step)

    def _tell(self, pending: _Pending, path: Path) -> None:
        self._size = sum(entry.size for entry in checkpoint.Manifest.read(path).files.values())
        work = pending.work
        log.info(
            "checkpoint %s at step %d: %s in %.1f s%s%s",
            path.name,
            pending.step,
            bytes_text(self._size),
            work.seconds if work else time.monotonic() - pending.began,
            f" in the background, training waited {pending.stalled_s:.2f} s" if work else "",
            f", sharing the files of {pending.same}" if pending.same else "",
        )
        for line in pending.lines:
            log.info("%s", line)
        self._notices.send("saved", f"checkpoint {path.name}", step=pending.step, checkpoint=path.name)

    @contextlib.contextmanager
    def kept_on_errors(self) -> Iterator[None]:
        """Where an error ends the run inside, wait for the checkpoint in the background; not where a rank is lost.

        Nobody votes any more. The other ranks' threads go on while theirs wait for this one, so that it is committed.
        """
        try:
            yield
        except Exception as error:
            if (pending := self._pending) is not None and not isinstance(error, RankLost) and not lost(error):
                log.info("waiting for checkpoint %s, which is being written", pending.name)
                pending.work.ended(None)
                self._pending = None
                try:
                    path = pending.work.result()
                    if self._ranks.is_logger:
                        self._tell(pending, path)
                except checkpoint.SaveFault as fault:
                    log.error("checkpoint %s was not written: %s; earlier ones are untouched", pending.name, fault)
            raise

    def reserve(self, *, due: bool) -> None:
        """Take the memory of copies behind the first step, where checkpoints will be due; a thread touches it."""
        if not due or self._beside is None or self._reserved is not None:
            return
        with self._clock.paused("saving"):
            touch = self._model.engine.reserve_snapshot()
            with self._buffers.reserving():
                self._model.averages.snapshot(self._buffers)

            def touch_all() -> None:
                touch()
                self._buffers.touch()

            self._reserved = Background(touch_all, "memory of checkpoints")

    def _announce(self, name: str) -> None:
        """Say what is about to be written, since a large one takes minutes."""
        if self._ranks.is_logger:
            about = self._size or checkpoint_bytes(self._model)
            log.info("saving checkpoint %s%s", name, f", about {bytes_text(about)}" if about else "")

    def _same_step(self, at: Position) -> Path | None:
        """Return the checkpoint that this session has of this very step, where one disk holds all of it. Every rank calls it."""
        newest = self.newest
        if newest is None or self.saved_at != at.step:
            return None

        def lends() -> bool:
            try:
                manifest = checkpoint.verify(newest, deep=False)
            except checkpoint.Torn:
                return False
            return manifest.step == at.step and not manifest.spread

        return newest if run_on(self._ranks, self._ranks.is_logger, lends) else None

    def _retain(self, step: int, log: Callable[[str], None]) -> None:
        """Remove what the flags do not keep, on the rank that owns the folder; what is kept is verified first."""
        save, in_use = self._cfg.save, self._uploads.holds
        checkpoint.retain_states(self._cfg.output_dir, self._names, save, step, log, in_use)

    def _send(self, path: Path, step: int) -> None:
        """Send a checkpoint to the hub where all of it lies on this machine."""
        with heartbeat(self._ranks, self._ranks.is_logger):
            if not self._ranks.is_logger:
                return
            if checkpoint.Manifest.read(path).spread:
                log.warning("%s is not uploaded to the hub: its parts are on the disks of several machines", path.name)
            else:
                self._uploads.add(path, f"{path.name}, step {step}")


def second_names(checkpoint_dir: Path, folder: Path) -> list[Path]:
    """Give the files of a checkpoint second names in a folder, but for those that count time; return them. Raises OSError."""
    names = checkpoint.Manifest.read(checkpoint_dir).files.keys() - {CLOCK_FILE, PROGRESS_FILE}
    for name in sorted(names):
        link_or_copy(checkpoint_dir / name, folder / name)
    return [folder / name for name in sorted(names)]
