"""What asks for a save or for samples besides the configuration: signals, files that a user drops into the run's folder, time."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

IMPATIENT_S = 5.0
# ordered: over the ranks the largest request wins. Of samples; of a checkpoint, since it is time; of one that is waited for;
# with an export; with one, and to end; and to end
NOTHING, SAMPLE, PERIODIC, SAVE, EXPORT, QUIT, STOP = range(7)


class Requests:
    """Hold what signals have asked of this process since it was last taken."""

    def __init__(self) -> None:
        self._requested = NOTHING
        self._heeded = False
        self.stop_signal = 0
        self._asked_at = 0.0

    def take(self) -> int:
        """Return the largest request so far; a save is asked once, a stop stays."""
        needed = self._requested
        if needed == SAVE:
            self._requested = NOTHING
        return needed

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._requested = max(self._requested, SAVE)
            return
        if not self._heeded:  # nothing is lost yet, or all is saved: nobody waits for a step boundary
            raise SystemExit(128 + number)
        if self._requested == STOP:
            if time.monotonic() - self._asked_at > IMPATIENT_S:
                raise SystemExit(128 + number)
            return
        self._requested, self.stop_signal, self._asked_at = STOP, number, time.monotonic()

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Turn stops into requests while the loop runs, which acts on them; outside, a stop ends the process."""
        self._heeded = True
        try:
            yield
        finally:
            self._heeded = False

    @contextmanager
    def listening(self) -> Iterator[Requests]:
        """Install the handlers, and put the former ones back."""
        numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
        former = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


log = logging.getLogger("difftrain")
FILES = {"save_quit": QUIT, "save": EXPORT, "sample": SAMPLE, "sample_now": SAMPLE}  # sample: until there is the folder
SAMPLES = "sample"  # the folder of samples, once there are some
LOOK_S = 0.5  # between two looks: the folder may be far away


class ControlFiles:
    """Look for the files `save`, `save_quit` and `sample`, and at how long ago the last checkpoint was."""

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
        self._touched_at: int | None = None  # when the folder of samples was last changed
        self._samples_asked = False  # until all ranks have heard of it: a larger request may come first

    def saved(self) -> None:
        """Count the time from here: there is a new checkpoint."""
        self._saved_at = self._now()

    def sampled(self) -> None:
        """Take note that the samples that were asked for are drawn."""
        self._samples_asked = False

    def requested(self) -> int:
        """Return what is asked for now; a file that asks is removed."""
        now = self._now()
        due = self._period_s is not None and now - self._saved_at >= self._period_s
        wishes = [PERIODIC] if due else []
        if self._folder is not None and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            wishes += [wish for name, wish in FILES.items() if self._taken(self._folder / name)]
            wishes += [SAMPLE] if self._was_touched(self._folder / SAMPLES) else []
        self._samples_asked |= SAMPLE in wishes
        return max([NOTHING, *wishes, *([SAMPLE] if self._samples_asked else [])])

    def _was_touched(self, folder: Path) -> bool:
        """Tell whether somebody has touched the folder of samples, which has the name of the file that asks for some.

        `touch` sets both times of a folder to the same moment; a new file in it sets only the one of its last change.
        """
        try:
            times = folder.stat()
        except OSError:
            self._touched_at = None
            return False
        before, self._touched_at = self._touched_at, times.st_mtime_ns
        is_new = before is not None and before != times.st_mtime_ns
        if not (is_new and folder.is_dir() and times.st_atime_ns == times.st_mtime_ns):
            return False
        log.info("%s was touched", folder)
        return True

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
            log.warning("%s cannot be removed (%s): it is obeyed only once", path, error.strerror or error)
        return True
