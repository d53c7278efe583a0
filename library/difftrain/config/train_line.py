"""The command line of train.py -> a configuration, with every fault at once.

Precedence: field default < family default < TOML < command line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from difftrain.config import rules, train_launch, train_toml
from difftrain.config.door import enter
from difftrain.config.finding import Finding, Rule, check, value_of
from difftrain.config.names import did_you_mean
from difftrain.config.parse import RULES, Parsed, with_variants
from difftrain.config.rules_names import optimizer, schedule
from difftrain.config.rules_optimizer import arguments, installed
from difftrain.config.rules_paths import output
from difftrain.config.secrets import REDACTED, is_secret, redact, redact_text
from difftrain.config.sections import TrainConfig
from difftrain.config.there import Coming, expecting
from difftrain.config.toml_keys import KEYS, TABLES
from difftrain.config.train_data import with_data_sets
from difftrain.config.train_options import LATEST, OPTIONS
from difftrain.config.train_settle import settle
from difftrain.config.train_values import Item, Layer
from difftrain.config.train_words import error_in_own_words, faults_in_own_words, in_own_words, log_in_own_words
from difftrain.config.validate import default_of
from difftrain.contracts.errors import ConfigFault, DifftrainError, Fault


def required(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find what every run of this door needs and this one lacks."""
    data = cfg.data
    if not cfg.save.output_dir:
        yield Finding(("save.output_dir",), "is missing", "give the folder in which every run makes one of its own")
    if not (data.dataset_config or data.datasets or data.dirs or data.dataset_class):
        remedy = "give the TOML file of the data: [[directory]] with path, and resolutions"
        yield Finding(("data.dataset_config",), "is missing", remedy)
    elif not data.dataset_config and not data.datasets and not data.resolution:
        yield Finding(("data.resolution",), "is missing", "[width, height]")


_ANY_FAMILY: tuple[Rule, ...] = (
    required,
    output,
    optimizer,
    schedule,
    installed,
    arguments,
)  # what can be said of a run whose family is not known
_RULES = (required, *(rule for rule in RULES if rule is not rules.required))


def open_train_door(
    prog: str,
    argv: list[str],
    work: Callable[[Parsed], int],
    extra_rules: Sequence[Rule] = (),
    preset: Mapping[str, Any] | None = None,
    demo: Callable[[Sequence[str]], Coming | None] | None = None,
) -> int:
    """Parse a command line of train.py, say what is worth saying, do the work, and return the exit code.

    extra_rules: those of rooms that configuration must not know. preset: values by "section.field" that a door stands for.
    demo: says what a command line asks to be made before its run, once all else of it is sound.
    """

    def read() -> Parsed:
        coming = demo(argv) if demo else None
        if coming is None:
            return parse(argv, extra_rules, preset)
        with expecting(coming):
            parsed = parse(argv, extra_rules, preset)
        if parsed.dry_run:
            return replace(parsed, coming=coming)
        if code := coming.make():
            raise SystemExit(code)
        return parse(argv, extra_rules, preset)

    def inner(parsed: Parsed) -> int:
        log_in_own_words()
        try:
            return work(parsed)
        except DifftrainError as error:
            raise error_in_own_words(error) from error

    def help() -> str:
        from difftrain.config.train_help import help_text

        return help_text(prog)

    return enter(prog, argv, read, inner, help)


def parse(argv: list[str], extra_rules: Sequence[Rule] = (), preset: Mapping[str, Any] | None = None) -> Parsed:
    """Read a command line of train.py. Raises ConfigFault with every fault of it, of its files and their combination."""
    line = Layer()
    bare, items = scan(argv, line)
    file = train_toml.read(Path(bare["config"])) if "config" in bare else Layer()
    if "config" not in bare and not any(fault.where == "--config" for fault in line.faults):
        line.faults.append(Fault("--config", "is missing", "give a TOML file, such as one of configs/"))
    line.take(items)  # behind the file, so that a token of the command line wins
    train_launch.local_place(bare, line)
    train_launch.deepspeed(bare, line, {**file.values, **line.values})
    out = settle([file, line], preset or {})
    for path in ("cache.only", "sample.test_only") if "dump_dataset" in bare else ():
        if value_of(out.cfg, path):
            out.fault(path, "contradicts --dump_dataset, which writes the data set out and stops", "give one of them")
    if out.other_family or "model.family" in out.bad:
        found, said = check(out.cfg, _ANY_FAMILY, set(), out.bad, out.origins)
    else:
        cfg = with_data_sets(out, named_now="data.dataset_config" in line.values)
        drawn: list[str] = []
        cfg = with_variants(cfg, out.bad, drawn)
        out.notes += map(in_own_words, drawn)
        # a sampler that is SDXL's default is asked for all the same where it is written: a flow has others
        asked = {path for path in out.origins if path == "sample.sampler" or value_of(cfg, path) != default_of(path)}
        found, said = check(cfg, (*_RULES, *extra_rules), asked, out.bad, out.origins)
        out.cfg = cfg
    # what rules find speaks of flags; the rest has the words that were typed
    faults = [*out.faults, *faults_in_own_words(found)]
    if any(fault.where.startswith("--config=") for fault in file.faults):  # unread, it may hold what seems missing
        faults = [fault for fault in faults if fault.what != "is missing"]
    if faults:
        raise ConfigFault(dict.fromkeys(faults))
    notes = dict.fromkeys((*out.notes, *map(in_own_words, said)))
    return Parsed(out.cfg, tuple(notes), bare, tuple(redact(argv)), tell=in_own_words)


def scan(argv: list[str], line: Layer) -> tuple[dict[str, str], list[Item]]:
    """Cut a command line; return the options that set no field, each with its value, and the keys."""
    bare: dict[str, str] = {}
    items: dict[str, Item] = {}
    at = 0
    while at < len(argv):
        word, at = argv[at], at + 1
        name, equals, text = word[2:].partition("=")
        if not word.startswith("--"):
            remedy = "a value follows its option: --section.key value, or --section.key=value"
            # it may be a token behind an option that is misspelt
            shown = REDACTED if at > 1 and is_secret(argv[at - 2]) else repr(redact_text(word))
            line.faults.append(Fault(shown, "belongs to no option", remedy))
            continue
        takes = OPTIONS[name].takes if name in OPTIONS else "VALUE" if "." in name else ""
        if not equals and takes and at < len(argv) and not argv[at].startswith("--"):
            text, equals, at = argv[at], "=", at + 1
        if name in OPTIONS:
            _option(name, text if equals else None, bare, line)
        elif "." not in name.strip("."):
            line.faults.append(Fault(f"--{name}", "no such option", _guess(name)))
        elif not equals:
            line.faults.append(Fault(f"--{name}", "its value is missing", "--section.key value"))
        else:
            table, _, key = name.rpartition(".")
            if name in items and items[name].text != text:
                said = REDACTED if is_secret(f"--{name}") else repr(text)
                line.notes.append(f"--{name} is given twice: the last one counts, {said}")
            items[name] = Item(table, key, literal(text), f"--{name}", None, text)
    return bare, list(items.values())


def _option(name: str, text: str | None, bare: dict[str, str], line: Layer) -> None:
    option = OPTIONS[name]
    if text is not None and not option.takes:
        line.faults.append(Fault(f"--{name}", f"takes no value, got {text!r}", "give it alone, or leave it out"))
    elif not text and option.takes and not option.takes.startswith("["):
        line.faults.append(Fault(f"--{name}", "its value is missing", option.help))
    elif option.to:
        value = True if not option.takes else text or LATEST
        line.put(option.to, value, Item("", name, value, f"--{name}"))
    else:
        bare[name] = text or ""


def literal(text: str) -> Any:
    """Read a value as TOML has it, else as text."""
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    plain = isinstance(value["value"], str | bool | int | float | list | dict) and len(value) == 1
    return value["value"] if plain else text


def _guess(name: str) -> str:
    keys = {f"{key.home}.{key.name}" for key in KEYS if key.home}
    exact = sorted(key for key in keys if key.partition(".")[2] == name)
    if exact:
        return f"--{exact[0]} sets that key"
    return did_you_mean(name, (*OPTIONS, *keys, *TABLES), "--") or "see --help for every option"


__all__ = ["TrainConfig", "literal", "open_train_door", "parse", "scan"]
