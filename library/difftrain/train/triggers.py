"""What asks for a save or for samples besides the configuration: signals, files that a user drops into the run's folder, time."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

log = logging.getLogger("difftrain")
IMPATIENT_S = 5.0
LOOK_S = 0.5  # between two looks at files: the folder may be far away
PREEMPTED = 75  # exit code of a run that a notice file ended: EX_TEMPFAIL of sysexits.h, "try again later"
# ordered: over the ranks the largest request wins. Of samples; of a checkpoint, since it is time; of one that is waited for;
# with an export; with one, and to end; and to end
NOTHING, SAMPLE, PERIODIC, SAVE, EXPORT, QUIT, STOP = range(7)


class NoticeFile:
    """Look whether the file is there by which a cloud's or a scheduler's agent announces the end of this machine.

    One that was there before the run began is of an earlier end: it counts once it is written anew.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._now = path, now
        self._looked_at, self._has_come = float("-inf"), False
        self._before = self._state()
        if self._before is not None:
            log.warning("%s was there before this run began: it counts as a notice once it is written anew", path)

    def has_come(self) -> bool:
        """Tell whether the notice is there; once it has come, that stays."""
        if self._has_come or self._now() - self._looked_at < LOOK_S:
            return self._has_come
        self._looked_at = self._now()
        state = self._state()
        self._has_come = state is not None and state != self._before
        if state is None:
            self._before = None  # it was taken away: the next one is new, whatever its times
        if self._has_come:
            log.warning("%s is there: this machine is about to be taken away", self._path)
        return self._has_come

    def _state(self) -> tuple[int, ...] | None:
        """Return what changes when a file is written anew, even with the same content; None where there is none."""
        try:
            status = self._path.stat()
        except OSError:  # a disk that does not answer for a moment announces nothing
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


class Requests:
    """Hold what signals, and the notice file, have asked of this process since it was last taken."""

    def __init__(self, notice: NoticeFile | None = None) -> None:
        self._notice = notice
        self._requested = NOTHING
        self._heeded = False
        self.stop_signal = 0
        self._asked_at = 0.0

    @property
    def exit_code(self) -> int:
        """Return how a process ends that was asked to stop: 128 + signal, or PREEMPTED; 0 where nobody asked it."""
        if self.stop_signal:
            return 128 + self.stop_signal
        return PREEMPTED if self._requested == STOP else 0

    def take(self) -> int:
        """Return the largest request so far; a save is asked once, a stop stays."""
        if self._requested < STOP and self._notice is not None and self._notice.has_come():
            self._requested, self._asked_at = STOP, time.monotonic()
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
        if self._requested == STOP and self.stop_signal:
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


FILES = {"save_quit": QUIT, "save": EXPORT, "sample": SAMPLE, "sample_now": SAMPLE}  # sample: until there is the folder
SAMPLES = "sample"  # the folder of samples, once there are some


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
