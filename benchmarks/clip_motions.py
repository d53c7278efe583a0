"""What a model of clips takes from words for motion: the loss on unseen clips with their captions over that with another motion.

    python benchmarks/clip_motions.py        some ten minutes on two cores

Trains the recipe configs/wan/emoji.toml from nothing: a small random Wan, emoji under a camera that pans or zooms, whose
captions name the motion. Every emoji comes under every motion, but of one in four a motion is held out. The loss of the averaged weights on those
clips counts: with their captions, with captions that name the opposite motion, and beside it that of a Gaussian with
the mean and variance of the training latents, which knows no words (demo/judge.py). `--sheet` writes
frames of samples. Exit code 1 where a limit is not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import numpy as np
import torch
from figures import Report
from PIL import Image

from difftrain.config.parse_keys import parse
from difftrain.data.loader import make_loader
from difftrain.data.media.clips import decode_clip
from difftrain.data.prepare import global_batches, make_plan, open_data, prepare
from difftrain.demo.clips import FRAMES, RATE
from difftrain.demo.judge import gaussian
from difftrain.demo.prepare import make
from difftrain.evaluation.losses import TENTHS, value_at
from difftrain.models.registry import make_family

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "configs" / "wan" / "emoji.toml"
LIMIT = 1.1
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up", "in": "out", "out": "in"}
SIDE, GAP, SHOWN = 64, 4, 5
REPEATS = 16  # draws of noise for each unseen clip, to measure the Gaussian


def with_wrong_motions(folder: Path) -> None:
    """Copy the unseen clips with captions that name the opposite motion, and write the dataset of both."""
    unseen, wrong = folder / "pictures" / "unseen", folder / "pictures" / "wrong"
    if not wrong.is_dir():
        shutil.copytree(unseen, wrong)
        for path in wrong.glob("*.txt"):
            *words, motion = path.read_text(encoding="utf-8").split()
            path.write_text(" ".join([*words, OPPOSITE[motion]]) + "\n", encoding="utf-8")
    text = (folder / "unseen.toml").read_text(encoding="utf-8")
    (folder / "wrong.toml").write_text(text.replace("pictures/unseen", "pictures/wrong"), encoding="utf-8")


def words_of(folder: Path, steps: int) -> list[str]:
    """Return the command line of the recipe, with both sets."""
    sets = ", ".join(f"{{name = '{name}', config = '{folder / name}.toml'}}" for name in ("unseen", "wrong"))
    words = [f"--config={RECIPE}", f"--eval.eval_datasets=[{sets}]"]
    return [*words, *([f"--training.max_steps={steps}"] if steps else [])]


def trained(home: Path, words: list[str]) -> Path:
    """Run the recipe in `home`; return the directory of the run."""
    subprocess.run([sys.executable, str(ROOT / "sd_scripts_xl" / "train.py"), *words], cwd=home, check=True)
    output = tomllib.loads(RECIPE.read_text(encoding="utf-8"))["output"]["output_dir"]
    return max((home / output).iterdir(), key=lambda run: run.name)


@torch.no_grad()
def latents_of(words: list[str], dataset: Path) -> tuple[torch.Tensor, list[float]]:
    """Return the latents of a dataset's clips, decoded and encoded anew, and the nine quantiles of the time."""
    online = ["--cache.latents_to_disk=false", "--cache.text_to_disk=false", f"--output.dataset={dataset}"]
    cfg = parse([*words, *online]).config
    family: Any = make_family(cfg)
    parts = family.load()
    parts.load("vae")
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    plan = make_plan(data, cfg, global_batches(cfg, 1))
    loader = make_loader(
        data, plan, family.features, family.tokenizer(parts), cfg, dp_rank=0, dp_size=1, first_step=0, last_step=plan.steps(0)
    )  # fmt: skip
    latents = torch.cat([family.latents(batch, parts).float() for step in loader for batch in step])
    bucket, spec = data.tables.training[0].bucket, family.features.draws["timestep"]
    return latents, [float(value_at(spec, tenth, bucket)) for tenth in TENTHS]


def gaussian_loss(training: torch.Tensor, unseen: torch.Tensor, times: list[float]) -> float:
    """Return the loss of the training set's Gaussian on unseen latents, the mean over quantiles of the time."""
    x0 = unseen.repeat(REPEATS, *[1] * (unseen.ndim - 1))
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
    losses = []
    for at in times:
        x_t, t = (1 - at) * x0 + at * noise, torch.full((len(x0),), at)
        velocity = gaussian(x_t, t, training.mean(0), training.var(0))
        losses.append(float((velocity - (noise - x0)).square().mean()))
    return float(np.mean(losses))


def write_sheet(samples: list[Path], real: list[Path], path: Path) -> None:
    """Put some frames of samples and of the real clips side by side: a row a prompt, the sample to the left."""
    rows = []
    for sample, clip in zip(samples, real, strict=True):
        both = [decode_clip(file, first=0, frames=FRAMES, fps=Fraction(RATE)) for file in (sample, clip)]
        rows.append([frames[number] for frames in both for number in np.linspace(0, FRAMES - 1, SHOWN).astype(int)])
    sheet = Image.new("RGB", (2 * SHOWN * (SIDE + GAP) + 3 * GAP, len(rows) * (SIDE + GAP) + GAP), (160, 160, 160))
    for y, row in enumerate(rows):
        for x, frame in enumerate(row):
            left = GAP + x * (SIDE + GAP) + (2 * GAP if x >= SHOWN else 0)
            sheet.paste(Image.fromarray(frame), (left, GAP + y * (SIDE + GAP)))
    sheet.save(path, optimize=True)


def main() -> int:
    """Train, print the losses and their ratios, and say whether the limits are reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=0, help="the recipe's own unless given")
    parser.add_argument("--folder", type=Path, help="keep data, model and run here")
    parser.add_argument("--sheet", type=Path, help="write frames of the last samples, a PNG")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clip_motions-") as aside:
        home = (options.folder or Path(aside)).resolve()
        folder = home / "output" / "wan" / "emoji"
        if not (folder / "unseen.toml").is_file():
            make("clips", folder, 1.0, print, family="wan")
        with_wrong_motions(folder)
        words = words_of(folder, options.steps)
        began = time.monotonic()
        run = trained(home, words)
        seconds = time.monotonic() - began
        found = dict(json.loads((run / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()[-1]))
        os.chdir(home)  # the recipe names its folders from where it was started
        training, times = latents_of(words, folder / "train.toml")
        unseen, _ = latents_of(words, folder / "unseen.toml")
        linear = gaussian_loss(training, unseen, times)
        if options.sheet:
            samples = sorted(run.glob(f"sample/*_{found['step']:06d}_[0-9]*.mp4"))
            prompts = (folder / "prompts.txt").read_text(encoding="utf-8").splitlines()
            by_caption = {
                path.read_text(encoding="utf-8").strip(): path for path in (folder / "pictures").glob("*/*.txt")
            }
            real = [by_caption[prompt.partition(" --")[0].strip()].with_suffix(".mp4") for prompt in prompts if prompt]
            write_sheet(samples, real, options.sheet)

    report, kind = Report(), "ema_loss" if "unseen/ema_loss" in found else "loss"
    own, other = found[f"unseen/{kind}"], found[f"wrong/{kind}"]
    report.log(f"wan, {found['step']} steps, with caches", seconds, "s")
    report.log(f"loss of {found['unseen/samples']} unseen clips", own, "")
    report.log("the same with the opposite motion in their captions", other, "")
    report.log("of the Gaussian of the training latents, which knows no words", linear, "")
    report.check("the model over the Gaussian", own / linear, 1.0, "", "below 1 asked")
    report.check(
        "its own motion over the opposite", own / other, 1 / LIMIT, "", f"{other / own:.3f} x better, {LIMIT} asked"
    )
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
