"""SwanLab: online where a key is known, else an offline run that is sent later."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftrain.report.trackers.registry import TrackerRequest

log = logging.getLogger("difftrain")
KEY, MODE = "SWANLAB_API_KEY", "SWANLAB_MODE"
_LOGINS = (Path(".swanlab/.netrc"), Path.home() / ".swanlab" / ".netrc")  # what `swanlab login` writes


class SwanLab:
    """Log to SwanLab; where it cannot be reached or no key is known, into an offline run, and say so."""

    def __init__(self, request: TrackerRequest) -> None:
        """Open. options: of swanlab.init (workspace, project, ...). A resumed run continues under its id, online."""
        import swanlab

        self._swanlab = swanlab
        request.folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "log_dir": str(request.folder),
            "project": request.project,
            "name": request.run_name,
            "config": request.config,
            **request.options,
        }
        self._run = self._begin(options, {"id": request.run_id, "resume": "allow"})

    def _begin(self, options: dict[str, Any], resumed: dict[str, Any]) -> Any:
        if os.environ.get(MODE) or "mode" in options:
            is_online = (options.get("mode") or os.environ.get(MODE)) in ("online", "cloud")
            return self._swanlab.init(**({**resumed, **options} if is_online else options))
        if not os.environ.get(KEY) and not any(path.is_file() for path in _LOGINS):
            # asked for a key, it would wait for an answer on the terminal
            log.warning(
                "swanlab: no key found (%s or `swanlab login`); logging offline, `swanlab sync` sends it later", KEY
            )
            return self._swanlab.init(mode="offline", **options)
        try:
            return self._swanlab.init(mode="online", **{**resumed, **options})
        except Exception as error:  # it has no class of its own for a service that is away
            why = (str(error) or type(error).__name__).splitlines()[0]
            log.warning("swanlab: %s; logging offline, `swanlab sync` sends it later", why)
            return self._swanlab.init(mode="offline", reinit=True, **options)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each curve."""
        self._run.log(values, step=step)

    def image(self, step: int, tag: str, path: Path, prompts: Sequence[str] = ()) -> None:
        """Add a picture with its prompts below."""
        self._run.log({tag: self._swanlab.Image(str(path), caption="\n".join(prompts) or None)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
