"""Pretrain or fine-tune Stable Diffusion XL: --help lists the flags, docs/flags.md says what each means."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "library"))  # runs from any folder, installed or not

from difftrain.cli.train import train_sdxl

if __name__ == "__main__":
    sys.exit(train_sdxl(sys.argv[1:], "sdxl_pretrain.py"))
