"""`difftrain families`: which families there are, and what each is made of; read from their rows, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from difftrain.cli.words import alive, asks_for_help, exactly, writing
from difftrain.config.door import guard
from difftrain.config.render.schema import DEFAULT, SCHEMAS, schema
from difftrain.config.schema.names import did_you_mean
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.io.files import write_text
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
            f"  trains      {', '.join(row.trains)}",
            f"  sizes       {', '.join(row.sizes)} (of random weights); images in multiples of {row.multiple} pixels",
            f"  parts       {parts}",
            "",
        ]
    return "\n".join([*lines, f"known, not built yet: {', '.join(LATER)}"])


# --- `difftrain schema`: the JSON schema of one kind of file, their list, or all of them as files


SCHEMA_FLAGS = LIST, WRITE = ("list", "write")
SCHEMA_USAGE = """usage: difftrain schema [NAME]
       difftrain schema --list
       difftrain schema --write FOLDER

Print the JSON schema of a kind of TOML file, for editors: of train.py's where no name is given.
--list: the names, and which file each is of. --write: all of them into FOLDER, as NAME.json."""


def print_schema(argv: list[str]) -> int:
    """Print a schema or their list, or write all."""
    if asks_for_help(argv):
        print(SCHEMA_USAGE)
        return 0

    def work() -> int:
        if argv[:1] == [f"--{LIST}"]:
            exactly("schema --list", argv[1:])
            print("\n".join(f"{name:<14}  {file.about}" for name, file in SCHEMAS.items()))
            return 0
        if argv[:1] == [f"--{WRITE}"]:
            (folder,) = exactly("schema --write", argv[1:], "FOLDER")
            with writing(Path(folder)):
                for name in SCHEMAS:
                    print(write_text(Path(folder) / f"{name}.json", schema_text(name)))
            return 0
        print(schema_text(_schema_name(argv)), end="")
        return 0

    return guard("difftrain schema", work)


def _schema_name(argv: list[str]) -> str:
    """Return which schema is asked for. Raises ConfigFault."""
    if argv in ([], ["--train"]):  # --train: its name before there were several
        return DEFAULT
    (name,) = exactly("schema", argv, "NAME")
    if name not in SCHEMAS:
        remedy = did_you_mean(name, SCHEMAS) or f"one of {', '.join(SCHEMAS)}"
        raise ConfigFault([Fault(repr(name), "no such schema", remedy)])
    return name


def schema_text(name: str) -> str:
    """Return a schema as its file holds it."""
    return json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n"


# --- `difftrain report RUN_DIR`: report.html, from whatever a run has left so far


MOST_NAMED = 5  # runs of a folder that is none
REPORT_USAGE = """usage: difftrain report RUN_DIR

Write RUN_DIR/report.html from the files of a run, and name it. The run may still be running, or be stopped, killed
or failed: the page says which, and shows the last error."""


def build_report(argv: list[str]) -> int:
    """Build the page and name it."""

    if asks_for_help(argv):
        print(REPORT_USAGE)
        return 0

    def work() -> int:
        (folder,) = exactly("report", argv, "RUN_DIR")
        from difftrain.report.metrics import METRICS
        from difftrain.report.rebuild import rebuild
        from difftrain.report.report import REPORT
        from difftrain.report.sessions import FILE as SESSIONS
        from difftrain.watch.runs import find_runs

        run = Path(folder)
        if not any((run / name).is_file() for name in (METRICS, SESSIONS, REPORT)):
            names = [name for name in find_runs(run) if name != "."]
            if names:
                shown = [str(run / name) for name in names[:MOST_NAMED]] + ["..."] * (len(names) > MOST_NAMED)
                what = f"{folder!r} is not a run; {len(names)} run{'s'[: len(names) != 1]} {'is' if len(names) == 1 else 'are'} below it"
                raise ConfigFault([Fault("RUN_DIR", what, f"give one of them, the newest first: {', '.join(shown)}")])
        with writing(run):
            print(rebuild(run))
        return 0

    return guard("difftrain report", alive("difftrain report", work, "reading the run"))
