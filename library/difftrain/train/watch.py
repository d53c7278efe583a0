"""What asks for a save besides the configuration and signals: files that a user drops into the run's folder, and time.

Only one rank looks, and all agree on what it has seen, so that they save the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from difftrain.train.signals import EXPORT, NOTHING, QUIT, SAVE

log = logging.getLogger("difftrain")
FILES = {"save_quit": QUIT, "save": EXPORT}
LOOK_S = 0.5  # between two looks: the folder may be far away


class Watch:
    """Look for the files `save` and `save_quit`, and at how long ago the last checkpoint was."""

    def __init__(
        self, folder: Path | None, every_n_minutes: float | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin. folder: where files are looked for; None: nowhere."""
        self._folder = folder
        self._period_s = None if every_n_minutes is None else 60.0 * every_n_minutes
        self._now = now
        self._looked_at = float("-inf")
        self._saved_at = now()
        self._stuck: set[str] = set()

    def saved(self) -> None:
        """Count the time from here: there is a new checkpoint."""
        self._saved_at = self._now()

    def asked(self) -> int:
        """Return what is asked for now; a file that asks is removed."""
        now = self._now()
        found = SAVE if self._period_s is not None and now - self._saved_at >= self._period_s else NOTHING
        if self._folder is None or now - self._looked_at < LOOK_S:
            return found
        self._looked_at = now
        return max([found, *(wish for name, wish in FILES.items() if self._taken(self._folder / name))])

    def _taken(self, path: Path) -> bool:
        """Tell whether a file is there, and take it away."""
        if not path.is_file():
            self._stuck.discard(path.name)
            return False
        if path.name in self._stuck:
            return False
        log.info("%s is there", path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # else each step would save
            self._stuck.add(path.name)
            log.warning("%s cannot be removed (%s): it is heeded this once", path, error.strerror or error)
        return True
