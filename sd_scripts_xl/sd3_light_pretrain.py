"""Pretrain SD3-Light: train.py with `train_type = "sd3_light_pretrain"` and `type = "sd3"`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "library"))  # runs from any folder, installed or not

from difftrain.cli.train import train_sd3_light

if __name__ == "__main__":
    sys.exit(train_sd3_light(sys.argv[1:], "sd3_light_pretrain.py"))
