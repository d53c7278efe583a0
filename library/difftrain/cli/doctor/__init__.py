"""`difftrain doctor`: what is installed, which devices are there, and whether they compute what they should.

The self-check of a machine, about two minutes where kernels must be loaded first. Every check runs in a process of its
own kind, bounded in time: what hangs or crashes is a finding like any other.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import difftrain
from difftrain.cli.doctor.runner import CHECKS, DEVICES, QUICK_LEAVES_OUT, DoctorReport, examine
from difftrain.cli.words import alive
from difftrain.config.door import guard
from difftrain.config.parse_flags import scan
from difftrain.config.render.help import entries
from difftrain.config.schema.names import did_you_mean
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.device.choice import KINDS
from difftrain.device.health import Context, Verdict

SCHEMA = 1  # of the JSON document; a field that goes or changes its meaning makes it 2
PROG = "difftrain doctor"
FLAGS: dict[str, Row] = {
    flag.name: flag
    for flag in (
        Row("device", "str", "", f"the kind of device to check: auto, {', '.join(KINDS)} [auto]"),
        Row("train_data_dir", "str", "", "also check that this folder can be read"),
        Row("cache_dir", "str", "", "also check that this folder can be written [the user's cache folder]"),
        Row("output_dir", "str", "", "also check that this folder can be written, and has room for checkpoints"),
        Row("quick", "switch", "", "leave out the slow checks: the all-reduce over all devices, the speed"),
        Row("checks", "strs", "", f"only these checks: {', '.join(CHECKS)}"),
        Row("json", "switch", "", "print one JSON document and nothing else"),
    )
}
_MARKS: dict[Verdict, str] = {"ok": "ok", "note": "-", "wrong": "WRONG"}


def main(argv: list[str]) -> int:
    """Print what was found; 1 where something that training needs is missing or wrong."""
    if "-h" in argv or "--help" in argv:
        print(_help())
        return 0

    def work() -> int:
        words = read(argv)
        context = Context(
            words.get("device", ["auto"])[-1],
            _last(words, "train_data_dir"),
            _last(words, "cache_dir"),
            _last(words, "output_dir"),
        )
        return _report(context, chosen(words), as_json="json" in words)

    return guard(PROG, alive(PROG, work, "checking"))


def read(argv: list[str]) -> Mapping[str, list[str]]:
    """Read the command line. Raises: ConfigFault with every fault."""
    scanned = scan(argv, FLAGS)
    faults = list(scanned.faults)
    kind = scanned.words.get("device", ["auto"])[-1]
    if kind not in ("auto", *KINDS):
        faults.append(Fault("--device", f"got {kind!r}", f"one of auto, {', '.join(KINDS)}"))
    for name in _named(scanned.words):
        if name not in CHECKS:
            faults.append(Fault("--checks", f"no check {name!r}", did_you_mean(name, CHECKS) or FLAGS["checks"].help))
    if faults:
        raise ConfigFault(faults)
    return scanned.words


def chosen(words: Mapping[str, list[str]]) -> list[str]:
    """Return the names of the checks to do, in their order; with one that needs a device comes that of the devices."""
    needed = set(_named(words)) or {name for name in CHECKS if "quick" not in words or name not in QUICK_LEAVES_OUT}
    if any(CHECKS[name].needs == "device" for name in needed):
        needed.add(DEVICES)
    return [name for name in CHECKS if name in needed]


def _named(words: Mapping[str, list[str]]) -> list[str]:
    return [name for word in words.get("checks", []) for name in word.split(",") if name]


def _last(words: Mapping[str, list[str]], name: str) -> str | None:
    return words[name][-1] if name in words else None


def _report(context: Context, names: list[str], as_json: bool) -> int:
    start = time.monotonic()
    reports: list[DoctorReport] = []
    for report in examine({name: CHECKS[name] for name in names}, context):
        reports.append(report)
        if not as_json:
            print(line(report), flush=True)
    counts = Counter(report.verdict for report in reports)
    code = 1 if counts["wrong"] else 0
    if as_json:
        json.dump(document(context, reports, time.monotonic() - start), sys.stdout, indent=1)
        print()
    else:
        wrong = counts["wrong"]
        print(f"\n{wrong} thing{'s' if wrong != 1 else ''} to fix" if wrong else "\nready to train", flush=True)
    return code


def line(report: DoctorReport) -> str:
    """Write a finding for people: verdict, sentence, and below it what to do."""
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    text = textwrap.fill(
        report.observed, width, initial_indent=f"{_MARKS[report.verdict]:>7}  ", subsequent_indent=" " * 9,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    if report.verdict == "ok" or not report.remedy:
        return text
    indent = " " * 9
    remedy = textwrap.fill(
        report.remedy, width, initial_indent=f"{indent}-> ", subsequent_indent=indent + "   ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return f"{text}\n{remedy}"


def document(context: Context, reports: list[DoctorReport], seconds: float) -> dict[str, Any]:
    """Return the JSON document; docs/doctor.md describes it."""
    counts = Counter(report.verdict for report in reports)
    return {
        "schema": SCHEMA,
        "difftrain": difftrain.__version__,
        "asked": context.kind,
        "checks": [report.record() for report in reports],
        "summary": {
            **{verdict: counts[verdict] for verdict in _MARKS},
            "seconds": round(seconds, 2),
            "exit_code": 1 if counts["wrong"] else 0,
        },
    }


def _help() -> str:
    return (
        f"usage: {PROG} [--flag=value ...]\n\n"
        "Check this machine: versions, devices, their numerics, the links between them, folders, variables. Every\n"
        "finding comes with a fix. Exit code 1 if something that training needs is wrong, else 0.\n\n"
        + entries(FLAGS.values())
    )
