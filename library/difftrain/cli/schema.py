"""`difftrain schema`: the JSON schema of the sectioned TOML; with --train that of every key of train.py."""

from __future__ import annotations

import json

from difftrain.cli.words import asks_for_help, exactly
from difftrain.config.door import guard
from difftrain.config.render.schema import schema_of_files, schema_of_sections


def main(argv: list[str]) -> int:
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
