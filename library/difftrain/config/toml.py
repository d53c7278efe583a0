"""The sectioned TOML of a configuration: recipes under configs/, and the record that every run keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from difftrain.config.document import text_of, toml_of
from difftrain.config.paths import recipes_named
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.sections import Section, TrainConfig
from difftrain.config.schema.validate import Misfit, Values, misfit_of, section_class
from difftrain.contracts.errors import ConfigFault, Fault


def dump(cfg: TrainConfig, *, only_changed: bool = False) -> str:
    """Write a configuration as TOML; a field without a value is left out, which load reads as no value."""
    return "\n".join(
        table for name in TrainConfig.model_fields for table in _tables(name, getattr(cfg, name), only_changed)
    )


def _tables(name: str, section: Section, only_changed: bool, *, one_of_many: bool = False) -> Iterator[str]:
    """Write a section: its own values, then the sections in it, which TOML wants behind them."""
    lines, inner = [], []
    for field, value in section:
        if value is None or (only_changed and value == type(section).model_fields[field].default):
            continue
        if isinstance(value, Section):
            inner += list(_tables(f"{name}.{field}", value, only_changed))
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for table in value:
                inner += list(_tables(f"{name}.{field}", table, only_changed, one_of_many=True))
        else:
            lines.append(f"{field} = {value_text(value)}\n")
    if lines or one_of_many:
        yield f"{f'[[{name}]]' if one_of_many else f'[{name}]'}\n{''.join(lines)}"
    yield from inner


def value_text(value: Any) -> str:
    """Write one value as TOML does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # finite: the sections admit no other
    if isinstance(value, tuple | list):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{value_text(key)} = {value_text(item)}' for key, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load(path: Path) -> TrainConfig:
    """Read a configuration that dump wrote, or a recipe.

    Raises: ConfigFault with every fault of the file.
    """
    values, faults = read(path)
    if faults:
        raise ConfigFault(faults)
    return TrainConfig.model_validate(values)


def read(path: Path) -> tuple[Values, list[Fault]]:
    """Read a file into values that fit their fields, and the faults of all others."""
    try:
        tables = toml_of(text_of(path))
    except FileNotFoundError:
        return {}, [Fault(str(path), "no such file", f"give a TOML file, such as one of {recipes_named()}")]
    except (OSError, ValueError) as error:
        return {}, [Fault(str(path), f"cannot be read as TOML: {error}")]
    values: Values = {}
    faults: list[Fault] = []
    for section, table in tables.items():
        if section not in TrainConfig.model_fields:
            remedy = (
                did_you_mean(section, TrainConfig.model_fields) or f"known are {', '.join(TrainConfig.model_fields)}"
            )
            faults.append(Fault(f"{path} [{section}]", "no such table", remedy))
        elif not isinstance(table, dict):
            faults.append(Fault(f"{path} {section}", "is a table", f"write [{section}] above its keys"))
        else:
            values[section], misfits = _read_table(section, table)
            faults += [Fault(origin(path, *misfit[:2]), *misfit[2:]) for misfit in misfits]
    return values, faults


def origin(path: Path | str, section: str, field: str) -> str:
    """Name the place of a key."""
    return f"{path} [{section}] {field}"


def _read_table(section: str, table: dict[str, Any]) -> tuple[dict[str, Any], list[Misfit]]:
    """Check a table strictly: a number in quotes is not a number, unlike on a command line."""
    odd = {field: value for field, value in table.items() if not _is_plain(value)}
    plain = {field: value for field, value in table.items() if field not in odd}
    misfits: list[Misfit] = [(section, field, "must not be a date or a time", "") for field in odd]
    cls = section_class(section)
    try:
        cls.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
        misfits += dict.fromkeys(misfit_of(section, detail) for detail in details)
        bad = {str(detail["loc"][0]) for detail in details}
        plain = {field: value for field, value in plain.items() if field not in bad}
    return plain, misfits


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | bool | int | float)
