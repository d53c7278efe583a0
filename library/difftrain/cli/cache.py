"""`difftrain cache`: build the feature cache, and look at, check, mend, shrink and export one that is there.

All but `build` and `export` work without torch, on a cache that a running build writes at the same time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.cli import cache_build
from difftrain.cli.words import alive, positional
from difftrain.config.door import guard
from difftrain.config.parse_flags import scan
from difftrain.config.paths import expanded, is_url, shown_url, user_cache
from difftrain.config.render.help import entries
from difftrain.config.schema.names import did_you_mean
from difftrain.config.spellings.row import Row, convert
from difftrain.contracts.errors import ConfigFault, Fault

if TYPE_CHECKING:
    from difftrain.cache.store.folder import CacheFolder
    from difftrain.cache.tools.export import ExportReport
    from difftrain.cache.tools.verify import VerifyReport

PROG = "difftrain cache"
JSON = Row("json", "switch", "", "print one JSON document and nothing else")
WORKERS = Row("workers", "int", "", "processes that read in parallel [one per core, at most 8]")
DRY_RUN = Row("dry_run", "switch", "", "print what would be done, and do nothing")
UNUSED_DAYS = Row("unused_days", "int", "", "also free what no run has used for this many days [off]")
OUTPUT = Row("output", "str", "", "folder to write: a new one, or an empty one")
FORMAT = Row("format", "str", "", "webdataset, or safetensors [webdataset]", choices=("webdataset", "safetensors"))
ENCODERS = Row("encoders", "str", "", "names as in difftrain cache info, separated by commas [all]")
USE = Row("use", "str", "", "the configuration whose samples are exported, as named by difftrain cache info")
SHARD_GIB = Row("shard_gib", "float", "", "size at which the next file starts [1]")
VALUES = Row("values", "str", "", "plain numbers, or the stored form [plain]", choices=("plain", "storage"))


@dataclass(frozen=True)
class Command:
    """One word after `difftrain cache`."""

    says: str
    about: str
    flags: tuple[Row, ...]
    work: Callable[[Any, Mapping[str, list[str]]], int]  # of the cache: a Path, or a URL where it takes one
    urls: bool = False


def main(argv: list[str]) -> int:
    """Run one command about a cache; return its exit code."""
    if argv[:1] == ["build"]:
        return cache_build.main(argv[1:])
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        return guard(PROG, lambda: _refuse(argv[0]))
    name = argv[0]
    if "-h" in argv or "--help" in argv:
        print(_help(name))
        return 0

    def work() -> int:
        cache, words = read(name, argv[1:])
        return COMMANDS[name].work(cache, words)

    return guard(f"{PROG} {name}", alive(f"{PROG} {name}", work))


def usage() -> str:
    """Return the help of all commands together."""
    says = {"build": cache_build.SAYS, **{name: command.says for name, command in COMMANDS.items()}}
    lines = [f"usage: {PROG} COMMAND ...", "", *(f"  {name:<7} {text}" for name, text in says.items())]
    return "\n".join([*lines, "", f"{PROG} COMMAND --help says more; docs/cached_features.md has the rest"])


def _refuse(word: str) -> int:
    names = ("build", *COMMANDS)
    remedy = did_you_mean(word, names) or f"known are {', '.join(names)}"
    raise ConfigFault([Fault(f"{PROG} {word}", "no such command", remedy)])


def _help(name: str) -> str:
    command = COMMANDS[name]
    head = f"usage: {PROG} {name} [CACHE]" + (" [--flag=value ...]" if command.flags else "")
    return f"{head}\n\n{command.about}\nCACHE: a folder that was given as --cache_dir [the user's cache folder]\n\n" + (
        entries(command.flags)
    )


def read(name: str, argv: list[str]) -> tuple[Path | str, dict[str, list[str]]]:
    """Read the words after a command: the folder or URL, and its flags. Raises: ConfigFault with every fault."""
    table = {flag.name: flag for flag in COMMANDS[name].flags}
    folders, remaining = positional(argv, table)
    scanned = scan(remaining, table)
    faults = [*scanned.faults, *_misfits(scanned.words, table)]
    faults += [Fault(repr(word), f"is an unexpected argument of {PROG} {name}") for word in folders[1:]]
    url = bool(folders) and is_url(folders[0])
    if url and not COMMANDS[name].urls:
        what = f"{shown_url(folders[0])!r} is not a folder of this machine"
        faults.append(Fault("CACHE", what, f"run {PROG} {name} on the machine that has the files, or on a copy"))
    if faults:
        raise ConfigFault(faults)
    if folders:
        return folders[0] if url else Path(expanded(folders[0])), scanned.words
    return user_cache(), scanned.words


def _misfits(words: Mapping[str, list[str]], table: Mapping[str, Row]) -> Iterator[Fault]:
    if "output" in table and "output" not in words:
        yield Fault("--output", "is missing", OUTPUT.help)
    for flag in table.values():
        if flag.choices and flag.name in words and words[flag.name][-1] not in flag.choices:
            yield Fault(flag.option, f"no such name: {words[flag.name][-1]!r}", f"one of {', '.join(flag.choices)}")
    least = {"workers": 1, "unused_days": 0, "shard_gib": 0.001}
    for name in words.keys() & least.keys():
        try:
            value = convert(table[name], words[name])
        except ValueError as error:
            yield Fault(f"--{name}", str(error), table[name].help)
            continue
        if value < least[name]:
            yield Fault(f"--{name}", f"must be at least {least[name]}, got {value}", table[name].help)


def number(words: Mapping[str, list[str]], name: str) -> int | None:
    """Return a flag's number, or None where it was not given."""
    return int(words[name][-1]) if name in words else None


def opened(cache: Path) -> CacheFolder:
    """Open a cache that is there. Raises: ConfigFault where it is missing, no cache, or of another format."""
    from difftrain.cache.store.folder import CacheFolder

    return CacheFolder.open(cache, create=False)


class ProgressLine:
    """Say on stderr how far a long reading has come, how fast it is, and when it will be done."""

    def __init__(self, *, quiet: bool) -> None:
        """Begin now. quiet: say nothing."""
        self.began = self.reported_at = time.monotonic()
        self.every_s = 5.0 if sys.stderr.isatty() else 15.0
        self.quiet = quiet

    def __call__(self, done: int, total: int) -> None:
        """Take note of bytes that are done, of all."""
        now = time.monotonic()
        if self.quiet or now - self.reported_at < self.every_s or not done:
            return
        self.reported_at, rate = now, done / (now - self.began)
        left = max(total - done, 0) / rate
        print(
            f"{done / 2**30:,.1f} of {total / 2**30:,.1f} GiB, {rate / 2**20:,.0f} MiB/s, {_clock(left)} left",
            file=sys.stderr,
            flush=True,
        )


def _clock(seconds: float) -> str:
    minutes, remaining = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {remaining:02} s"


def _info(cache: Path, words: Mapping[str, list[str]]) -> int:
    from difftrain.cache.tools.info import describe, lines

    facts = describe(opened(cache))
    if "json" in words:
        print(json.dumps(facts, indent=1))
    else:
        print("\n".join(lines(facts)))
    return 0


def _verify(cache: Path, words: Mapping[str, list[str]]) -> int:
    from difftrain.cache.tools.verify import verify

    as_json = "json" in words
    report = verify(opened(cache), workers=number(words, "workers"), progress=ProgressLine(quiet=as_json))
    if as_json:
        print(json.dumps(report.document(), indent=1))
    else:
        _print(report)
    return 1 if report.damages else 0


def _print(report: VerifyReport) -> None:
    for line in report.lines():
        print(line)


def _repair(cache: Path, words: Mapping[str, list[str]]) -> int:
    from difftrain.cache.tools.repair import repair

    for line in repair(opened(cache), workers=number(words, "workers"), progress=ProgressLine(quiet=False)):
        print(line, flush=True)
    return 0


def _gc(cache: Path, words: Mapping[str, list[str]]) -> int:
    from difftrain.cache.tools.gc import collect_garbage

    for line in collect_garbage(opened(cache), unused_days=number(words, "unused_days"), dry_run="dry_run" in words):
        print(line, flush=True)
    return 0


def _export(cache: Path | str, words: Mapping[str, list[str]]) -> int:
    from difftrain.cache.tools.export import export

    encoders = words["encoders"][-1].split(",") if "encoders" in words else None
    done = export(
        cache,
        expanded(words["output"][-1]),
        _word(words, FORMAT),
        encoders=encoders,
        use=words["use"][-1] if "use" in words else None,
        shard_bytes=int(float(words.get("shard_gib", ["1"])[-1]) * 2**30),
        values=_word(words, VALUES),
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if "json" in words:
        print(json.dumps(done.summary(), indent=1))
    else:
        _say_exported(done)
    return 1 if done.damaged else 0


def _say_exported(done: ExportReport) -> None:
    for damage in done.damaged:
        print(damage)
    counts = {"damaged": done.num_damaged, "rejected": done.rejected, "incomplete": done.incomplete}
    left_out = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    written = f"{done.samples:,} samples in {done.shards:,} files, {done.bytes / 2**30:,.2f} GiB"
    print(f"{written}; left out: {left_out}" if left_out else written)


def _word(words: Mapping[str, list[str]], flag: Row) -> Any:
    return words.get(flag.name, flag.choices)[-1 if flag.name in words else 0]


COMMANDS: dict[str, Command] = {
    "info": Command(
        "what a cache contains", "Entries, bytes, encoders, and the configurations that use them.", (JSON,), _info
    ),
    "verify": Command(
        "read every entry; exit code 1 where anything is damaged",
        "Read every entry and compare its checksum, and the files with one another. All damage is listed. Exit code 0\n"
        "if all is intact, 1 if anything is damaged, 2 if CACHE is not a cache.",
        (JSON, WORKERS),
        _verify,
    ),
    "repair": Command(
        "drop what is damaged; the next build encodes just that again",
        "Verify, then drop damaged entries, set broken files aside and rebuild metadata.db. What is intact stays. The next\n"
        "build encodes again what was dropped. It can be stopped at any moment, and run again.",
        (WORKERS,),
        _repair,
    ),
    "gc": Command(
        "free what no configuration uses any more",
        "Remove the entries that no configuration built or trained with this cache uses. Unused\n"
        "segments are deleted, those less than half in use are rewritten. It can be stopped at any moment.",
        (DRY_RUN, UNUSED_DAYS),
        _gc,
    ),
    "export": Command(
        "write entries as WebDataset tars or safetensors",
        "Write the samples of a configuration that was built, each with what its encoders made of it. Exit code 1 where an\n"
        "entry is damaged: its sample is left out.",
        (OUTPUT, FORMAT, ENCODERS, USE, SHARD_GIB, VALUES, JSON),
        _export,
        urls=True,
    ),
}
FLAGS: dict[str, Row] = {flag.name: flag for command in COMMANDS.values() for flag in command.flags}
