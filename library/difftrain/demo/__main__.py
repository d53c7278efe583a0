"""Prepare the embedded demo: `python -m difftrain.demo --dataset=shapes`. Launchers call it before training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from difftrain.config.hidden_imports import hold_back, pause_collection
from difftrain.contracts.errors import DifftrainError
from difftrain.demo.make import DEFAULT_FAMILY, KINDS
from difftrain.demo.prepare import ALL, make, prepare
from difftrain.demo.recipe import SIZES
from difftrain.device.choice import calm_threads, hide_unusable_npu, hold_autoload
from difftrain.models.registry import FAMILIES
from difftrain.report.progress import SIGNS


def _log(text: str) -> None:
    SIGNS.heard()
    print(text, flush=True)


def main() -> int:
    """Prepare, and return the exit code."""
    parser = argparse.ArgumentParser(prog="difftrain.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dataset", choices=sorted(SIZES), default="shapes")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full demo")
    parser.add_argument("--data_only", action="store_true", help="make no model")
    parser.add_argument(
        "--make", choices=KINDS, help="of a recipe of train.py, in --folder, in place of SDXL's in the user's cache"
    )
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--family", choices=sorted(FAMILIES), default=DEFAULT_FAMILY, help="of the model in --folder")
    parser.add_argument("--part", action="append", choices=ALL, help="of it: all unless given")
    options = parser.parse_args()

    # the CPU makes it: no NPU library is loaded, and waiting threads leave the cores to others
    hold_autoload()
    hold_back()
    pause_collection()  # until a VAE is fitted
    calm_threads()
    hide_unusable_npu("cpu")

    # one recipe's parts in a folder of their own, or the whole demo in the user's cache
    try:
        with SIGNS.printed_by(_log), SIGNS.doing("making the demo's data and model"):
            if options.make and options.folder:
                make(options.make, options.folder, options.scale, _log, tuple(options.part or ALL), options.family)
            else:
                prepare(options.dataset, options.scale, data_only=options.data_only, log=_log)
    except DifftrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
