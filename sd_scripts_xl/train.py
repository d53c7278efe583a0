"""Train what a TOML file names: --help lists the keys, docs/train_toml.md says what each means."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "library"))  # runs from any folder, installed or not
sys.path.append(str(ROOT))  # third_patch

from third_patch import apply_for  # noqa: E402

from difftrain.config.parse_keys import open_train_door  # noqa: E402
from difftrain.demo.make import foreseen  # noqa: E402
from difftrain.train.door import RULES, work  # noqa: E402

PROG = "train.py"


if __name__ == "__main__":
    argv = sys.argv[1:]
    sys.exit(open_train_door(PROG, argv, lambda parsed: work(parsed, PROG, apply_for), RULES, demo=foreseen))
