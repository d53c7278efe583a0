"""Command lines of commands that take words, their signs of life, and what they say where a file cannot be written."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec

from difftrain.config.door import print_notes
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, DifftrainError, Fault
from difftrain.io.files import DISK_ERRORS
from difftrain.report.progress import SIGNS


def asks_for_help(argv: list[str]) -> bool:
    """Tell whether a command line asks what the command is."""
    return "-h" in argv or "--help" in argv


def exactly(command: str, argv: list[str], *expected: str) -> list[str]:
    """Return the words of a command that takes exactly these.

    Raises: ConfigFault that names every word too many and every one that is missing.
    """
    faults = [Fault(repr(word), f"difftrain {command} takes no such flag") for word in argv if word.startswith("-")]
    words = [word for word in argv if not word.startswith("-")]
    faults += [
        Fault(name, "is missing", f"difftrain {command} {' '.join(expected)}") for name in expected[len(words) :]
    ]
    faults += [
        Fault(repr(word), f"is an unexpected argument of difftrain {command}") for word in words[len(expected) :]
    ]
    if faults:
        raise ConfigFault(faults)
    return words


def positional(argv: list[str], table: Mapping[str, Row]) -> tuple[list[str], list[str]]:
    """Part the words that are no flags, and no value of the flag before them, from the others."""
    words: list[str] = []
    remaining: list[str] = []
    for position, word in enumerate(argv):
        before = argv[position - 1] if position else ""
        flag = table.get(before[2:]) if before.startswith("--") else None
        taken = flag is not None and flag.kind != "switch"
        (remaining if word.startswith("-") or taken else words).append(word)
    return words, remaining


def run_folder(path: str | Path, expected: str) -> Path:
    """Return a run's folder, which holds a file; of a folder of run directories those that hold it are named.

    Raises: ConfigFault where it is one of those.
    """
    folder = Path(path)
    if (folder / expected).is_file() or not folder.is_dir():
        return folder
    from difftrain.train.run_dir import run_dirs

    runs = [run.name for run in run_dirs(folder) if (run / expected).is_file()]
    if runs:
        what = f"{str(folder)!r} contains run directories and is not one itself"
        raise ConfigFault([Fault("RUN_DIR", what, f"give one of them, {folder / runs[0]} is the newest")])
    return folder


# --- What a command says where it is at work for long


P = ParamSpec("P")


class _Heard(logging.Handler):
    """Take note of what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        SIGNS.heard()


def alive(prog: str, work: Callable[P, int], what: str = "working") -> Callable[P, int]:
    """Return the work of a command with signs of life where it prints nothing for a while, as training has them.

    what: is done at first; SIGNS.now() names what comes then.
    """

    def inner(*args: P.args, **kwargs: P.kwargs) -> int:
        log, heard = logging.getLogger("difftrain"), _Heard()
        log.addHandler(heard)
        try:
            with SIGNS.printed_by(lambda text: print_notes(prog, [text])), SIGNS.doing(what):
                return work(*args, **kwargs)
        finally:
            log.removeHandler(heard)

    return inner


LOADING = "loading PyTorch and the model libraries"


# --- What a command says where its output cannot be written: a full disk, a folder that is closed or cannot be made


@contextmanager
def writing(*outputs: Path) -> Iterator[None]:
    """Turn an error of a disk, or one beside these files or above them, into a sentence; others are not its business.

    Raises: DifftrainError.
    """
    try:
        yield
    except OSError as error:
        at = Path(error.filename or outputs[0]).absolute()
        # a file is written aside under a hidden name: its own is what people know
        named = next((path for path in outputs if at.name.startswith(f".{path.name}.")), error.filename or outputs[0])
        above = {folder for output in outputs for folder in output.absolute().parents}
        beside = at.parent in {output.absolute().parent for output in outputs}
        if error.errno not in DISK_ERRORS and at not in above and not beside:
            raise
        why = "it is a file, not a folder" if at in above and at.is_file() else error.strerror
        raise DifftrainError(f"{named} cannot be written: {why}") from error


def printed(lines: Iterable[str]) -> None:
    """Print lines and see that they arrive. Raises: DifftrainError, BrokenPipeError."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # what is left in the buffer would fail once more as the process ends
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise DifftrainError(f"standard output cannot be written: {error.strerror}") from error
