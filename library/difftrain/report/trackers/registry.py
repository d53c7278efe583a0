"""The interface of trackers, the registry of their names, and how a run opens those that it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from difftrain.config.document import text_of, toml_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.io.files import DISK_ERRORS

if TYPE_CHECKING:
    from difftrain.config import TrainConfig

log = logging.getLogger("difftrain")

# name, as in {logging.log_with} -> "module:class"; the package that it needs has the same name
TRACKERS: dict[str, str] = {
    "tensorboard": "difftrain.report.trackers.tensorboard:TensorBoard",
    "wandb": "difftrain.report.trackers.wandb:WandB",
    "swanlab": "difftrain.report.trackers.swanlab:SwanLab",
    "mlflow": "difftrain.report.trackers.mlflow:MLflow",
}
ALL = ("tensorboard", "wandb")  # kohya's meaning of "all"
DEFAULT_NAME = "finetuning"  # kohya's, so that boards over old and new runs line up
BOARDS = "tensorboard_logs"  # of a run directory


@dataclass(frozen=True)
class TrackerRequest:
    """What a tracker is opened with.

    folder: for its own files. project, run_name: as they are shown; no run_name: the tracker's own. run_id: of the run over
    all its sessions. step: where this session begins; points beyond it are made again. config: to be recorded, without
    secrets; None: not to be. options: the tracker's table of {logging.tracker_config}, which counts above the rest.
    """

    folder: Path
    project: str
    run_id: str
    run_name: str | None = None
    step: int = 0
    config: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Take numbers and pictures of a step. A class of the registry is made with a TrackerRequest."""

    def scalars(self, step: int, values: dict[str, float]) -> None: ...
    def image(self, step: int, tag: str, path: Path, prompts: Sequence[str] = ()) -> None: ...
    def close(self) -> None: ...


class Guarded:
    """Keep training from what goes wrong in a tracker: the first error is said, and it gets nothing more.

    A full disk is the run's business, too, and passes.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.tracker = tracker
        self._name, self._failed = name, False

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each curve."""
        self._try(lambda: self.tracker.scalars(step, values))

    def image(self, step: int, tag: str, path: Path, prompts: Sequence[str] = ()) -> None:
        """Add a picture, and what it was drawn from."""
        self._try(lambda: self.tracker.image(step, tag, path, prompts))

    def flush(self) -> None:
        """Hand over what a tracker keeps for a while, where it does."""
        if (flush := getattr(self.tracker, "flush", None)) is not None:
            self._try(flush)

    def close(self) -> None:
        """Send what is left."""
        self._try(self.tracker.close)

    def _try(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as error:  # of any kind: these are other people's programs
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            self._failed = True
            why = (str(error) or type(error).__name__).splitlines()[0]
            log.warning("%s: %s; it receives nothing more from this run; metrics.jsonl has everything", self._name, why)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted names."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


def tracker_options(file: str | None, tracker: str) -> dict[str, Any]:
    """Read --log_tracker_config: a TOML file with a table per tracker, as accelerate takes them."""
    if file is None:
        return {}
    try:
        tables = toml_of(text_of(Path(file)))
    except (OSError, ValueError) as error:
        raise ConfigFault([Fault(option("logging.tracker_config"), f"cannot read {file}: {error}")]) from error
    return dict(tables.get(tracker, {}))


def tracker_class(name: str) -> Callable[[TrackerRequest], Tracker]:
    """Return the class of a tracker; its package is imported when it is made."""
    module, _, attribute = TRACKERS[name].partition(":")
    make_tracker: Callable[[TrackerRequest], Tracker] = getattr(import_module(module), attribute)
    return make_tracker


def open_trackers(
    cfg: TrainConfig, *, step: int, run_id: str, started: str, config: dict[str, Any], out: Path
) -> list[Guarded]:
    """Open the trackers that the configuration asks for.

    With a logging_dir and no log_with: TensorBoard, as at kohya's; in a run directory always, in tensorboard_logs of
    it, unless another folder is given. started names the folder and is the first session's start, so that a resumed run
    goes on in its own curves. config: resolved and without secrets; TensorBoard, whose files stay here, has it always, the
    others where --log_config is given. Raises ConfigFault where the folder cannot be written to.
    """
    section = cfg.logging
    own = cfg.save.run_dirs and not section.logging_dir
    folder = Path(section.logging_dir or out / "logs") / f"{section.log_prefix or ''}{started}"
    project = section.tracker_name or DEFAULT_NAME

    # --- which
    chosen = list(ALL) if section.log_with == "all" else [section.log_with] if section.log_with else []
    if (own or (section.logging_dir and not chosen)) and "tensorboard" not in chosen:
        chosen.insert(0, "tensorboard")

    # --- each with what it needs
    opened: list[Guarded] = []
    try:
        for name in chosen:
            is_board = name == "tensorboard"
            request = TrackerRequest(
                folder=(out / BOARDS if own else folder / project) if is_board else folder,
                project=project,
                run_id=run_id,
                run_name=section.wandb_run_name,
                step=step,
                config=config if is_board or section.log_config else None,
                options=tracker_options(section.tracker_config, name),
            )
            opened.append(Guarded(name, tracker_class(name)(request)))
    except OSError as error:
        what = f"{folder} cannot be written to: {error.strerror or error}"
        raise ConfigFault([Fault(option("logging.logging_dir"), what, "choose another folder")]) from error
    return opened
