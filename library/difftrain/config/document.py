"""TOML and JSON as anybody may send it: bounded in length and depth, and every fault of it a ValueError.

It stands alone because every reader of a user's files begins here, and none of them knows the others.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

MAX_BYTES = 16 << 20  # no file of settings is as long
MAX_DEPTH = 32  # tables and lists inside one another


def toml_of(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError that says what is wrong with it."""
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    check_depth(tables)
    return tables


def json_of(text: str) -> Any:
    """Parse JSON. Raises ValueError that says what is wrong with it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    check_depth(value)
    return value


def text_of(path: Path) -> str:
    """Read a file of UTF-8. Raises OSError; ValueError where it is no text, or longer than any such file."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
    return content.decode("utf-8-sig")


def check_depth(value: Any) -> None:
    """Raise ValueError where tables and lists lie deeper inside one another than anybody means."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        containers = [
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        ]
        level, depth = [inner for container in containers for inner in container], depth + 1
