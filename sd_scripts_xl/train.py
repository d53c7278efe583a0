"""Train what a TOML file names: --help lists the keys, docs/train_toml.md says what each means."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "library"))  # runs from any folder, installed or not

from difftrain.cli.train import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], "train.py"))
