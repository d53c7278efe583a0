"""What a model that edits takes from its reference: the loss on unseen pairs with their own over that with another one.

    python benchmarks/edit_pairs.py                            Flux.1 Kontext, some ten minutes on two cores
    python benchmarks/edit_pairs.py --family=qwen_image_edit   the same of Qwen-Image-Edit, whose encoder sees the reference

Trains the recipe configs/FAMILY/emoji.toml from nothing: a small random model, emoji in two styles, each drawn from the
other. One emoji in sixteen is not trained on. Their loss of the averaged weights counts, with the reference that belongs to
them and with that of another emoji. `--sheet` writes references, samples and the real images. Exit code 1 below the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

from figures import Report
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1.2
SIDE, GAP = 64, 4


def trained(family: str, home: Path, steps: int) -> Path:
    """Run the recipe with its folders in `home`; return the directory of the run."""
    recipe = ROOT / "configs" / family / "emoji.toml"
    words = [f"--config={recipe}", *([f"--training.max_steps={steps}"] if steps else [])]
    subprocess.run([sys.executable, str(ROOT / "sd_scripts_xl" / "train.py"), *words], cwd=home, check=True)
    output = tomllib.loads(recipe.read_text(encoding="utf-8"))["output"]["output_dir"]
    return max((home / output).iterdir(), key=lambda run: run.name)


def last_losses(run: Path) -> dict[str, Any]:
    """Return the last line of a run's evaluation."""
    return dict(json.loads((run / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()[-1]))


def write_sheet(shown: Path, samples: list[Path], path: Path) -> None:
    """Put references, samples and the real images side by side, a row a prompt."""
    rows = []
    for number, sample in enumerate(samples):
        (reference,) = (file for file in shown.glob(f"{number}.*") if file.suffix != ".txt")
        (target,) = shown.glob(f"{number}_target.*")
        rows.append([_on_white(file) for file in (reference, sample, target)])
    sheet = Image.new("RGB", (3 * (SIDE + GAP) + GAP, len(rows) * (SIDE + GAP) + GAP), (160, 160, 160))
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            sheet.paste(image, (GAP + x * (SIDE + GAP), GAP + y * (SIDE + GAP)))
    sheet.save(path, optimize=True)


def _on_white(file: Path) -> Image.Image:
    image = Image.open(file, formats=("PNG", "WEBP")).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)


def main() -> int:
    """Train, print the losses and their ratio, and say whether the limit is reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="flux_kontext")
    parser.add_argument("--steps", type=int, default=0, help="the recipe's own unless given")
    parser.add_argument("--folder", type=Path, help="keep data, model and run here")
    parser.add_argument("--sheet", type=Path, help="write the images of the last samples, a PNG")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edit_pairs-") as aside:
        home = options.folder or Path(aside)
        home.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        run = trained(options.family, home, options.steps)
        seconds, found = time.monotonic() - began, last_losses(run)
        if options.sheet:
            samples = sorted(run.glob(f"sample/*_{found['step']:06d}_[0-9]*.png"))
            write_sheet(run.parents[1] / "pictures" / "shown", samples, options.sheet)

    report = Report()
    own, other = found["unseen/ema_loss"], found["mismatched/ema_loss"]
    report.log(f"{options.family}, {found['step']} steps, with data and model", seconds, "s")
    report.log(f"loss of {found['unseen/samples']} unseen pairs", own, "")
    report.log("the same with references of other emoji", other, "")
    report.check("the first over the second", own / other, 1 / LIMIT, "", f"{other / own:.3f} x better, {LIMIT} asked")
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
