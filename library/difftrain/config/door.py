"""What every door and command does around its work: help, faults and errors with their exit codes."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from difftrain.config import arguments_file, open_files
from difftrain.config.hidden_imports import collect_again, hold_back, pause_collection
from difftrain.config.parse_flags import Parsed, parse
from difftrain.config.render.help import flag_help
from difftrain.config.rules.finding import Rule
from difftrain.config.secrets import redact_text
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.toml_lines import with_line
from difftrain.contracts.errors import ConfigFault, DifftrainError

_WAIT_FOR_FIRST_S = 10.0
# what no run can do without: module -> what pip calls it
REQUIRED = {
    **{name: name for name in (
        "torch", "diffusers", "transformers", "safetensors", "scipy", "huggingface_hub", "numpy", "simplejpeg",
        "imagecodecs", "pyarrow", "av", "fsspec", "ftfy", "tqdm",
    )},
    "PIL": "Pillow", "google_crc32c": "google-crc32c",
}  # fmt: skip


def open_door(prog: str, argv: list[str], work: Callable[[Parsed], int], rules: Sequence[Rule] = ()) -> int:
    """Parse a training command line, say what is worth saying, do the work, and return the exit code.

    rules: those of rooms that configuration must not know.
    """

    def inner(parsed: Parsed) -> int:
        if "output_config" not in parsed.bare:
            return work(parsed)
        path = arguments_file.path_of(parsed.words["config_file"][-1])
        if _speaks():
            arguments_file.write(path, parsed.words, FLAGS)
            print(f"{path}: written; give it as --config_file")
        return 0

    return enter(prog, argv, lambda: parse(argv, rules), inner, lambda: flag_help(prog))


def enter(
    prog: str, argv: list[str], read: Callable[[], Parsed], work: Callable[[Parsed], int], help: Callable[[], str]
) -> int:
    """Do what open_door does, for a command line that is read in another way."""

    def inner() -> int:
        if "-h" in argv or "--help" in argv:
            print(help())
            return 0
        parsed = read()
        hold_back()
        pause_collection()  # until what the work imports is there
        try:
            print_notes(prog, parsed.notes)
            return work(parsed)
        finally:
            collect_again()

    return guard(prog, inner)


def print_notes(prog: str, sentences: Iterable[str]) -> None:
    """Print what is worth knowing before the work begins, once on each machine."""
    if _speaks():
        for sentence in sentences:
            print(redact_text(f"{prog}: {sentence}"), file=sys.stderr)


def guard(prog: str, work: Callable[[], int], *, failure: int = 1) -> int:
    """Do the work; an error that a user can cause becomes a message without a traceback, and its exit code.

    failure: the exit code of all that went wrong without one of its own; a command whose 1 is an answer has another.
    """
    try:
        return work()
    except DifftrainError as error:
        if error.exit_code == 2 and not _speaks():
            # the launcher ends all ranks when one ends: let the first of this machine finish its message
            time.sleep(_WAIT_FOR_FIRST_S)
        print(redact_text(f"{_who(prog)}: {_sentence(error)}"), file=sys.stderr, flush=True)
        return failure if error.exit_code == 1 else error.exit_code
    except KeyboardInterrupt:
        print(f"{_who(prog)}: interrupted", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # somebody closed our output: `... --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if limit := open_files.met(error):
            text = limit
        elif isinstance(error, ModuleNotFoundError) and error.name in REQUIRED:
            text = f"needs the package {REQUIRED[error.name]}, which is not installed (pip install -r requirements.txt)"
        else:  # a bug of ours: the traceback is the message, and tokens stay out of it
            text = traceback.format_exc()
        print(redact_text(f"{_who(prog)}: {text}"), file=sys.stderr, flush=True)
        return failure


def _speaks() -> bool:
    """Say whether this process speaks for its machine; every machine may have faults of its own."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _who(prog: str) -> str:
    rank = os.environ.get("RANK")
    return f"{prog} (rank {rank})" if rank not in (None, "0") else prog


def _sentence(error: DifftrainError) -> str:
    if not isinstance(error, ConfigFault):
        return str(error)
    count = len(error.faults)
    located = (replace(fault, where=with_line(fault.where)) for fault in error.faults)
    lines = "\n".join(f"  {fault}" for fault in located)
    return f"{count} fault{'s' if count > 1 else ''} in the configuration; nothing was started\n{lines}"
