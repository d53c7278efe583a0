"""Pretrain or fine-tune Stable Diffusion XL: --help lists the flags, docs/flags.md says what each means."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "library"))  # runs from any folder, installed or not
sys.path.append(str(ROOT))  # third_patch

from third_patch import apply_for  # noqa: E402

from difftrain.config.door import open_door  # noqa: E402
from difftrain.train.door import RULES, work  # noqa: E402

PROG = "sdxl_pretrain.py"


if __name__ == "__main__":
    sys.exit(open_door(PROG, sys.argv[1:], lambda parsed: work(parsed, PROG, apply_for), RULES))
