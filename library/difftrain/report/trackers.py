"""TensorBoard and Weights & Biases: one small face for both, each imported only where it is asked for."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault

if TYPE_CHECKING:
    from difftrain.config import TrainConfig

log = logging.getLogger("difftrain")

DEFAULT_NAME = "finetuning"  # kohya's, so that boards over old and new runs line up
ONLINE_TIMEOUT_S = 20.0
BOARDS = "tensorboard_logs"  # of a run directory


class Tracker(Protocol):
    """Take numbers and pictures of a step."""

    def scalars(self, step: int, values: dict[str, float]) -> None: ...
    def image(self, step: int, tag: str, path: Path) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Write event files into logging_dir/<prefix><time>/<name>, the folders that kohya's trainers make."""

    def __init__(self, folder: Path, step: int, config: dict[str, Any] | None) -> None:
        """Open. step: points beyond it, of a session that was killed, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        if config is not None:
            self._writer.add_text("config", "\n".join(f"    {k} = {v!r}" for k, v in flat(config).items()))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each curve."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def image(self, step: int, tag: str, path: Path) -> None:
        """Add a picture."""
        import numpy as np
        from PIL import Image

        with Image.open(path) as picture:
            self._writer.add_image(tag, np.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        """Write what is buffered and close."""
        self._writer.close()


class WandB:
    """Log to Weights & Biases; where it cannot be reached or no key is known, into an offline run, and say so."""

    def __init__(self, folder: Path, run_id: str, config: dict[str, Any] | None, options: dict[str, Any]) -> None:
        """Open. options: of wandb.init (project, name, ...). A resumed run continues under its id."""
        import wandb

        self._wandb = wandb
        folder.mkdir(parents=True, exist_ok=True)
        options = {"dir": str(folder), "id": run_id, "resume": "allow", "config": config, **options}
        self._run = self._begin(options)

    def _begin(self, options: dict[str, Any]) -> Any:
        if os.environ.get("WANDB_MODE") or "mode" in options:
            return self._wandb.init(**options)
        if not self._wandb.api.api_key:
            log.warning(
                "wandb: no key found (WANDB_API_KEY or `wandb login`); logging offline, `wandb sync` sends it later"
            )
            return self._wandb.init(mode="offline", **options)
        try:
            return self._wandb.init(settings=self._wandb.Settings(init_timeout=ONLINE_TIMEOUT_S), **options)
        except self._wandb.errors.Error as error:
            log.warning("wandb: %s; logging offline, `wandb sync` sends it later", error)
            self._wandb.teardown()  # its service still holds the id of the run that could not begin
            return self._wandb.init(mode="offline", **options)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each curve."""
        self._run.log(values, step=step)

    def image(self, step: int, tag: str, path: Path) -> None:
        """Add a picture."""
        self._run.log({tag: self._wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


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
        tables = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigFault([Fault(option("logging.tracker_config"), f"cannot read {file}: {error}")]) from error
    return dict(tables.get(tracker, {}))


def open_trackers(
    cfg: TrainConfig, *, step: int, run_id: str, started: str, config: dict[str, Any], out: Path
) -> list[Tracker]:
    """Open the trackers that the configuration asks for.

    With a logging_dir and no log_with: TensorBoard, as at kohya's; in a run directory always, in tensorboard_logs of
    it, unless another folder is given. started names the folder and is the first session's
    start, so that a resumed run goes on in its own curves. config: resolved and without secrets; recorded where
    --log_config is given. Raises ConfigFault where the folder cannot be written to.
    """
    section = cfg.logging
    own = cfg.save.run_dirs and not section.logging_dir
    wanted = section.log_with or ("tensorboard" if section.logging_dir or own else None)
    if own and wanted == "wandb":
        wanted = "all"
    folder = Path(section.logging_dir or out / "logs") / f"{section.log_prefix or ''}{started}"
    recorded = config if section.log_config else None
    name = section.tracker_name or DEFAULT_NAME

    def board() -> Tracker:
        return TensorBoard(out / BOARDS if own else folder / name, step, recorded)

    def wandb() -> Tracker:
        options: dict[str, Any] = {"project": name} | tracker_options(section.tracker_config, "wandb")
        if section.wandb_run_name:
            options["name"] = section.wandb_run_name
        return WandB(folder, run_id, recorded, options)

    makers: dict[str | None, list[Callable[[], Tracker]]] = {
        "tensorboard": [board],
        "wandb": [wandb],
        "all": [board, wandb],
        None: [],
    }
    try:
        return [make() for make in makers[wanted]]
    except OSError as error:
        what = f"{folder} cannot be written to: {error.strerror or error}"
        raise ConfigFault([Fault(option("logging.logging_dir"), what, "choose another folder")]) from error
