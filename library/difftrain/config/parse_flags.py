"""kohya's command line -> TrainConfig, with every fault at once.

Precedence: field default < --config TOML < --config_file < flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from difftrain.config import arguments_file, toml
from difftrain.config.datasets import kohya
from difftrain.config.datasets.datasets import applied, draws_captions
from difftrain.config.paths import PendingFiles
from difftrain.config.rules import data as data_rules
from difftrain.config.rules import engine, objective, optimizer, outputs, paths, run
from difftrain.config.rules.finding import Rule, check, value_of
from difftrain.config.schema.families import row_of
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import Values, build, choices_of, default_of
from difftrain.config.secrets import keep_in_environment, redact
from difftrain.config.spellings.flag import Flag, convert
from difftrain.config.spellings.flags import FLAGS, flag_of
from difftrain.contracts.errors import ConfigFault, Fault


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


RULES = (
    *run.RULES,
    *objective.DIFFUSION_RULES,
    *objective.FLOW_RULES,
    *engine.SPEEDUP_RULES,
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
    tell: Callable[[str], str] = str  # puts a sentence that names flags into the words of the door
    coming: PendingFiles | None = None  # what a dry run leaves to be made

    @property
    def dry_run(self) -> bool:
        """Say whether the run is only to be described."""
        return "dry_run" in self.bare

    @property
    def debug_dataset(self) -> bool:
        """Say whether only the data set is to be looked at."""
        return "debug_dataset" in self.bare


@dataclass
class _Sources:
    """Values, where each "section.field" came from, and what went wrong on the way."""

    values: Values = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    setters: dict[str, list[Flag]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)


def parse(argv: list[str], extra_rules: Sequence[Rule] = ()) -> Parsed:
    """Read the command line of a training door.

    extra_rules: what only the rooms above know, such as the kinds of devices.
    Raises: ConfigFault with every fault of flags, TOML file and their combination.
    """
    return resolve(argv, FLAGS, (*RULES, *extra_rules))


def resolve(argv: list[str], table: Mapping[str, Flag], rules: Sequence[Rule]) -> Parsed:
    """Read a command line that knows the flags of a table, and judge it by some rules; as parse does."""
    found = scan(argv, table)
    src = _Sources(faults=found.faults, notes=found.notes)
    if "config" in found.words:
        _take_toml(Path(found.words["config"][-1]), src)
    words, written_in = _with_file(found.words, table, src)
    for name, texts in words.items():
        _take_flag(table[name], texts, src, written_in.get(name, ""))
    cfg, misfits = build(src.values)
    for section, key, what, remedy in misfits:
        path = f"{section}.{key}"
        src.bad.add(path)
        src.faults.append(Fault(src.origins[path], what, remedy or _help(path)))
    cfg = _with_family(_with_engine(_with_data_sets(cfg, src), src), src)
    cfg = with_variants(cfg, src.bad, src.notes)
    asked = {path for path in src.origins if path in src.setters or value_of(cfg, path) != default_of(path)}
    faults, notes = check(cfg, rules, asked, src.bad, src.origins)
    if faults := [*src.faults, *faults]:
        raise ConfigFault(faults)
    bare = {name: "".join(texts[-1:]) for name, texts in words.items() if not table[name].to}
    return Parsed(cfg, (*src.notes, *notes), bare, tuple(redact(argv)), words)


def _with_engine(cfg: TrainConfig, src: _Sources) -> TrainConfig:
    """Take the engine that runs DeepSpeed where nobody has chosen one."""
    if not cfg.deepspeed.enable or "training.engine" in src.origins:
        return cfg
    src.notes.append(f"{src.origins['deepspeed.enable']}: takes --engine=accelerate, whose plugin runs DeepSpeed")
    return cfg.model_copy(update={"training": cfg.training.model_copy(update={"engine": "accelerate"})})


def _with_family(cfg: TrainConfig, src: _Sources) -> TrainConfig:
    """Take what a family's model is, its sampler and the layout of its exports, where nobody has chosen one.

    Rates and caches stay kohya's; the rest must be what the family means, so that what a run records can be read again.
    """
    own: dict[str, dict[str, Any]] = {}
    for path, value in row_of(cfg).defaults.items():
        section, _, field = path.partition(".")
        if (section in ("model", "sample") or path == "save.model_as") and path not in src.origins:
            own.setdefault(section, {})[field] = value
    return cfg.model_copy(update={name: getattr(cfg, name).model_copy(update=values) for name, values in own.items()})


def with_variants(cfg: TrainConfig, bad: set[str], notes: list[str]) -> TrainConfig:
    """Settle how many captions of a record are cached, where they are drawn and nobody has said it."""
    cached = cfg.cache.text or cfg.cache.text_to_disk
    if not (cached and draws_captions(cfg, told=False)) or cfg.cache.shuffle_num or "cache.shuffle_num" in bad:
        return cfg
    notes.append(
        f"--cache_shuffle_num: {SHUFFLE_NUM} captions of each record are drawn and cached, and each use takes one of them"
    )
    return cfg.model_copy(update={"cache": cfg.cache.model_copy(update={"shuffle_num": SHUFFLE_NUM})})


def _with_data_sets(cfg: TrainConfig, src: _Sources) -> TrainConfig:
    """Read the file of --dataset_config, unless the data sets of an earlier reading are here (a run's config.toml)."""
    data, flagged = cfg.data, "data.dataset_config" in src.setters
    if data.datasets and not flagged:
        for path in sorted(kohya.OVERRIDABLE & src.setters.keys()):
            what = f"has no effect on the data sets of {src.origins['data.datasets']}, which hold every setting"
            src.faults.append(Fault(src.origins[path], what, "change them there, or give --dataset_config"))
        return cfg
    if not data.dataset_config or "data.dataset_config" in src.bad:
        return cfg
    found = kohya.resolve(Path(data.dataset_config), cfg)
    src.faults += found.faults
    src.origins["data.datasets"] = data.dataset_config
    src.notes += [*found.notes, *data_rules.overridden(found.overridden & src.setters.keys(), data.dataset_config)]
    if found.faults:
        src.bad.add("data.datasets")
    return applied(cfg, found)


def _with_file(
    words: dict[str, list[str]], table: Mapping[str, Flag], src: _Sources
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Put the flags of `--config_file` in front of the command line's; also say where those stand.

    A flag of the command line wins over those of the file that set the same field.
    """
    if "output_config" in words:
        if "config_file" not in words:
            src.faults.append(Fault("--output_config", "needs --config_file", "the name of the file to write"))
        if "config" in words:
            src.faults.append(Fault("--output_config", "does not go with --config", "a run keeps its config.toml"))
        return words, {}
    if "config_file" not in words:
        return words, {}
    path = arguments_file.path_of(words["config_file"][-1])
    given, faults = arguments_file.read(path, table)
    src.faults += faults
    taken = {table[name].to for name in words} - {""}
    kept = {name: texts for name, texts in given.items() if name not in words and table[name].to not in taken}
    return {**kept, **words}, {name: f"{path} {name}" for name in kept}


def _take_toml(path: Path, src: _Sources) -> None:
    values, faults = toml.read(path)
    src.faults += faults
    for section, table in values.items():
        for key, value in table.items():
            src.values.setdefault(section, {})[key] = value
            src.origins[f"{section}.{key}"] = toml.origin(path, section, key)


def _take_flag(flag: Flag, texts: list[str], src: _Sources, written_in: str = "") -> None:
    origin = written_in or flag.option

    # flags that are known and not offered, and those that something near stands in for
    if flag.status in ("later", "refused"):
        if not (texts and texts[-1] in flag.same):
            what = "is not built yet" if flag.status == "later" else "is not offered"
            src.faults.append(Fault(origin, what, flag.help))
        return
    if flag.status == "nearest":
        src.notes.append(f"{origin}: {flag.help}")

    # the words as a value of the flag's type
    try:
        value = convert(flag, texts)
    except ValueError as error:
        src.faults.append(Fault(origin, str(error), flag.help))
        if flag.to:
            src.bad.add(flag.to)
        return

    # into its field; a secret goes to the environment, since the configuration is written to disk
    if value == "" and flag.same == ("",):
        return
    if not all(_is_text(each) for each in (value if flag.kind == "strs" else (value,)) if isinstance(each, str)):
        src.faults.append(Fault(origin, "its value is empty or not UTF-8", flag.help))
        if flag.to:
            src.bad.add(flag.to)
    elif flag.secret:
        keep_in_environment(flag.secret, value)
        src.notes.append(
            f"{origin}: moved to the environment as {flag.secret}; give it there, where nobody else can see it"
        )
    elif flag.to:
        _assign(flag, value, src, origin)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # bytes of the command line that are no text
        return False
    return bool(value.strip()) or value == " "


def _assign(flag: Flag, value: Any, src: _Sources, origin: str) -> None:
    """Set a field; two flags that ask for different values of it contradict each other."""
    section, _, key = flag.to.partition(".")
    setters = src.setters.setdefault(flag.to, [])
    if setters and flag.weak:
        return
    rivals = [one for one in setters if not (one.weak or one.status == flag.status == "nearest")]
    if rivals and src.values[section][key] != value:
        src.faults.append(Fault(origin, f"contradicts {rivals[0].option}", "give one of them"))
        return
    setters.append(flag)
    src.values.setdefault(section, {})[key] = value
    src.origins[flag.to] = origin


def _help(path: str) -> str:
    flag = flag_of(path)
    return flag.help if flag and not choices_of(path) else ""
