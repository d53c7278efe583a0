"""Train a LoRA of Stable Diffusion XL with kohya's command line: docs/adapters.md, and --help for the flags."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "library"))  # runs from any folder, installed or not

from difftrain.cli.train import train_sdxl_network

if __name__ == "__main__":
    sys.exit(train_sdxl_network(sys.argv[1:], "sdxl_train_network.py"))
