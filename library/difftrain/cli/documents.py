"""`difftrain families`: which families there are, and what each is made of; read from their rows, without torch."""

from __future__ import annotations

import json
from typing import Any

from difftrain.cli.words import asks_for_help, exactly, run_folder
from difftrain.config.door import guard
from difftrain.config.render.schema import schema_of_files, schema_of_sections
from difftrain.models.registry import FAMILIES, LATER

FAMILIES_USAGE = """usage: difftrain families [--json]

List the families of models: name ([model] type, --family), parts, tasks, sizes of random models, what each trains.
--json: a list of objects, for scripts."""


def print_families(argv: list[str]) -> int:
    """Print the families."""
    if asks_for_help(argv):
        print(FAMILIES_USAGE)
        return 0

    def work() -> int:
        exactly("families", [word for word in argv if word != "--json"])
        print(json.dumps(family_rows(), indent=2) if "--json" in argv else family_text())
        return 0

    return guard("difftrain families", work)


def family_rows() -> list[dict[str, Any]]:
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


def family_text() -> str:
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


# --- `difftrain schema`: the JSON schema of the sectioned TOML; with --train that of every key of train.py


def print_schema(argv: list[str]) -> int:
    """Print the schema."""

    if asks_for_help(argv):
        print(
            "usage: difftrain schema [--train]\n\nPrint the JSON schema of the TOML; --train: of every key of train.py."
        )
        return 0

    def work() -> int:
        exactly("schema", [word for word in argv if word != "--train"])
        schema = schema_of_files() if "--train" in argv else schema_of_sections()
        print(json.dumps(schema, indent=2))
        return 0

    return guard("difftrain schema", work)


# --- `difftrain report RUN_DIR`: report.html anew, from the files that a run left


def build_report(argv: list[str]) -> int:
    """Build the page and name it."""

    if asks_for_help(argv):
        print("usage: difftrain report RUN_DIR\n\nBuild report.html anew from the files that a run left, and name it.")
        return 0

    def work() -> int:
        (folder,) = exactly("report", argv, "RUN_DIR")
        from difftrain.report.report import REPORT
        from difftrain.report.run_page import build_html

        print(build_html(run_folder(folder, REPORT)))
        return 0

    return guard("difftrain report", work)
