"""`difftrain recipes`: list the recipes that come with difftrain, and copy one to train with or to edit."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftrain.cli.words import asks_for_help, positional, writing
from difftrain.config.door import guard, print_notes
from difftrain.config.parse_flags import scan
from difftrain.config.paths import expanded, recipes_dir
from difftrain.config.render.help import entries
from difftrain.config.schema.names import did_you_mean
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.io.files import write_text

PROG = "difftrain recipes"
FLAGS: dict[str, Row] = {
    "overwrite": Row("overwrite", "switch", "", "replace existing files"),
    "schema": Row("schema", "switch", "", "write schemas/ too, by which an editor completes and checks keys"),
}
_DATA_TABLES = {"directory", "datasets"}  # what makes a TOML file one of a dataset
# How a recipe's comment starts a run in a checkout -> how an installed package does it; a launcher names a module.
_AS_INSTALLED = (
    (re.compile(r"python sd_scripts_xl/train\.py"), "difftrain train"),
    (re.compile(r"python sd_scripts_xl/sdxl_pretrain\.py"), "difftrain sdxl"),
    (re.compile(r"python sd_scripts_xl/(?:train_)?(sd3_light|text_to_image)(?:_pretrain)?\.py"), r"difftrain \1"),
    (re.compile(r"(deepspeed [^\n]*?)sd_scripts_xl/train\.py"), r"\1--module difftrain train"),
    (re.compile(r"sd_scripts_xl/train\.py"), "-m difftrain train"),
    (re.compile(r"sd_scripts_xl/sdxl_pretrain\.py"), "-m difftrain sdxl"),
    (re.compile(r"configs/(?:\w+/)+(\w+\.toml)"), r"\1"),
)
_STARTS_WITH = re.compile(r"difftrain (train|sdxl|sd3_light|text_to_image)\b")
_SCHEMA = re.compile(r"\A#:schema (?!\w+://)(\S+)[^\n]*\n+")
SCHEMAS_DIR = "schemas"  # as `difftrain schema --write schemas` has it


@dataclass(frozen=True)
class ShippedRecipe:
    """One recipe: "folder/name", its file, the family that it trains, what it says of itself, files that it names."""

    name: str
    path: Path
    family: str
    about: str
    beside: tuple[Path, ...]


def shipped() -> dict[str, ShippedRecipe]:
    """Return the recipes by name; files of datasets belong to the recipes that name them."""
    recipes = {}
    root = recipes_dir()
    for path in sorted((*root.glob("*/*.toml"), *root.glob("presets/*/*.toml"))):
        text, tables = path.read_text(encoding="utf-8", errors="replace"), dict[str, Any]()
        try:
            tables, about = tomllib.loads(text), _about(text)
        except tomllib.TOMLDecodeError as error:  # a checkout's recipes are there to be edited
            about = f"cannot be read as TOML: {error}"
        if _DATA_TABLES.isdisjoint(tables):
            name = path.relative_to(root).with_suffix("").as_posix()
            recipes[name] = ShippedRecipe(name, path, _family(tables, path), about, tuple(_beside(tables, path)))
    if not recipes:
        raise ConfigFault(
            [Fault(str(recipes_dir()), "has no recipe", "the installation is incomplete: install difftrain again")]
        )
    return recipes


def _family(tables: Mapping[str, Any], path: Path) -> str:
    model = tables.get("model")
    named = (model.get("type") or model.get("family")) if isinstance(model, dict) else None
    return str(named or path.parent.name)


def _about(text: str) -> str:
    """Return the first line that a file says of itself."""
    comments = (line[1:].strip() for line in text.splitlines() if line.startswith("#") and not line.startswith("#:"))
    return next(comments, "")


def _beside(values: Any, path: Path) -> Iterator[Path]:
    """Yield the files beside a recipe that its values name."""
    if isinstance(values, str):
        file = path.parent / values
        if values and "/" not in values and file.is_file():
            yield file
    elif isinstance(values, dict | list):
        for inner in values.values() if isinstance(values, dict) else values:
            yield from _beside(inner, path)


def main(argv: list[str]) -> int:
    """List the recipes, or copy one; return the exit code."""
    if asks_for_help(argv):
        print(_help())
        return 0
    return guard(PROG, lambda: _copy(argv[1:]) if argv[:1] == ["copy"] else _list(argv))


def _list(argv: list[str]) -> int:
    if argv:
        flag = argv[0].startswith("-")
        what = "no such flag" if flag else "no such command"
        remedy = f"{PROG} --help" if flag else did_you_mean(argv[0], ["copy"]) or f"{PROG} copy NAME [DIR]"
        raise ConfigFault([Fault(repr(argv[0]), what, remedy)])
    recipes = shipped().values()
    name_width, family_width = (max(map(len, column)) for column in zip(*((r.name, r.family) for r in recipes)))
    for recipe in recipes:
        print(f"{recipe.name:<{name_width}}  {recipe.family:<{family_width}}  {recipe.about}")
    return 0


def _copy(argv: list[str]) -> int:
    recipe, folder, switches = read(argv)
    schemas: dict[str, str] = {}
    if "schema" in switches:
        from difftrain.cli.documents import schema_text
        from difftrain.config.render.schema import SCHEMAS

        named = (_SCHEMA.match(file.read_text(encoding="utf-8")) for file in (recipe.path, *recipe.beside))
        names = dict.fromkeys(Path(match[1]).stem for match in named if match)
        schemas = {f"{SCHEMAS_DIR}/{name}.json": schema_text(name) for name in names if name in SCHEMAS}
    texts = {file.name: installed_text(file, folder, schemas) for file in (recipe.path, *recipe.beside)} | schemas

    # --- everything that stands in the way is said before anything is written
    if "overwrite" not in switches:
        differs = [name for name, text in texts.items() if not _is_free(folder / name, text)]
        remedy = f"give another folder, or {FLAGS['overwrite'].option} to replace it"
        if differs:
            raise ConfigFault([Fault(str(folder / name), "exists with different content", remedy) for name in differs])

    for name, text in texts.items():
        with writing(folder / name):
            print(write_text(folder / name, text))
    starts = _STARTS_WITH.search(texts[recipe.path.name])
    notes = [f"train with: difftrain {starts[1] if starts else 'train'} --config {folder / recipe.path.name}"]
    if not _SCHEMA.match(texts[recipe.path.name]):
        notes.append(f"for an editor that completes and checks keys, copy with {FLAGS['schema'].option}")
    print_notes(PROG, notes)
    return 0


def read(argv: list[str]) -> tuple[ShippedRecipe, Path, set[str]]:
    """Read the words after `copy`: recipe, folder, switches. Raises: ConfigFault with every fault."""
    words, remaining = positional(argv, FLAGS)
    scanned = scan(remaining, FLAGS)
    faults = list(scanned.faults)
    recipes = shipped()
    name = words[0].removeprefix("configs/").removesuffix(".toml") if words else ""
    if not words:
        faults.append(Fault("NAME", "is missing", f"{PROG} copy NAME [DIR]; {PROG} lists the names"))
    elif name not in recipes:
        faults.append(Fault(repr(words[0]), "no such recipe", _suggestion(name, recipes)))
    folder = Path(expanded(words[1])) if len(words) > 1 else Path()
    if folder.suffix == ".toml" or folder.is_file():
        faults.append(Fault(repr(words[1]), "is the name of a file", "give a folder: a recipe may be several files"))
    faults += [Fault(repr(word), f"is an unexpected argument of {PROG} copy") for word in words[2:]]
    if faults:
        raise ConfigFault(faults)
    return recipes[name], folder, set(scanned.words)


def _suggestion(name: str, recipes: Mapping[str, ShippedRecipe]) -> str:
    """Name the recipes that a wrong name may stand for: those of this last part or folder, else the nearest."""
    same = [
        known for known in recipes if name.rpartition("/")[2] == known.partition("/")[2] or name == Path(known).parts[0]
    ]
    if same and "/" not in name:
        return f"did you mean {' or '.join(same)}?"
    return did_you_mean(name, recipes) or f"{PROG} lists the names"


def installed_text(file: Path, folder: Path, schemas: Collection[str] = ()) -> str:
    """Return a recipe as it is copied to a folder: its comments name the commands of an installed package.

    schemas: files that are written beside it.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    for pattern, command in _AS_INSTALLED:
        text = pattern.sub(command, text)
    schema = _SCHEMA.match(text)  # a path from where the recipe was; editors report one that leads nowhere
    if schema and not (folder / schema[1]).is_file():
        beside = f"{SCHEMAS_DIR}/{Path(schema[1]).name}"
        is_there = beside in schemas or (folder / beside).is_file()
        text = (f"#:schema {beside}\n" if is_there else "") + text[schema.end() :]
    return text


def _is_free(path: Path, text: str) -> bool:
    """Tell whether a file is missing, or is what would be written."""
    try:
        return path.read_bytes() == text.encode()
    except (FileNotFoundError, NotADirectoryError):  # the latter is said where it is written
        return True
    except OSError:  # a folder, or closed to us
        return False


def _help() -> str:
    return (
        f"usage: {PROG}\n       {PROG} copy NAME [DIR] [--schema] [--overwrite]\n\n"
        "List the recipes: name, family, one line of each. copy: write one into DIR [the current folder], with the dataset\n"
        "file that it names, and print what was written. Relative paths in a recipe are looked up from the current folder,\n"
        "then from the recipe's own.\n\n" + entries(FLAGS.values())
    )
