"""A TOML file of train.py -> its keys, each with the place where it stands."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftrain.config.names import did_you_mean
from difftrain.config.toml import origin
from difftrain.config.toml_keys import TABLES, key_at
from difftrain.config.train_values import Item, Layer
from difftrain.contracts.errors import Fault

Table = dict[str, Any]


def read(path: Path) -> Layer:
    """Read a file into values by field, with every fault of it."""
    layer = Layer()
    try:
        tables = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        layer.faults.append(Fault(f"--config={path}", "no such file", "give a TOML file, such as one of configs/"))
        return layer
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        layer.faults.append(Fault(f"--config={path}", f"cannot be read as TOML: {error}"))
        return layer
    return layer.take(_items(path, tables, layer))


def _items(path: Path, tables: Table, layer: Layer) -> Iterator[Item]:
    for name, value in tables.items():
        if name == "ema" and value == {}:  # the table itself asks for an average
            yield Item(name, "enable", True, f"{path} [{name}]", path.parent)
        elif name in TABLES and isinstance(value, dict):
            for key, inner in value.items():
                yield Item(name, key, inner, origin(path, name, key), path.parent)
        elif key_at("", name) is not None or not _is_table(value):
            if name in TABLES and key_at("", name) is None:
                layer.faults.append(Fault(f"{path} {name}", "is a table", f"write [{name}] above its keys"))
            else:
                yield Item("", name, value, f"{path} {name}", path.parent)
        else:
            remedy = (
                f"it is one table: write [{name}]"
                if name in TABLES
                else did_you_mean(name, TABLES) or f"known are {', '.join(sorted(TABLES))}"
            )
            if name in ("datasets", "directory", "general"):
                remedy = "a data set's file is another one: name it as dataset in [output]"
            what = "is a list of tables" if name in TABLES else "no such table"
            layer.faults.append(Fault(f"{path} [{name}]", what, remedy))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))
