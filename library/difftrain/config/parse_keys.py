"""The command line of train.py -> a configuration, with every fault at once.

Precedence: field default < family default < TOML < command line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from difftrain.config import accelerate_environment, launch_options, layers
from difftrain.config.datasets import diffusion_pipe
from difftrain.config.datasets.datasets import Resolved, applied
from difftrain.config.derive import train_door
from difftrain.config.document import toml_of
from difftrain.config.door import enter
from difftrain.config.layers import KeyValue, Layer
from difftrain.config.parse_flags import RULES, Parsed, with_variants
from difftrain.config.paths import PendingFiles, expanded, expecting, is_file, recipes_named
from difftrain.config.reads import explicit_fields
from difftrain.config.resolve import Resolution, resolve_layers
from difftrain.config.rules import data as data_rules
from difftrain.config.rules import run
from difftrain.config.rules.finding import Finding, Rule, check, value_of
from difftrain.config.rules.optimizer import arguments, installed, optimizer, schedule
from difftrain.config.rules.paths import output
from difftrain.config.schema.families import multiple_of
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.sections import EvalSetSection, TrainConfig
from difftrain.config.schema.validate import default_of
from difftrain.config.secrets import REDACTED, is_secret, redact, redact_text
from difftrain.config.spellings.keys import KEYS, LATEST, OPTIONS, SHORT, TABLES
from difftrain.config.spellings.other_names import meant
from difftrain.config.spellings.spelling import meaning, speaking
from difftrain.contracts.errors import ConfigFault, Fault

_FILE, _SETS, _EVAL = "data.dataset_config", "data.datasets", "eval.sets"
_AT_RANDOM = ("flip", "random_crop", "color_aug", "face_crop_range")


def with_data_sets(out: Resolution, *, named_now: bool) -> TrainConfig:
    """Read the files of data sets, unless an earlier reading of them is here (a run's config.toml).

    named_now: the command line names the file, which then counts.
    """
    cfg = out.cfg
    multiple = multiple_of(cfg)
    path = cfg.data.dataset_config
    if path and not (cfg.data.datasets and not named_now) and _FILE not in out.bad:
        resolved = diffusion_pipe.resolve(
            Path(path),
            cfg,
            multiple=multiple,
            batch_of=_batch_of(out.batch_of),
            image_batch_of=_batch_of(out.image_batch_of),
        )
        _take_messages(out, resolved, _SETS, path)
        changed = {name for name in resolved.overridden & out.origins.keys() if value_of(cfg, name) != default_of(name)}
        out.notes += data_rules.overridden(changed, path)
        cfg = applied(cfg, resolved)
    elif (out.batch_of or out.image_batch_of) and not path and not cfg.data.datasets and cfg.data.resolution:
        width, height = cfg.data.resolution  # of the folders that the run's own file names
        side, named = (
            round(math.sqrt(width * height)),
            {"batch_size": out.batch_of, "image_batch_size": out.image_batch_of},
        )
        batch = {name: of(side) for name, pairs in named.items() if (of := _batch_of(pairs)) is not None}
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update=batch)})
    if _EVAL in out.bad or not cfg.eval.sets:
        return cfg
    sets = [section if section.datasets else _eval_set(out, cfg, section, multiple) for section in cfg.eval.sets]
    return cfg.model_copy(update={"eval": cfg.eval.model_copy(update={"sets": tuple(sets)})})


def _eval_set(out: Resolution, cfg: TrainConfig, section: EvalSetSection, multiple: int) -> EvalSetSection:
    """Resolve an evaluation set: every caption as it stands, no words dropped, and pictures as they are."""
    plain = cfg.model_copy(
        update={
            "captions": cfg.captions.model_copy(update={"dropout_rate": 0.0}),
            "validation": cfg.validation.model_copy(update={"split": 0.0}),
            "data": cfg.data.model_copy(update={name: default_of(f"data.{name}") for name in _AT_RANDOM}),
        }
    )
    batch_of = None if cfg.eval.batch_size else _batch_of(out.batch_of)  # the former counts for every set
    resolved = diffusion_pipe.resolve(Path(section.config), plain, multiple=multiple, batch_of=batch_of)
    _take_messages(out, resolved, _EVAL, section.config)
    return section.model_copy(update={"datasets": resolved.datasets})


def _take_messages(out: Resolution, resolved: Resolved, field: str, path: str) -> None:
    out.faults += [fault for fault in resolved.faults if fault not in out.faults]
    out.notes += [note for note in resolved.notes if note not in out.notes]
    out.origins.setdefault(field, path)
    if resolved.faults:
        out.bad.add(field)


def _batch_of(listed: tuple[tuple[int, int], ...]) -> Any:
    """Return how many samples are taken at once at a resolution; one that is not named takes that of the next larger."""
    pairs = sorted(listed)
    if not pairs:
        return None

    def batch_of(side: int) -> int:
        return next((batch for named, batch in pairs if named >= side), pairs[-1][1])

    return batch_of


def required(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find what every run of this door needs and this one lacks."""
    data = cfg.data
    if not cfg.save.output_dir:
        yield Finding(("save.output_dir",), "is missing", "give the folder in which every run makes its own folder")
    if not (data.dataset_config or data.datasets or data.dirs or data.dataset_class):
        remedy = "give the TOML file of the data: [[directory]] with path, and resolutions"
        yield Finding(("data.dataset_config",), "is missing", remedy)
    elif not data.dataset_config and not data.datasets and not data.resolution:
        yield Finding(("data.resolution",), "is missing", "[width, height]")


def dataset_exists(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find a file of data sets that is missing; of a known family it is read, which finds that too."""
    path = cfg.data.dataset_config
    if path and not is_file(expanded(path)):
        yield Finding((_FILE,), f"no such file: {path!r}", "give a TOML file of datasets")


_ANY_FAMILY: tuple[Rule, ...] = (
    required,
    dataset_exists,
    output,
    optimizer,
    schedule,
    installed,
    arguments,
)  # what can be said of a run whose family is not known
_RULES = (required, *(rule for rule in RULES if rule is not run.required))


def open_train_door(
    prog: str,
    argv: list[str],
    work: Callable[[Parsed], int],
    extra_rules: Sequence[Rule] = (),
    preset: Mapping[str, Any] | None = None,
    demo: Callable[[Sequence[str]], PendingFiles | None] | None = None,
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

    def help() -> str:
        from difftrain.config.render.help import key_help

        return key_help(prog)

    with speaking("train"):
        return enter(prog, argv, read, work, help)


def parse(argv: list[str], extra_rules: Sequence[Rule] = (), preset: Mapping[str, Any] | None = None) -> Parsed:
    """Read a command line of train.py. Raises ConfigFault with every fault of it, of its files and their combination."""
    with speaking("train"):
        return _parse(argv, extra_rules, preset or {})


def _parse(argv: list[str], extra_rules: Sequence[Rule], preset: Mapping[str, Any]) -> Parsed:
    line = Layer()
    bare, items = scan(argv, line)
    file = layers.read_file(Path(bare["config"])) if "config" in bare else Layer()
    if "config" not in bare and not any(fault.where == "--config" for fault in line.faults):
        line.faults.append(Fault("--config", "is missing", f"give a TOML file, such as one of {recipes_named()}"))
    line.take(items)  # behind the file, so that a token of the command line wins
    launch_options.local_place(bare, line)
    launcher = accelerate_environment.fsdp_layer(os.environ)
    out = resolve_layers([file, launcher, line], train_door(preset))
    for path in ("cache.only", "sample.test_only") if "dump_dataset" in bare else ():
        if value_of(out.cfg, path):
            out.fault(path, "contradicts --dump_dataset, which writes the dataset out and stops", "give one of them")
    noted: set[str] = set()
    if out.other_family or "model.family" in out.bad:
        new_faults, new_notes = check(out.cfg, _ANY_FAMILY, set(), out.bad, out.origins)
    else:
        cfg = with_data_sets(out, named_now="data.dataset_config" in line.values)
        drawn: list[str] = []
        cfg = with_variants(cfg, out.bad, drawn)
        out.notes += drawn
        # a sampler that is SDXL's default is asked for all the same where it is written: a flow has others
        requested = {
            path for path in out.origins if path == "sample.sampler" or value_of(cfg, path) != default_of(path)
        }
        new_faults, new_notes = check(cfg, (*_RULES, *extra_rules), requested, out.bad, out.origins, noted)
        out.cfg = cfg
    faults = [*out.faults, *new_faults]
    if any(fault.where.startswith("--config=") for fault in file.faults):  # unread, it may hold what seems missing
        faults = [fault for fault in faults if fault.what != "is missing"]
    if faults:
        raise ConfigFault(dict.fromkeys(faults))
    notes = dict.fromkeys((*out.notes, *new_notes))
    explicit = explicit_fields(out.cfg, out.origins, noted)
    return Parsed(out.cfg, tuple(notes), bare, tuple(redact(argv)), explicit=explicit)


def scan(argv: list[str], line: Layer) -> tuple[dict[str, str], list[KeyValue]]:
    """Cut a command line; return the options that set no field, each with its value, and the keys."""
    bare: dict[str, str] = {}
    items: dict[str, KeyValue] = {}
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
        spelt, name = f"--{name}", SHORT.get(name, name)
        if name in OPTIONS:
            _option(name, text if equals else None, bare, line)
        elif "." not in name.strip("."):
            line.faults.append(Fault(spelt, "no such option", _guess(name)))
        elif not equals:
            line.faults.append(Fault(spelt, "its value is missing", "--section.key value"))
        else:
            table, _, key = name.rpartition(".")
            if name in items and items[name].text != text:
                shown_value = REDACTED if is_secret(f"--{name}") else repr(text)
                line.notes.append(f"{spelt} is given twice: the last one counts, {shown_value}")
            items[name] = KeyValue(table, key, literal(text), spelt, None, text)
    return bare, list(items.values())


def _option(name: str, text: str | None, bare: dict[str, str], line: Layer) -> None:
    option = OPTIONS[name]
    if text is not None and not option.takes and text not in option.choices:
        line.faults.append(Fault(f"--{name}", f"takes no value, got {text!r}", "give it alone, or leave it out"))
    elif not text and option.takes and not option.takes.startswith("["):
        line.faults.append(Fault(f"--{name}", "its value is missing", meaning(option, "train")))
    elif option.to.startswith("?"):
        line.set(option.to, text or True, f"--{name}")
    elif option.to:
        value = True if not option.takes else text or LATEST
        line.put(option.to, value, KeyValue("", name, value, f"--{name}"))
    else:
        bare[name] = text or ""


def literal(text: str) -> Any:
    """Read a value as TOML has it, else as text."""
    try:
        value = toml_of(f"value = {text}")
    except ValueError:
        return text
    plain = isinstance(value["value"], str | bool | int | float | list | dict) and len(value) == 1
    return value["value"] if plain else text


def _guess(name: str) -> str:
    keys = {f"{key.home}.{key.name}" for key in KEYS if key.home}
    exact = sorted(key for key in keys if key.partition(".")[2] == name)
    if exact:
        return f"--{exact[0]} sets that key"
    return meant(name) or did_you_mean(name, (*OPTIONS, *keys, *TABLES), "--") or "see --help for every option"


__all__ = ["TrainConfig", "literal", "open_train_door", "parse", "scan"]
