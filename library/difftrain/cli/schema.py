"""`difftrain schema`: the JSON schema of the sectioned TOML."""

from __future__ import annotations

import json

from difftrain.cli.words import exactly
from difftrain.config.door import guard
from difftrain.config.sections import TrainConfig


def main(argv: list[str]) -> int:
    """Print the schema."""

    def work() -> int:
        exactly("schema", argv)
        print(json.dumps(TrainConfig.model_json_schema(), indent=2))
        return 0

    return guard("difftrain schema", work)
