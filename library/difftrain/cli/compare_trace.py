"""`difftrain compare --trace A B`: the first module at which two traced steps part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from difftrain.cli.words import alive, printed, writing
from difftrain.config.door import guard
from difftrain.config.paths import expanded
from difftrain.contracts.errors import ConfigFault, Fault

PROG = "difftrain compare --trace"
FLAGS = ("tolerance", "step", "json")
USAGE = f"""usage: {PROG} A B [--tolerance=X] [--step=N] [--json=FILE]

A, B: run folders, folders of traces, or files of one step (trained with --trace=1,3-5). A is the reference.
  --tolerance=X   relative error up to which two tensors count as equal, for all dtypes; unset: by dtype, see docs/trace.md
  --step=N        compare this step alone; unset: every step that both have, up to the first that differs
  --json=FILE     also write all of it as JSON

Prints the first module that differs. Exit code 0: they agree, 1: they differ, 2: they cannot be compared."""


class TraceWords(NamedTuple):
    """What a command line asks for."""

    a: Path
    b: Path
    tolerance: float | None = None
    step: int | None = None
    json: Path | None = None


def main(argv: list[str]) -> int:
    """Compare, print and return the exit code. argv: with or without the word --trace."""

    def work() -> int:
        if "-h" in argv or "--help" in argv:
            print(USAGE)
            return 0
        words = read([word for word in argv if word != "--trace"])
        from difftrain.io.files import write_output
        from difftrain.report.compare.trace_summary import document, sentences
        from difftrain.report.trace import compare_traces

        comparison = compare_traces(words.a, words.b, tolerance=words.tolerance, step=words.step)
        printed(sentences(comparison))
        if words.json is not None:
            with writing(words.json):
                write_output(words.json, json.dumps(document(comparison), indent=1, ensure_ascii=False) + "\n")
            printed([str(words.json)])
        return comparison.code

    return guard(PROG, alive(PROG, work, "reading the traces"), failure=2)


def read(argv: list[str]) -> TraceWords:
    """Read the command line. Raises: ConfigFault with every fault."""
    faults: list[Fault] = []
    words, options = [], {}
    for word in _joined(argv):
        name, _, value = word.partition("=")
        if not word.startswith("-"):
            words.append(word)
        elif name.removeprefix("--") in FLAGS:
            options[name] = value
        else:
            faults.append(Fault(repr(word), f"{PROG} takes no such flag", "known are --tolerance, --step and --json"))
    if len(words) != 2:
        faults.append(Fault(PROG, f"needs two runs, A and B; got {len(words)}", "run folders, trace folders or files"))
    tolerance, step = options.get("--tolerance"), options.get("--step")
    if tolerance is not None and not 0 < _number(tolerance) < math.inf:
        faults.append(Fault("--tolerance", f"must be a number above 0, got {tolerance!r}", "such as 0.001"))
    if step is not None and not (step.isdecimal() and int(step) > 0):
        faults.append(Fault("--step", f"must be the number of a step, got {step!r}", "the first step is 1"))
    target = Path(expanded(options["--json"])) if options.get("--json") else None
    if "--json" in options and target is None:
        faults.append(Fault("--json", "its value is missing", "the name of a file"))
    elif target is not None and target.is_dir():
        faults.append(Fault("--json", f"{str(target)!r} is a folder", "give the name of a file"))
    elif target is not None and target.suffix == ".safetensors":
        faults.append(Fault("--json", f"{str(target)!r} is the name of a trace", "give another name"))
    if faults:
        raise ConfigFault(faults)
    return TraceWords(
        Path(words[0]),
        Path(words[1]),
        None if tolerance is None else float(tolerance),
        None if step is None else int(step),
        target,
    )


def _joined(argv: list[str]) -> Iterator[str]:
    """Yield the words, `--step 3` as `--step=3`."""
    words = iter(argv)
    for word in words:
        yield f"{word}={next(words, '')}" if word.removeprefix("--") in FLAGS and word.startswith("--") else word


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
