"""Prepare the embedded demo: `python -m difftrain.train.demo --dataset=shapes`. Launchers call it before training."""

from __future__ import annotations

import argparse
import sys

from difftrain.contracts.errors import DifftrainError
from difftrain.device.choice import calm_threads, hide_unusable_npu, hold_autoload
from difftrain.train.demo.prepare import prepare
from difftrain.train.demo.recipe import SIZES


def main() -> int:
    """Prepare, and return the exit code."""
    parser = argparse.ArgumentParser(prog="difftrain.train.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dataset", choices=sorted(SIZES), default="shapes")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full demo")
    parser.add_argument("--data_only", action="store_true", help="make no model")
    asked = parser.parse_args()
    hold_autoload()
    calm_threads()
    hide_unusable_npu("cpu")
    try:
        prepare(asked.dataset, asked.scale, data_only=asked.data_only, say=lambda text: print(text, flush=True))
    except DifftrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
