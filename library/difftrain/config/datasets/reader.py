"""Reading a data set TOML strictly: types, unknown and misplaced keys are judged by the one table of keys.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from difftrain.config.datasets.datasets import Resolved
from difftrain.config.datasets.keys import KEYS_OF, RENAMED, DatasetKey, File
from difftrain.config.document import json_of, toml_of
from difftrain.config.paths import bytes_of
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.sections import DatasetSection, Section, SubsetSection, TrainConfig
from difftrain.config.schema.validate import section_class, show, unsupported_value, wrong_in
from difftrain.config.spellings.flags import FLAGS
from difftrain.contracts.errors import Fault

Table = dict[str, Any]
_SECTIONS: dict[str, type[Section]] = {"dataset": DatasetSection, "subset": SubsetSection}  # that no run has by a name


class TomlReader:
    """One reading of one file. A value that does not fit is a fault, and left out so that the rest can be judged."""

    file: ClassVar[File]

    def __init__(self, path: Path, cfg: TrainConfig) -> None:
        self.path, self.cfg, self.out = path, cfg, Resolved()

    def tables(self, where: str) -> Table | None:
        """Read the file; None where that cannot be done. where: what messages call it."""
        of_kohya_as_json = self.file == "kohya" and self.path.suffix.lower() == ".json"
        kind = "JSON" if of_kohya_as_json else "TOML"
        try:
            text = bytes_of(self.path).decode("utf-8-sig")
            tables = json_of(text) if of_kohya_as_json else toml_of(text)
            if isinstance(tables, dict):
                return tables
            self.out.faults.append(Fault(where, "must be an object", '{"general": {...}, "datasets": [...]}'))
        except FileNotFoundError:
            self.out.faults.append(Fault(where, "no such file", "give a TOML file of datasets"))
        except (OSError, ValueError) as error:
            self.out.faults.append(Fault(where, f"cannot be read as {kind}: {error}"))
        return None

    def fault(self, location: str, what: str, remedy: str = "") -> None:
        self.out.faults.append(Fault(f"{self.path} {location}" if location else str(self.path), what, remedy))

    def note(self, location: str, what: str) -> None:
        self.out.notes.append(f"{self.path} {location}: {what}")

    def is_table(self, value: Any, header: str, location: str) -> bool:
        """Tell whether a value is a table; anything else is a fault."""
        if not isinstance(value, dict):
            self.fault(location, "must be a table", f"write {header} above its keys")
        return isinstance(value, dict)

    def checked(self, table: Table, header: str, location: str) -> Table:
        """Return the entries of a table that are right. header: what tables of its kind are called, "" above all."""
        right = {}
        for name, value in table.items():
            if wrong := misfit(self.file, header, name, value):
                where = f"{location} {name}"
                self.fault(where if self.file == "kohya" else where.strip(), *wrong)
            else:
                right[name] = value
        return right


def misfit(file: File, table: str, name: str, value: Any) -> tuple[str, str] | None:
    """Say what is wrong with an entry of a table, and what would be right; None where it is right."""
    key = KEYS_OF[file].get(name)

    # its name
    if key is None:
        if name in RENAMED[file]:
            return "no such key", f"did you mean {RENAMED[file][name]}?"
        if file == "kohya" and name in FLAGS:
            return "no such key", f"give it on the command line: {FLAGS[name].option}"
        known = [other for other, entry in KEYS_OF[file].items() if table in entry.tables]
        return "no such key", did_you_mean(name, known) or f"known here are {', '.join(known)}"
    if table not in key.tables:
        return "does not belong here", f"put it into {key.tables[-1]}"

    # its value: of the key's own kind, which each file's messages say in their way, else whatever the field takes
    if what := unsupported_value(value):
        return what, ""
    if any(type(value) is type(passing) and value == passing for passing in key.passes):
        return None
    if key.kind and (form := key.kind(value)):
        expected, got = f"must be {form}", show(value)
        return (f"{expected}, got {got}", "") if file == "kohya" else (f"is {got}", expected)
    if key.status == "refused":
        return f"is {show(value)}: {key.why}", key.remedy
    if value == "" and key.filled:
        return "must not be empty", ""
    if key.kind:
        return None
    name = key.to.partition(".")[0]
    section = _SECTIONS.get(name) or section_class(name)
    try:
        section.model_validate_json(json.dumps({key.field: converted(key, value)}), strict=True)
    except ValidationError as error:
        what, remedy = wrong_in(section, error.errors(include_url=False)[0])
        return what, remedy or key.remedy
    return None


def converted(key: DatasetKey, value: Any) -> Any:
    """Return a value as its field has it: one number of a resolution is a square, an empty text is none."""
    if key.name == "resolution" and isinstance(value, int) and not isinstance(value, bool):
        return [value, value]
    return None if value == "" else value
