"""The sectioned TOML of a configuration: recipes under configs/, and the record that every run keeps."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from difftrain.config.names import did_you_mean
from difftrain.config.sections import TrainConfig
from difftrain.config.validate import Misfit, Values, default_of, misfit_of, section_class
from difftrain.contracts.errors import ConfigFault, Fault


def dump(cfg: TrainConfig, *, only_changed: bool = False) -> str:
    """Write a configuration as TOML; a field without a value is left out, which load reads as no value."""
    tables = []
    for section in TrainConfig.model_fields:
        lines = []
        for field, value in getattr(cfg, section):
            if value is None or (only_changed and value == default_of(f"{section}.{field}")):
                continue
            lines.append(f"{field} = {value_text(value)}\n")
        if lines:
            tables.append(f"[{section}]\n{''.join(lines)}")
    return "\n".join(tables)


def value_text(value: Any) -> str:
    """Write one value as TOML does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # finite: the sections admit no other
    if isinstance(value, tuple):
        return f"[{', '.join(value_text(item) for item in value)}]"
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
        tables = tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return {}, [Fault(str(path), "no such file", "give a TOML file such as configs/sdxl/base.toml")]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
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
    misfits: list[Misfit] = [(section, field, "must not be a date, a time or a table", "") for field in odd]
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
    return isinstance(value, str | bool | int | float) or (isinstance(value, list) and all(_is_plain(v) for v in value))
