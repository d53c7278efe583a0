"""Where a run's words and numbers go: console, metrics.jsonl, trackers, rejected.jsonl. Only the logger rank writes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from difftrain.config import LoggingSection, TrainConfig
from difftrain.config.secrets import redact_text
from difftrain.config.spellings.spelling import option
from difftrain.config.toml import dump
from difftrain.contracts import ConfigFault, Fault, Reject
from difftrain.io.files import text_lines, write_text
from difftrain.report.environment import command, redacted
from difftrain.report.line import StepMetrics
from difftrain.report.metrics import EVALUATION, METRICS, VALIDATION, JsonLines
from difftrain.report.notices import Notices
from difftrain.report.progress import SIGNS, Progress
from difftrain.report.rebuild import rebuild
from difftrain.report.sessions import Sessions
from difftrain.report.trackers.registry import Guarded, open_trackers
from difftrain.train.run_dir import as_submitted
from difftrain.train.run_log import FORM, RunLog, error_text

if TYPE_CHECKING:
    from difftrain.train.state import Run

log = logging.getLogger("difftrain")
REJECTED = "rejected.jsonl"
CONFIG_FILE, DATASET_FILE = "config.toml", "dataset.toml"


def set_up_logging(section: LoggingSection, rank: int) -> None:
    """Send this package's log to standard output, or to --console_log_file; other ranks only warn, under their number.

    Raises: ConfigFault where that file cannot be opened.
    """
    who = "" if rank == 0 else f"[rank {rank}] "
    form = f"{who}%(message)s" if section.console_simple else f"{who}{FORM}"
    if section.console_file:
        path = Path(section.console_file)
        path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")  # two processes never write one file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handler: logging.Handler = logging.FileHandler(path)
        except OSError as error:
            what = f"{path} cannot be written to: {error.strerror}"
            raise ConfigFault([Fault(option("logging.console_file"), what, "choose another file")]) from error
    else:
        handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(section.console_level or "INFO")
    if rank != 0:
        log.setLevel(max(logging.WARNING, log.level))


def write_rejects(out: Path, rejects: Iterable[Reject], *, afresh: bool = False) -> int:
    """Write rejected.jsonl with what indexing turned away; lines of earlier sessions about other items stay.

    afresh: without them. No file where there is nothing to say. Return the number of items.
    """
    path = out / REJECTED
    if afresh:
        path.unlink(missing_ok=True)
    known = _rejected_before(path)
    known |= {reject.path: reject.reason for reject in rejects}
    if not known:
        return 0
    write_text(path, "".join(_reject_line(Reject(*item)) for item in sorted(known.items())))
    return len(known)


def _reject_line(reject: Reject) -> str:
    return json.dumps({"path": reject.path, "reason": reject.reason}, ensure_ascii=False) + "\n"


def _rejected_before(path: Path) -> dict[str, str]:
    """Read what rejected.jsonl names: path -> reason."""
    known: dict[str, str] = {}
    if path.exists():
        for raw in text_lines(path.read_text(encoding="utf-8")):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line may be torn
                line = json.loads(raw)
                known[line["path"]] = line["reason"]
    return known


class Console:
    """Print metric lines to standard output; on a terminal, with a progress bar below them on standard error.

    Where standard error is no terminal (a log file, a pipe) there is no bar, only lines, each flushed at once.
    While the bar stands, what `logging` writes goes above it, too.
    """

    def __init__(self, total: int, done: int = 0, *, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """Open the console. total: steps of the whole run; done: those made by earlier sessions."""
        self._out = out if out is not None else sys.stdout
        bar_to = err if err is not None else sys.stderr
        self._open = contextlib.ExitStack()
        self._bar: tqdm | None = None
        if bar_to.isatty():
            self._bar = self._open.enter_context(
                tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, smoothing=0.05, file=bar_to)
            )
            loggers = [logging.getLogger(), logging.getLogger("difftrain")]  # ours does not propagate
            self._open.enter_context(logging_redirect_tqdm(loggers))

    @property
    def has_bar(self) -> bool:
        """Tell whether a progress bar shows how far the run is."""
        return self._bar is not None

    def line(self, text: str) -> None:
        """Print one line."""
        if self._bar is None:
            print(text, file=self._out, flush=True)
        else:
            with self._bar.external_write_mode(file=self._out):
                print(text, file=self._out, flush=True)

    def advance(self) -> None:
        """Move the bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Take the bar away, leaving its last state."""
        self._open.close()
        self._bar = None


class RunOutputs:
    """Hold the open outputs of a session; silent on every rank but the logger."""

    def __init__(
        self,
        cfg: TrainConfig,
        *,
        is_logger: bool,
        step: int,
        samples_seen: int,
        total_steps: int,
        earlier_s: float,
        facts: dict[str, Any],
        recorded: dict[str, Any],
        run_log: RunLog | None = None,
        notices: Notices | None = None,
    ) -> None:
        """Open. step: where the session begins; lines beyond it are cut. samples_seen: by then.

        recorded: the configuration without secrets. run_log: keeps what is printed in the run's folder.
        """
        self.out = cfg.output_dir
        self._on = is_logger
        self._notices = notices or Notices()
        self._by_examples = cfg.logging.x_axis_examples
        self._x = samples_seen if self._by_examples else step  # where trackers put what is recorded next
        self._trackers: list[Guarded] = []
        self._progress, self._run_log = Progress(total_steps, step), run_log or RunLog()
        if not is_logger:
            return

        # files of the run, cut back to the step
        self.sessions = Sessions(self.out, step=step, earlier_s=earlier_s, **facts)
        self._metrics = JsonLines(self.out / METRICS, step)
        needed = {VALIDATION: cfg.validation.split, EVALUATION: cfg.eval.sets}
        self._evaluations = {file: JsonLines(self.out / file, step) for file, sets in needed.items() if sets}

        # trackers and progress bar go on from there
        self._trackers = open_trackers(
            cfg,
            step=self._x,
            run_id=self.sessions.run_id,
            started=self.sessions.started,
            config=recorded,
            out=self.out,
        )
        self._console = Console(total_steps, step)

        # what was rejected before is not named again
        self._named = set(_rejected_before(self.out / REJECTED))  # paths

    def advance(self, step: int, samples_seen: int) -> None:
        """Move the progress bar; what is recorded from now on belongs to this step."""
        self._x = samples_seen if self._by_examples else step
        self._progress.advance(step)
        if self._on:
            self._console.advance()

    def progress(self) -> str:
        """Say how far the run is, where no progress bar does."""
        return self._progress.text() if self._on and not self._console.has_bar else ""

    def line(self, metrics: StepMetrics) -> None:
        """Print and record the numbers of a step."""
        if not self._on:
            return
        metrics = replace(
            metrics, session=self.sessions.number
        )  # killed sessions counted, which no checkpoint knows of
        self._metrics.write(metrics.record())
        # where lines are all there is, each says how far the run is; what scripts search for follows unchanged
        self._progress.epoch = metrics.epoch
        line = metrics.line()
        whole_line = f"{self._progress.head()} | {line}"
        self._console.line(line if self._console.has_bar else whole_line)
        self._run_log.line(whole_line)
        self._notices.line(metrics)
        SIGNS.heard()
        for tracker in self._trackers:
            tracker.scalars(self._x, metrics.scalars())

    def evaluated(self, file: str, record: dict[str, Any]) -> None:
        """Record what was measured on evaluation sets, in the file of their kind.

        A number of evaluation.jsonl is a tracker's tag, but for step, epoch and samples_seen.
        """
        if not self._on:
            return
        self._evaluations[file].write(record)
        scalars = {tag: value for tag, value in record.items() if isinstance(value, float) and math.isfinite(value)}
        if file == VALIDATION:
            scalars = {"loss/validation": record["loss"]}
        for tracker in self._trackers:
            tracker.scalars(self._x, scalars)

    def picture(self, tag: str, path: Path, prompts: Sequence[str] = ()) -> None:
        """Hand a sample grid to the trackers, and what it was drawn from."""
        for tracker in self._trackers:
            tracker.image(self._x, tag, path, prompts)

    def rejected(self, rejects: list[Reject]) -> None:
        """Name items that turned out bad only during training, each once."""
        if not self._on or not (rejects := [reject for reject in rejects if reject.path not in self._named]):
            return
        self._named |= {reject.path for reject in rejects}
        with (self.out / REJECTED).open("a", encoding="utf-8") as file:
            file.writelines(map(_reject_line, rejects))
        for reject in rejects:
            log.warning("%s: %s; replaced by the next record of its bucket", reject.path, reject.reason)

    def session_ends(self, step: int, session_s: float, outcome: str, error: str = "") -> None:
        """Record how this session ended, and after how long: finished, stopped or failed, and why."""
        if self._on:
            self.sessions.note(step, session_s, outcome, error)

    def print(self, text: str) -> None:
        """Print a line for scripts, as it stands."""
        if self._on:
            self._console.line(text)
            self._run_log.line(redact_text(text))

    def flush(self) -> None:
        """Let trackers hand over what they keep for a while: a checkpoint that is saved has its curves."""
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Close everything."""
        if not self._on:
            return
        self._console.close()
        for file in (self._metrics, *self._evaluations.values()):
            file.close()
        for tracker in self._trackers:
            tracker.close()


# --- all of them, for one session


def keep_dataset_file(run: Run) -> None:
    """Copy the file that named the data sets into the run directory, without secrets."""
    path = run.cfg.data.dataset_config
    if not (run.cfg.save.run_dirs and path):
        return
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:  # what it said is in the configuration too
        log.warning("%s was not copied into the run directory: %s", path, error)
        return
    write_text(run.out / DATASET_FILE, redact_text(text))


@contextlib.contextmanager
def open_outputs(run: Run, run_log: RunLog | None = None) -> Iterator[RunOutputs]:
    """Open console, metrics and trackers; a session that ends by an error is recorded as failed, and so is its report."""
    config = redacted(run.cfg.model_dump(mode="json"))
    if run.ranks.is_logger:
        write_text(run.out / CONFIG_FILE, redact_text(dump(as_submitted(run.cfg))))  # --config takes it
        keep_dataset_file(run)
    outputs = RunOutputs(
        run.cfg,
        is_logger=run.ranks.is_logger,
        step=run.progress.step,
        samples_seen=run.progress.samples_seen,
        total_steps=run.total_steps,
        earlier_s=run.clock.total().e2e_s - run.clock.session().e2e_s,
        facts={
            "command": command(run.argv),
            "world_size": run.ranks.size,
            "planned_steps": run.total_steps,
            "device": run.device.kind,
            # what makes step k the same work: `difftrain compare` needs it of a run that was killed, too
            "global_batch": run.identity["global_batch"],
            "plan_digest": run.plan.digest,
            "data_fingerprint": run.data.index.fingerprint,
        },
        recorded=config,
        run_log=run_log,
        notices=run.notices,
    )
    try:
        yield outputs
    except BaseException as error:
        with contextlib.suppress(OSError):  # the disk may be full; the first error is the one to be seen
            outputs.session_ends(run.progress.step, run.clock.session().e2e_s, "failed", error_text(error))
        if run.ranks.is_logger:
            with contextlib.suppress(Exception):  # as above; of files alone, since the device may be what failed
                rebuild(run.out)
        raise
    finally:
        outputs.close()
