"""`difftrain dataset inspect`: look at a data set as training will see it, with the flags of a training command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from difftrain.cli.words import LOADING, alive, writing
from difftrain.config import parse_flags
from difftrain.config.door import enter, guard
from difftrain.config.parse_flags import Parsed, resolve
from difftrain.config.render.help import entries
from difftrain.config.rules import run
from difftrain.config.rules.finding import Finding, Rule
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.row import Row, convert
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.report.progress import SIGNS

OWN: dict[str, Row] = {
    "output": Row("output", "str", "", "the page to write, such as dataset.html"),
    "epochs": Row("epochs", "int", "", "epochs whose captions are shown [3]"),
    "max_pictures": Row("max_pictures", "int", "", "images shown; counts are of all [48]"),
    "json": Row("json", "str", "", "also write the facts of the page as JSON"),
}
TABLE = {**OWN, **FLAGS}
LIMITS = {"epochs": (1, 20, 3), "max_pictures": (0, 1000, 48)}
_UNNEEDED = {"save.output_dir", "model.pretrained"}  # what a training needs, and looking at data does not


def main(argv: list[str]) -> int:
    """Run a command about data sets; there is one."""
    prog = "difftrain dataset inspect"
    if argv[:1] == ["inspect"]:
        return enter(prog, argv[1:], lambda: read(argv[1:]), alive(prog, work, LOADING), lambda: _help(prog))
    if argv[:1] in (["-h"], ["--help"]):
        return enter(prog, argv, lambda: read(argv), alive(prog, work, LOADING), lambda: _help(prog))
    return guard("difftrain dataset", lambda: _refuse(argv))


def _refuse(argv: list[str]) -> int:
    if not argv:
        raise ConfigFault([Fault("difftrain dataset", "needs a command", "difftrain dataset inspect --help")])
    remedy = did_you_mean(argv[0], ("inspect",)) or "known is inspect"
    raise ConfigFault([Fault(f"difftrain dataset {argv[0]}", "no such command", remedy)])


def read(argv: list[str]) -> Parsed:
    """Read the command line. Raises: ConfigFault with every fault."""
    faults: list[Fault] = []
    try:
        parsed = resolve(argv, TABLE, [_lenient(rule) for rule in parse_flags.RULES])
    except ConfigFault as error:
        faults += error.faults
    else:
        faults += _own_faults(parsed)
    if not any(word.partition("=")[0] == "--output" for word in argv):
        faults.insert(0, Fault("--output", "is missing", OWN["output"].help))
    if faults:
        raise ConfigFault(faults)
    return parsed


def _lenient(rule: Rule) -> Rule:
    """Leave out of a rule's findings what only a training lacks."""
    if rule not in (run.required, run.model):
        return rule

    def kept(cfg: TrainConfig, requested: set[str]) -> Iterable[Finding]:
        return (
            problem
            for problem in rule(cfg, requested)
            if not (problem.about[0] in _UNNEEDED and problem.what == "is missing")
        )

    return kept


def _own_faults(parsed: Parsed) -> Iterator[Fault]:
    for name, (low, high, _) in LIMITS.items():
        if name in parsed.bare and not low <= number(parsed, name) <= high:
            yield Fault(f"--{name}", f"must lie in {low} to {high}, got {number(parsed, name)}", OWN[name].help)
    for name in ("output", "json"):
        if name in parsed.bare and Path(parsed.bare[name]).is_dir():
            yield Fault(f"--{name}", f"{parsed.bare[name]!r} is a folder", "give the name of a file")


def number(parsed: Parsed, name: str) -> int:
    """Return a flag's number, or its default."""
    return int(convert(OWN[name], [parsed.bare[name]])) if name in parsed.bare else LIMITS[name][2]


def work(parsed: Parsed) -> int:
    """Write the page and print its path."""
    from difftrain.device.choice import hide_unusable_npu, hold_autoload

    hold_autoload()
    hide_unusable_npu("cpu")
    from difftrain.train.inspect import inspect

    SIGNS.now("reading the dataset")
    output, facts = Path(parsed.bare["output"]), parsed.bare.get("json")
    epochs, pictures = number(parsed, "epochs"), number(parsed, "max_pictures")
    with writing(output, Path(facts or output)):
        print(inspect(parsed.config, output, epochs=epochs, pictures=pictures, facts=Path(facts) if facts else None))
    return 0


def _help(prog: str) -> str:
    sections = ("data", "captions", "validation")
    shown = [flag for flag in FLAGS.values() if flag.to.split(".")[0] in sections and flag.status == "offered"]
    return (
        f"usage: {prog} --output=FILE.html --train_data_dir=DIR --resolution=W,H [--flag=value ...]\n\n"
        "A page of counts, buckets, crops, captions as they will be used, duplicates and rejected files. Every flag of a training\n"
        "command is accepted; with a model's flags tokens are counted too.\n\n"
        + entries(OWN.values())
        + "\n"
        + entries(shown)
    )
