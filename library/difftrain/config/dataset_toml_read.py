"""Reading diffusion-pipe's data set TOML: every key and value checked, without a look at what the file names."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from difftrain.config.dataset_toml_keys import LISTS, SPELLINGS, misplaced, wrong
from difftrain.config.there import bytes_of
from difftrain.config.unfit import unfit
from difftrain.contracts.errors import Fault

Table = dict[str, Any]


@dataclass
class Directory:
    """One directory with the values of all levels, each checked. place: what messages call its table.

    faulted: keys that are there with a value that cannot be used. own: keys of the directory itself.
    """

    place: str
    values: Table
    faulted: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)

    def where(self, name: str) -> str:
        """Return what messages call a key: by its table, or alone where it stands above all directories."""
        return f"{self.place} {name}" if name in self.own or name not in self.values else name


def read(path: Path) -> tuple[list[Directory], list[Fault]]:
    """Read a file: its directories, and what is wrong with its keys and values."""
    faults: list[Fault] = []
    tables = tables_of(path, faults)
    return ([] if tables is None else directories_of(path, tables, faults)), faults


def is_kohyas(tables: Table) -> bool:
    """Tell kohya's data set TOML, whose sources are subsets, from diffusion-pipe's."""
    datasets = tables.get("datasets")
    listed = datasets if isinstance(datasets, list) else [datasets]
    return "general" in tables or any(isinstance(each, dict) and "subsets" in each for each in listed)


def tables_of(path: Path, faults: list[Fault]) -> Table | None:
    """Read a file as TOML; None where that cannot be done."""
    try:
        return tomllib.loads(bytes_of(path).decode("utf-8-sig"))
    except FileNotFoundError:
        faults.append(Fault(str(path), "no such file", "give a TOML file of data sets"))
    except (OSError, ValueError) as error:
        faults.append(Fault(str(path), f"cannot be read as TOML: {error}"))
    return None


def directories_of(path: Path, tables: Table, faults: list[Fault]) -> list[Directory]:
    """Check every key and value; what does not fit is a fault, and left out so that the rest can be judged."""

    def fault(place: str, what: str, remedy: str = "") -> None:
        faults.append(Fault(f"{path} {place}".rstrip(), what, remedy))

    def checked(table: Table, place: str, in_directory: bool) -> Directory:
        right: Table = {}
        bad: set[str] = set()
        for name, value in table.items():
            bad_value = unfit(value)
            what = misplaced(name, in_directory=in_directory) or ((bad_value, "") if bad_value else wrong(name, value))
            if what:
                fault(f"{place} {name}".strip(), *what)
                bad.add(name)
            else:
                right[name] = value
        for one, other in SPELLINGS.items():
            if other in right:
                if right.setdefault(one, right[other]) != right[other]:
                    fault(
                        f"{place} {other}".strip(),
                        f"contradicts {one}: {right[other]!r} and {right[one]!r}",
                        "give one",
                    )
                del right[other]
            bad |= {one} if other in bad else set()
        return Directory(place, right, bad)

    lists = [name for name in LISTS if name in tables]
    if len(lists) != 1:
        what = "both [[directory]] and [[datasets]] are there" if lists else "no directory is named"
        fault("", what, "begin each with [[directory]]")
    above = checked({name: value for name, value in tables.items() if name not in LISTS}, "", False)
    found = []
    for name in lists:
        listed = tables[name] if isinstance(tables[name], list) else [tables[name]]
        for number, table in enumerate(listed, 1):
            place = f"[[{name}]] {number}"
            if not isinstance(table, dict):
                fault(place, "must be a table", f"write [[{name}]] above its keys")
                continue
            own = checked(table, place, True)
            values, bad = {**above.values, **own.values}, above.faulted | own.faulted
            found.append(Directory(place, values, bad, set(own.values)))
    return found
