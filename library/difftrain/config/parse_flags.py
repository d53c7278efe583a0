"""A command line of flags -> TrainConfig, with every fault at once: kohya's, and any that a table of rows describes.

Precedence: field default < --config TOML < what stands between < --config_file < flag.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from difftrain.config import accelerate_environment, arguments_file, deepspeed_json, kohya_network, toml
from difftrain.config.datasets import kohya
from difftrain.config.datasets.datasets import applied, draws_captions
from difftrain.config.layers import Layer, judged
from difftrain.config.paths import PendingFiles
from difftrain.config.reads import explicit_fields
from difftrain.config.resolve import Door, Resolution, resolve_layers
from difftrain.config.rules import adapter, engine, objective, optimizer, outputs, paths, run
from difftrain.config.rules import data as data_rules
from difftrain.config.rules.finding import Rule, check, value_of
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import choices_of, default_of
from difftrain.config.secrets import keep_in_environment, redact, unfit_secret
from difftrain.config.spellings.flags import FLAGS, KOHYA, flag_of
from difftrain.config.spellings.other_names import meant
from difftrain.config.spellings.row import Row, convert
from difftrain.config.spellings.spelling import meaning, option, speaking
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.models.row import FamilyRow


@dataclass
class Scan:
    """What stands on a command line: the words of each known flag, faults, and things worth saying."""

    words: dict[str, list[str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def scan(argv: list[str], table: Mapping[str, Row]) -> Scan:
    """Read `--key=value`, `--key value` and switches; no prefix of a name stands for it.

    A flag given twice counts with its last value, as in kohya's parser; flags of folders, prompts and adapters add up.
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


def _take(word: str, after: list[str], table: Mapping[str, Row], out: Scan) -> None:
    if not word.startswith("--"):
        for stray in (word, *after):
            out.faults.append(
                Fault(repr(stray), "belongs to no flag", "a value follows its flag: --key value or --key=value")
            )
        return
    name, equals, joined = word[2:].partition("=")
    flag = table.get(name)
    if flag is None:
        own = name.replace("-", "_")
        elsewhere = "" if own in table else meant(own)
        remedy = elsewhere or did_you_mean(own, table, "--") or "see --help for every flag"
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
        out.faults.append(Fault(flag.option, "its value is missing", meaning(flag)))
        return
    _store(flag, values, out)


def _take_switch(flag: Row, equals: str, joined: str, after: list[str], out: Scan) -> None:
    if equals and joined in flag.choices:
        _strays(flag, after, out)
        out.words[flag.name] = [joined]
        return
    if equals:
        out.faults.append(
            Fault(flag.option, f"is a switch and takes no value, got {joined!r}", "give it alone, or leave it out")
        )
        return
    _strays(flag, after, out)
    out.words[flag.name] = []


def _strays(flag: Row, words: list[str], out: Scan) -> None:
    takes = "no value" if flag.kind == "switch" else "one value"
    for word in words:
        out.faults.append(
            Fault(flag.option, f"takes {takes}, so {word!r} belongs to no flag", "quote values with spaces")
        )


_ADD_UP = ("train_data_dir", "reg_data_dir", "prompt", "adapter", "control")  # each time that they are given counts


def _store(flag: Row, values: list[str], out: Scan) -> None:
    before = out.words.get(flag.name)
    if flag.name in _ADD_UP:
        values = [*(before or []), *values]
    elif before is not None and before != values and not flag.secret:
        out.notes.append(f"{flag.option} is given twice: the last one counts, {' '.join(values)!r}")
    out.words[flag.name] = values


RULES = (
    *run.RULES,
    *objective.DIFFUSION_RULES,
    *objective.FLOW_RULES,
    *engine.SPEEDUP_RULES,
    *adapter.ADAPTER_RULES,
    *optimizer.NAME_RULES,
    *optimizer.OPTIMIZER_RULES,
    *paths.PATH_RULES,
    *paths.HUB_RULES,
    *engine.PRECISION_RULES,
    *engine.ENGINE_RULES,
    *data_rules.CACHE_RULES,
    *data_rules.DATA_RULES,
    *outputs.EVAL_RULES,
    *outputs.SAMPLE_RULES,
    *outputs.SAVE_RULES,
    *outputs.TRACE_RULES,
)
SHUFFLE_NUM = 10  # captions of a record that are cached where their parts are drawn


@dataclass(frozen=True)
class Parsed:
    """A configuration without a fault, and what is worth saying about how it came.

    bare: flags that set no field, with their last word: dry_run, a command's own. argv: redacted, fit to be written.
    words: those of every flag, from the command line and kohya's file of arguments.
    """

    config: TrainConfig
    notes: tuple[str, ...]
    bare: dict[str, str]
    argv: tuple[str, ...]
    words: dict[str, list[str]] = field(default_factory=dict)
    coming: PendingFiles | None = None  # what a dry run leaves to be made
    explicit: dict[str, str] = field(default_factory=dict)  # fields that are no default -> where they were given

    @property
    def dry_run(self) -> bool:
        """Say whether the run is only to be described."""
        return "dry_run" in self.bare

    @property
    def debug_dataset(self) -> bool:
        """Say whether only the data set is to be looked at."""
        return "debug_dataset" in self.bare


def parse(argv: list[str], extra_rules: Sequence[Rule] = ()) -> Parsed:
    """Read the command line of a training door.

    extra_rules: what only the rooms above know, such as the kinds of devices.
    Raises: ConfigFault with every fault of flags, TOML file and their combination.
    """
    with speaking("kohya"):
        launcher = accelerate_environment.fsdp_layer(os.environ)
        return resolve_flags(argv, FLAGS, (*RULES, *extra_rules), _KOHYA, [launcher])


def resolve(argv: list[str], table: Mapping[str, Row], rules: Sequence[Rule]) -> Parsed:
    """Read a command line that knows the flags of a table, and judge it by some rules; as parse does."""
    with speaking("kohya"):
        return resolve_flags(argv, table, rules, _KOHYA)


def resolve_flags(
    argv: list[str], table: Mapping[str, Row], rules: Sequence[Rule], door: Door, between: Sequence[Layer] = ()
) -> Parsed:
    """Do so for any door, as it spells. between: layers above the file of --config and below the flags."""
    # --- the layers: the file of --config, kohya's file of arguments, the command line
    line = scan(argv, table)
    file = Layer(faults=line.faults, notes=line.notes)
    if "config" in line.words:
        _take_sections(Path(line.words["config"][-1]), file)
    written, path = _written(line.words, table, file)
    arguments, flags = Layer(), Layer()
    for name, texts in written.items():
        take_flag(arguments, table[name], texts, f"{path} {name}")
    for name, texts in line.words.items():
        take_flag(flags, table[name], texts, table[name].option)

    words = {**written, **line.words}
    if "deepspeed_config" in words:
        flags.set(deepspeed_json.PATH, words["deepspeed_config"][-1], table["deepspeed_config"].option)

    # --- one configuration
    out = resolve_layers([file, *between, arguments, flags], door)
    setters = arguments.values.keys() | flags.values.keys()
    if door.passes_over:
        _pass_over_data(out)
    cfg = with_variants(_with_data_sets(out, setters), out.bad, out.notes)

    # --- its rules
    requested = {path for path in out.origins if path in setters or value_of(cfg, path) != default_of(path)}
    noted: set[str] = set()
    passed_over: set[str] | None = set() if door.passes_over else None
    faults, notes = check(cfg, rules, requested, out.bad, out.origins, noted, passed_over)
    if faults := [*out.faults, *faults]:
        raise ConfigFault(faults)
    cfg = without(cfg, passed_over or ())
    bare = {name: "".join(texts[-1:]) for name, texts in words.items() if not table[name].to}
    explicit = explicit_fields(cfg, out.origins, noted)
    return Parsed(cfg, (*out.notes, *notes), bare, tuple(redact(argv)), words, explicit=explicit)


_AS_KOHYA = {"captions.allow_empty": True}  # his scripts train an image without a caption with an empty one


def _family_defaults(row: FamilyRow) -> dict[str, Any]:
    """Return what a family's model is, its sampler and the layout of its exports.

    Rates and caches stay kohya's; the rest must be what the family means, so that what a run records can be read again.
    """
    own = ("model.", "sample.", "save.model_as")
    return {path: value for path, value in row.defaults.items() if path.startswith(own)} | _AS_KOHYA


def _together(out: Resolution, layers: Sequence[Layer]) -> None:
    """Take DeepSpeed's JSON; epochs are kohya's, unless somebody says otherwise, or tars are read in sequence."""
    deepspeed_json.apply(out)
    kohya_network.apply(out)
    sequential = out.values.get("data.tar_order") == "sequential"
    out.values.setdefault("data.epoch_batches", "whole" if sequential else "every")


def _help(path: str) -> str:
    flag = flag_of(path)
    return meaning(flag) if flag and not choices_of(path) else ""


_KOHYA = Door(together=_together, defaults=_family_defaults, remedy=_help, passes_over=True)


def without(cfg: TrainConfig, fields: Iterable[str]) -> TrainConfig:
    """Return a configuration in which some fields have not been given."""
    for path in fields:
        section, _, name = path.partition(".")
        changed = getattr(cfg, section).model_copy(update={name: default_of(path)})
        cfg = cfg.model_copy(update={section: changed})
    return cfg


def _pass_over_data(out: Resolution) -> None:
    """Pass over what kohya's script does not read: folders next to a file of datasets, or next to a metadata json."""
    data = out.cfg.data
    winner = "data.dataset_config" if data.dataset_config else "data.in_json" if data.in_json else ""
    losers = {"data.dataset_config": ("data.dirs", "data.reg_dirs", "data.in_json"), "data.in_json": ("data.reg_dirs",)}
    losers_given = [path for path in losers.get(winner, ()) if path in out.origins and value_of(out.cfg, path)]
    for path in losers_given:
        listed = value_of(out.cfg, path)
        values = " ".join(listed) if isinstance(listed, tuple) else listed
        out.note(path, f"{values}: not read, as in kohya's scripts: {option(winner)} names the data")
        out.origins.pop(path)
    out.cfg = without(out.cfg, losers_given)


def with_variants(cfg: TrainConfig, bad: set[str], notes: list[str]) -> TrainConfig:
    """Settle how many captions of a record are cached, where they are drawn and nobody has said it."""
    cached = cfg.cache.text or cfg.cache.text_to_disk
    if not (cached and draws_captions(cfg, with_variants=False)) or cfg.cache.shuffle_num or "cache.shuffle_num" in bad:
        return cfg
    notes.append(
        f"{option('cache.shuffle_num')}: {SHUFFLE_NUM} captions of each record are sampled and cached, and each use takes one of them"
    )
    return cfg.model_copy(update={"cache": cfg.cache.model_copy(update={"shuffle_num": SHUFFLE_NUM})})


def _with_data_sets(out: Resolution, setters: Set[str]) -> TrainConfig:
    """Read the file of --dataset_config, unless the data sets of an earlier reading are here (a run's config.toml).

    setters: fields that flags have set.
    """
    cfg, data = out.cfg, out.cfg.data
    if data.datasets and "data.dataset_config" not in setters:
        for path in sorted(kohya.OVERRIDABLE & setters):
            what = f"has no effect on the datasets of {out.origins['data.datasets']}, which set everything"
            remedy = f"change them there, or give {option('data.dataset_config')}"
            out.faults.append(Fault(out.origins[path], what, remedy))
        return cfg
    if not data.dataset_config or "data.dataset_config" in out.bad:
        return cfg
    resolved = kohya.resolve(Path(data.dataset_config), cfg)
    out.faults += resolved.faults
    out.origins["data.datasets"] = data.dataset_config
    out.notes += [*resolved.notes, *data_rules.overridden(resolved.overridden & setters, data.dataset_config)]
    if resolved.faults:
        out.bad.add("data.datasets")
    return applied(cfg, resolved)


def _written(words: dict[str, list[str]], table: Mapping[str, Row], layer: Layer) -> tuple[dict[str, list[str]], Path]:
    """Return the flags of `--config_file` that count, and the file.

    A flag of the command line wins over those of the file that set the same field.
    """
    if "output_config" in words:
        if "config_file" not in words:
            layer.faults.append(Fault("--output_config", "needs --config_file", "the name of the file to write"))
        if "config" in words:
            layer.faults.append(
                Fault("--output_config", "cannot be combined with --config", "a run keeps its config.toml")
            )
        return {}, Path()
    if "config_file" not in words:
        return {}, Path()
    path = arguments_file.path_of(words["config_file"][-1])
    texts_of, faults, notes = arguments_file.read(path, table)
    layer.faults += faults
    layer.notes += notes
    taken = {table[name].to for name in words} - {""}
    return {name: texts for name, texts in texts_of.items() if name not in words and table[name].to not in taken}, path


def _take_sections(path: Path, layer: Layer) -> None:
    """Read a file that dump wrote, or a recipe of sections."""
    values, faults = toml.read(path)
    layer.faults += faults
    for section, table in values.items():
        for key, value in table.items():
            layer.set(f"{section}.{key}", value, toml.origin(path, section, key))


def take_flag(layer: Layer, flag: Row, texts: list[str], origin: str) -> None:
    """Read one flag into a layer. origin: the flag, or where a file has it."""
    if is_off(flag, texts):
        reading = f"{texts[-1]} is taken as off" if texts[-1] else "an empty value is taken as none"
        layer.notes.append(f"{origin}: {reading}, as if it were not given")
        return

    # --- flags that are known and not offered, and those that something near stands in for
    if flag.status == "refused":
        if not (texts and texts[-1] in flag.passes):
            layer.faults.append(Fault(origin, "is not offered", meaning(flag)))
        return
    if flag.status == "nearest":
        layer.notes.append(f"{origin}: {meaning(flag, 'kohya')}")

    # --- the words as a value of the flag's type
    try:
        value = convert(flag, texts)
        if value in flag.passes:
            return
        if not all(_is_text(item) for item in (value if flag.kind == "strs" else (value,)) if isinstance(item, str)):
            raise ValueError("its value is empty or not UTF-8")
    except ValueError as error:
        layer.faults.append(Fault(origin, str(error), meaning(flag)))
        layer.bad |= {flag.to} - {""}
        return

    # --- into its field; a secret goes to the environment, since the configuration is written to disk
    if flag.secret:
        if wrong := unfit_secret(flag.secret, value):
            layer.faults.append(Fault(flag.option, wrong))
            return
        keep_in_environment(flag.secret, value)
        layer.notes.append(
            f"{origin}: moved to the environment as {flag.secret}; give it there, where no other user can see it"
        )
    elif flag.to:
        earlier = layer.rows.get(flag.to)
        if earlier and flag.weak:
            return
        if earlier and (earlier.weak or earlier.status == flag.status == "nearest"):
            del layer.values[flag.to], layer.origins[flag.to]
        layer.rows[flag.to] = flag
        layer.set(flag.to, value, origin)


_NEVER = ("sample.every_n_steps", "sample.every_n_epochs")  # kohya's scripts take anything from 0 down as never


def is_off(flag: Row, texts: list[str]) -> bool:
    """Tell whether a flag of kohya's says that something is not wanted: 0 or an empty text, where no such value exists."""
    if flag.kind == "switch" or not texts or texts[-1] in flag.passes:
        return False
    text = "".join(texts).strip()
    if flag.status == "refused" or flag.to in kohya_network.OFF_AT_ZERO:
        return text in ("", "0")
    if not flag.to or flag.to.startswith("?") or default_of(flag.to) is not None or flag not in KOHYA:
        return False
    if text == "":
        return flag.kind == "str"
    if flag.kind not in ("int", "float", "number"):
        return False
    try:
        number = float(text)
    except ValueError:
        return False
    if not math.isfinite(number):
        return False
    return (number == 0 or (number < 0 and flag.to in _NEVER)) and bool(judged(flag.to, int(number))[1])


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # bytes of the command line that are no text
        return False
    return bool(value.strip()) or value == " "
