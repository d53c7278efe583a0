"""The report of a run while it goes on: after every save and every few minutes, and never for more than a share of the time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from difftrain.train.state import Position

if TYPE_CHECKING:
    from difftrain.report.clock import Clock
    from difftrain.train.saving import Saving

log = logging.getLogger("difftrain")
FIRST_S = 30.0  # the first page of a session
EVERY_S = 180.0
SHARE = 0.003  # of the time, so that 0.5 % are not reached where a page takes longer than the one before


class Reporting:
    """Write the report on one rank, between steps. A report that cannot be written stops no run."""

    def __init__(
        self, write: Callable[[], None], saving: Saving, clock: Clock, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin. write: writes the report. saving: counts the saves after which one is due."""
        self._write, self._saving, self._clock, self._now = write, saving, clock, now
        self._reported, self._saves = now(), 0  # when, and how many saves there were
        self._period_s, self._cost_s = FIRST_S, 0.0
        self._is_broken = False

    def before_training(self, at: Position) -> None:
        """Count the time from here."""
        self._reported, self._saves = self._now(), self._saving.written

    def after_step(self, at: Position) -> None:
        """Write where a save or the time asks for it, and the last report is long enough ago; the end writes its own."""
        elapsed = self._now() - self._reported
        is_due = self._saving.written != self._saves or elapsed >= self._period_s
        if not at.steps_left or not is_due or SHARE * elapsed < self._cost_s:
            return
        began, self._saves = self._now(), self._saving.written
        with self._clock.paused("report"):
            try:
                self._write()
                self._is_broken = False
            except Exception as error:  # a full disk, or a fault in a page: days of training are worth more
                if not self._is_broken:
                    log.warning("the report was not written: %s: %s", type(error).__name__, error)
                self._is_broken = True
        self._reported, self._period_s = self._now(), EVERY_S
        self._cost_s = self._reported - began
