"""`difftrain families`: which families there are, and what each is made of; read from their rows, without torch."""

from __future__ import annotations

import json
from typing import Any

from difftrain.cli.words import asks_for_help, exactly
from difftrain.config.door import guard
from difftrain.models.registry import FAMILIES, LATER

USAGE = """usage: difftrain families [--json]

List the families of models: name ([model] type, --family), parts, tasks, sizes of random models, what each trains.
--json: a list of objects, for scripts."""


def main(argv: list[str]) -> int:
    """Print the families."""
    if asks_for_help(argv):
        print(USAGE)
        return 0

    def work() -> int:
        exactly("families", [word for word in argv if word != "--json"])
        print(json.dumps(listed(), indent=2) if "--json" in argv else text())
        return 0

    return guard("difftrain families", work)


def listed() -> list[dict[str, Any]]:
    """Return every row as JSON has it; `trains` is empty of a family that is known as a form only."""
    return [
        {
            "name": name,
            "title": row.title,
            "network": row.network,
            "parts": dict(row.parts),
            "tasks": list(row.tasks),
            "objective": row.objective,
            "multiple": row.multiple,
            "sizes": list(row.sizes),
            "trains": list(row.trains),
        }
        for name, row in FAMILIES.items()
    ]


def text() -> str:
    """Return the same for people: a paragraph a family."""
    lines: list[str] = []
    for name, row in FAMILIES.items():
        parts = ", ".join(f"{part} {made_of.rpartition(':')[2]}" for part, made_of in row.parts.items())
        lines += [
            f"{name}: {row.title}, {', '.join(row.tasks)}",
            f"  trains      {', '.join(row.trains) or 'not built yet'}",
            f"  sizes       {', '.join(row.sizes)} (of random weights); pictures in multiples of {row.multiple} pixels",
            f"  parts       {parts}",
            "",
        ]
    return "\n".join([*lines, f"known, and not built yet: {', '.join(LATER)}"])
