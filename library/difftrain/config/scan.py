"""Cut a command line into flags and their words; every fault is collected, none ends the reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from difftrain.config.flag import Flag
from difftrain.config.names import did_you_mean
from difftrain.contracts.errors import Fault


@dataclass
class Scan:
    """What stands on a command line: the words of each known flag, faults, and things worth saying."""

    words: dict[str, list[str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def scan(argv: list[str], table: Mapping[str, Flag]) -> Scan:
    """Read `--key=value`, `--key value` and switches; no prefix of a name stands for it.

    A flag given twice counts with its last value, as in kohya's parser; flags of folders add up.
    """
    out = Scan()
    at = 0
    while at < len(argv):
        word, at = argv[at], at + 1
        values = []
        while at < len(argv) and not argv[at].startswith("--"):
            values.append(argv[at])
            at += 1
        _take(word, values, table, out)
    return out


def _take(word: str, after: list[str], table: Mapping[str, Flag], out: Scan) -> None:
    if not word.startswith("--"):
        for stray in (word, *after):
            out.faults.append(
                Fault(repr(stray), "belongs to no flag", "a value follows its flag: --key value or --key=value")
            )
        return
    name, equals, joined = word[2:].partition("=")
    flag = table.get(name)
    if flag is None:
        remedy = did_you_mean(name.replace("-", "_"), table, "--") or "see --help for every flag"
        out.faults.append(Fault(f"--{name}", "no such flag", remedy))
        return
    values = [joined, *after] if equals else after
    if flag.kind == "switch":
        _take_switch(flag, equals, joined, after, out)
        return
    if not flag.takes_many and len(values) > 1:
        _strays(flag, values[1:], out)
        values = values[:1]
    if not values and flag.name not in ("optimizer_args", "lr_scheduler_args"):  # kohya: no argument is a list too
        out.faults.append(Fault(flag.option, "its value is missing", flag.help))
        return
    _store(flag, values, out)


def _take_switch(flag: Flag, equals: str, joined: str, after: list[str], out: Scan) -> None:
    if equals:
        out.faults.append(
            Fault(flag.option, f"is a switch and takes no value, got {joined!r}", "give it alone, or leave it out")
        )
        return
    _strays(flag, after, out)
    out.words[flag.name] = []


def _strays(flag: Flag, words: list[str], out: Scan) -> None:
    takes = "no value" if flag.kind == "switch" else "one value"
    for word in words:
        out.faults.append(
            Fault(flag.option, f"takes {takes}, so {word!r} belongs to no flag", "quote values with spaces")
        )


def _store(flag: Flag, values: list[str], out: Scan) -> None:
    before = out.words.get(flag.name)
    if flag.name in ("train_data_dir", "reg_data_dir"):
        values = [*(before or []), *values]
    elif before is not None and before != values and not flag.secret:
        out.notes.append(f"{flag.option} is given twice: the last one counts, {' '.join(values)!r}")
    out.words[flag.name] = values
