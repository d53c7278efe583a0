"""`difftrain schema`: the JSON schema of the sectioned TOML; with --train that of every key of train.py."""

from __future__ import annotations

import json

from difftrain.cli.words import asks_for_help, exactly
from difftrain.config.door import guard
from difftrain.config.schema.sections import TrainConfig


def main(argv: list[str]) -> int:
    """Print the schema."""

    if asks_for_help(argv):
        print(
            "usage: difftrain schema [--train]\n\nPrint the JSON schema of the TOML; --train: of every key of train.py."
        )
        return 0

    def work() -> int:
        exactly("schema", [word for word in argv if word != "--train"])
        schema = TrainConfig.model_json_schema()
        if "--train" in argv:
            from difftrain.config.render.keys import schema_of_files

            schema = schema_of_files()
        print(json.dumps(schema, indent=2))
        return 0

    return guard("difftrain schema", work)
