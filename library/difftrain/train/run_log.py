"""console.log: what the first rank says, kept in the run's folder, session after session."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from difftrain.config.secrets import redact_text
from difftrain.contracts import DifftrainError
from difftrain.report.progress import SIGNS

CONSOLE_LOG = "console.log"
FORM = "%(asctime)s %(levelname)-7s %(message)s"
log = logging.getLogger("difftrain")
MOST_EARLY = 1000  # lines that are kept until the folder is known


class RunLog(logging.Handler):
    """Keep the lines of a session; those that come before the run's folder is known and claimed wait for it.

    A disk that takes no more ends it with a warning, not the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORM, datefmt="%H:%M:%S"))
        self._early: list[str] = []
        self._file: TextIO | None = None
        self._ended = False

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message of the log."""
        SIGNS.heard()
        self.line(redact_text(self.format(record)))

    def line(self, text: str) -> None:
        """Take a line in which no secret can be: that of a step has numbers alone, and a search would cost it a fifth."""
        if self._file is None:
            if not self._ended and len(self._early) < MOST_EARLY:
                self._early.append(text)
            return
        try:
            self._file.write(f"{text}\n")
            self._file.flush()
        except OSError as error:
            self._end()
            log.warning("%s ends here: %s", CONSOLE_LOG, error.strerror or error)

    @contextmanager
    def kept_in(self, folder: Path, command: str) -> Iterator[None]:
        """Append to the folder's console.log; the error that ends the session is its last line.

        A session that is refused before there is a run leaves no file.
        """
        path = folder / CONSOLE_LOG
        is_new = not path.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            log.warning("%s is not written: %s", path, error.strerror or error)
            self._ended = True
        early, self._early = self._early, []
        for text in (f"--- {time.strftime('%Y-%m-%d %H:%M:%S %z')}  {redact_text(command)}", *early):
            self.line(text)
        refused = False
        try:
            yield
        except BaseException as error:
            refused = isinstance(error, DifftrainError) and not (folder / "run.json").exists()
            self.line(f"{time.strftime('%H:%M:%S')} ERROR   {error_text(error)}")
            raise
        finally:
            self._end()
            if refused and is_new:
                path.unlink(missing_ok=True)

    def _end(self) -> None:
        self._ended = True
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:  # what is in the buffer cannot be kept
                return


def error_text(error: BaseException) -> str:
    """Return an error as a person reads it, secrets hidden: a bug of ours, or of a library, under its name."""
    if isinstance(error, DifftrainError):
        return redact_text(str(error))
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0
        return f"ended by signal {code - 128}" if code > 128 else f"ended with exit code {error.code}"
    return redact_text(f"{type(error).__name__}: {error}")


@contextmanager
def logged(is_logger: bool) -> Iterator[RunLog]:
    """Keep what the logger rank says for the run's folder, and let it say where nothing is said for long what it does."""
    run_log = RunLog()
    if not is_logger:
        yield run_log
        return
    log.addHandler(run_log)
    try:
        with SIGNS.printed_by(log.info):
            yield run_log
    finally:
        log.removeHandler(run_log)
