"""`difftrain compare RUN_A RUN_B ...`: whether runs agree step by step, and which was faster; read from their files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.cli import compare_trace
from difftrain.cli.words import alive, asks_for_help, positional, printed, writing
from difftrain.config.door import guard, print_notes
from difftrain.config.parse_flags import scan
from difftrain.config.paths import expanded
from difftrain.config.render.help import entries
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, DataFault, Fault

if TYPE_CHECKING:
    from difftrain.report.compare.comparison import RunComparison
    from difftrain.report.compare.summary import Unreadable
    from difftrain.report.run_files import RunFiles

PROG = "difftrain compare"
FLAGS: dict[str, Row] = {
    "thresholds": Row("thresholds", "str", "", "TOML or JSON file of limits [by the precision of the runs]"),
    "json": Row("json", "str", "", "also write all of it as JSON"),
    "html": Row("html", "str", "", "also write an HTML page: one file that opens offline"),
}
USAGE = f"""usage: {PROG} RUN_A RUN_B [RUN_C ...] [--thresholds=FILE] [--json=FILE] [--html=FILE]

Compare runs side by side: speed, memory, losses step by step, and what else differs; each against the first. RUN: the folder
with metrics.jsonl and report.json. Exit code 0 where all agree, 1 where any differ (the first such step is named) or miss
a limit, 2 where any cannot be compared step by step (and why). docs/compare.md says more.
{compare_trace.PROG} A B names the first module at which traced steps differ: --trace --help.

"""


def main(argv: list[str]) -> int:
    """Compare; return the exit code."""
    if "--trace" in argv:
        return compare_trace.main(argv)
    if asks_for_help(argv):
        print(USAGE + entries(FLAGS.values()))
        return 0
    return guard(PROG, alive(PROG, lambda: work(*read(argv)), "reading the runs"), failure=2)


def read(argv: list[str]) -> tuple[list[Path], dict[str, list[str]]]:
    """Return the runs' folders and the words of each flag. Raises: ConfigFault with every fault."""
    words, remaining = positional(argv, FLAGS)
    scanned = scan(remaining, FLAGS)
    notes = list(scanned.notes)
    folders = [only_run(Path(expanded(word)), notes) for word in words]
    faults = [*scanned.faults, *_folder_faults(folders), *_output_faults(folders, scanned.words)]
    if faults:
        raise ConfigFault(faults)
    print_notes(PROG, notes)
    return folders, scanned.words


def only_run(folder: Path, notes: list[str]) -> Path:
    """Return the run in a folder of run directories that holds no other, and say so; any other folder as it is."""
    from difftrain.report.metrics import METRICS

    if (folder / METRICS).exists() or not folder.is_dir():
        return folder
    runs = [path.parent for path in folder.glob(f"*/{METRICS}")]
    if len(runs) != 1:
        return folder
    notes.append(f"{folder}: the only run in it is {runs[0].name}")
    return runs[0]


def _folder_faults(folders: list[Path]) -> Iterator[Fault]:
    for name in ("RUN_A", "RUN_B")[len(folders) :]:
        yield Fault(name, "is missing", f"{PROG} RUN_A RUN_B")
    seen: dict[Path, Path] = {}
    for folder in folders:
        before = seen.setdefault(folder.resolve(), folder)
        if before is not folder:
            yield Fault(str(folder), f"is the same run as {before}", "give each run once")


def _output_faults(folders: list[Path], words: Mapping[str, list[str]]) -> Iterator[Fault]:
    """Refuse to write over what is read, and over what a run has written."""
    targets = {name: Path(expanded(words[name][-1])) for name in ("json", "html") if words.get(name)}
    for name, path in targets.items():
        if path.is_dir():
            yield Fault(f"--{name}", f"{str(path)!r} is a folder", "give the name of a file")
        elif path.exists() and path.resolve().parent in {folder.resolve() for folder in folders}:
            yield Fault(f"--{name}", f"{str(path)!r} is a file of a run", "give another name: it would be replaced")
    named = [*targets.values(), *(Path(expanded(words["thresholds"][-1])) for _ in words.get("thresholds", [])[:1])]
    if len({path.resolve() for path in named}) < len(named):
        yield Fault("--json, --html, --thresholds", "name the same file twice", "give each its own name")


def work(folders: list[Path], words: Mapping[str, list[str]]) -> int:
    """Read the runs, compare each with the first, print, and write what is asked for."""
    from difftrain.report.compare.comparison import compare_runs
    from difftrain.report.compare.summary import labels, summary
    from difftrain.report.compare.thresholds import Thresholds, read_thresholds
    from difftrain.report.run_files import RunFiles

    # --- what is compared: a run that cannot be read does not keep the others from it, unless it is the first
    thresholds = read_thresholds(Path(expanded(words["thresholds"][-1]))) if "thresholds" in words else Thresholds()
    names = dict(zip(labels(len(folders)), map(_opened, folders)))
    reference, readable = names[labels(1)[0]], [run for run in names.values() if isinstance(run, RunFiles)]
    if not isinstance(reference, RunFiles) or len(readable) < 2:
        raise DataFault("; ".join(run[1] for run in names.values() if not isinstance(run, RunFiles)))

    # --- each against the first
    comparisons = {
        label: compare_runs(reference, run, thresholds)
        for label, run in names.items()
        if isinstance(run, RunFiles) and run is not reference
    }
    codes = [comparison.exit_code for comparison in comparisons.values()]
    code = max(codes) if len(readable) == len(names) else 2

    # --- what is said of it
    printed(summary(names, comparisons))
    _write(names, comparisons, words, code)
    return code


def _opened(folder: Path) -> RunFiles | Unreadable:
    from difftrain.report.run_files import read_run

    try:
        return read_run(folder)
    except DataFault as fault:
        return str(folder), str(fault)


def _write(
    names: dict[str, RunFiles | Unreadable],
    comparisons: dict[str, RunComparison],
    words: Mapping[str, list[str]],
    code: int,
) -> None:
    from difftrain.io.files import write_output
    from difftrain.report.compare.summary import document

    if "json" in words:
        path = Path(expanded(words["json"][-1]))
        with writing(path):
            write_output(path, json.dumps(document(names, comparisons, code), indent=1, ensure_ascii=False) + "\n")
        printed([str(path)])
    if "html" in words:
        from difftrain.report.compare.page import comparison_page

        path = Path(expanded(words["html"][-1]))
        with writing(path):
            write_output(path, comparison_page(names, comparisons))
        printed([str(path)])
