"""Fine-tune Stable Diffusion with the flags of diffusers' example of this name: --help lists them, docs/text_to_image.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "library"))  # runs from any folder, installed or not

from difftrain.cli.train import train_text_to_image

if __name__ == "__main__":
    sys.exit(train_text_to_image(sys.argv[1:], "train_text_to_image.py"))
