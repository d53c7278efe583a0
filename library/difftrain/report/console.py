"""Lines and a progress bar on one console."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


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

    def line(self, text: str) -> None:
        """Print one line."""
        if self._bar is None:
            print(text, file=self._out, flush=True)
        else:
            with self._bar.external_write_mode(file=self._out):
                print(text, file=self._out, flush=True)

    def advance(self, loss: float | None = None) -> None:
        """Move the bar by one step; loss, where it is known on the host, stands beside it."""
        if self._bar is None:
            return
        if loss is not None:
            self._bar.set_postfix_str(f"avr_loss={loss:.4f}", refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Take the bar away, leaving its last state."""
        self._open.close()
        self._bar = None
