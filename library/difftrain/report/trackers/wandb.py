"""Weights & Biases: online where it can be reached with a key, else an offline run that is sent later."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftrain.report.trackers.registry import TrackerRequest

log = logging.getLogger("difftrain")
ONLINE_TIMEOUT_S = 20.0


class WandB:
    """Log to Weights & Biases; where it cannot be reached or no key is known, into an offline run, and say so."""

    def __init__(self, request: TrackerRequest) -> None:
        """Open. options: of wandb.init (project, name, ...). A resumed run continues under its id."""
        import wandb

        self._wandb = wandb
        request.folder.mkdir(parents=True, exist_ok=True)
        options = {"project": request.project, **request.options}
        if request.run_name:
            options["name"] = request.run_name
        fixed = {"dir": str(request.folder), "id": request.run_id, "resume": "allow", "config": request.config}
        self._run = self._begin({**fixed, **options})

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

    def image(self, step: int, tag: str, path: Path, prompts: Sequence[str] = ()) -> None:
        """Add a picture with its prompts below."""
        caption = "\n".join(prompts) or None
        self._run.log({tag: self._wandb.Image(str(path), caption=caption)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
