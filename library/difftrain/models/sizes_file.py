"""A JSON file of a model's sizes, as --init_from_config takes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from difftrain.contracts import ConfigFault, Fault


def read_sizes(choice: str, where: str, flavors: Iterable[str], sections: Iterable[str]) -> dict[str, Any]:
    """Read a file; flavors and sections are what would be right. Raises ConfigFault where it is none."""
    path = Path(choice)
    remedy = f"give {', '.join(flavors)} or a JSON file with the sections {', '.join(sections)}"
    if not path.is_file():
        raise ConfigFault([Fault(where, f"there is no file {choice!r}", remedy)])
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigFault([Fault(where, f"{choice} is not JSON: {error}", remedy)]) from None
    if not isinstance(content, dict):
        raise ConfigFault([Fault(where, f"{choice} holds a {type(content).__name__}, not an object", remedy)])
    return content
