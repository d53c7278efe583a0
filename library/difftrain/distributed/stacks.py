"""Where a process is: its Python stacks, and in one line where its main thread stands.

Of a job that hangs every rank prints its stacks, so that the one that keeps the others waiting is seen, and where.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
OWN = str(Path(__file__).resolve().parent) + os.sep  # where ranks wait for one another: who called that is of interest
MOST_THREADS = 20
Location = tuple[str, int, str]  # file, line, function


def here(error: BaseException | None = None) -> str:
    """Return where the main thread is, as `train/loop.py:68 in _steps`: its innermost line of this package.

    error: what has just ended its waiting; the lines that it left by then come first.
    """
    left = reversed(list(_inwards(error.__traceback__))) if error is not None else ()
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    library = ""
    for file, line, function in (*left, *_outwards(frame)):
        if file.startswith(OWN):
            continue
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE)}:{line} in {function}"
        library = library or f"{Path(file).name}:{line} in {function}"
    return library


def stacks(error: BaseException | None = None) -> str:
    """Return the stacks of every thread, the main one first. error: what has just ended the main thread's waiting."""
    frames, main = sys._current_frames(), threading.main_thread()
    parts = []
    if error is not None:
        parts.append(f"where the main thread waited:\n{''.join(traceback.format_tb(error.__traceback__))}")
    others = [thread for thread in threading.enumerate() if thread is not main]
    for thread in [main, *others[:MOST_THREADS]]:
        frame = frames.get(thread.ident or 0)
        if frame is not None and (thread is main or thread is not threading.current_thread()):
            parts.append(f"thread {thread.name}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(parts)


def dump(rank: int, headline: str, error: BaseException | None = None) -> None:
    """Print the stacks of this process in one piece, every line with its rank: several print at once."""
    lines = [headline, *stacks(error).splitlines()]
    say("\n".join(f"[rank {rank}] {line}" for line in lines))


def say(text: str) -> None:
    """Print to standard error, which may be closed: from a thread whose process must go on, or end, all the same."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return


def _outwards(frame: FrameType | None) -> Iterable[Location]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _inwards(trace: TracebackType | None) -> Iterable[Location]:
    while trace is not None:
        code = trace.tb_frame.f_code
        yield code.co_filename, trace.tb_lineno, code.co_name
        trace = trace.tb_next
