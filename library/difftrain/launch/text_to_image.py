"""The Stable Diffusion 1.4 baseline: train_text_to_image.py with the flags of a published log, or its demo.

101 steps at 512 px, 8 images a card and 4 accumulated; the time is that of step 100, and the loss of step 101 is to be
below what that log ended with. Imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from difftrain.launch.flags import LaunchFlags, demo_scale, to_door
from difftrain.launch.machines import LIBRARY, Where, cores, with_library
from difftrain.launch.recipes import DEMOS, SELF_CONTAINED, WEIGHTS, LaunchRecipe

if TYPE_CHECKING:
    from pathlib import Path

    from difftrain.config import TrainConfig

NAME = "text_to_image_sd1-4"
DOOR = "train_text_to_image.py"
STEPS, TIMED_STEP, LOSS_TARGET = 101, 100, 0.0456
BASELINE: dict[str, object] = {
    "use_ema": True,
    "resolution": 512,
    "center_crop": True,
    "random_flip": True,
    "train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "max_train_steps": STEPS,
    "learning_rate": "1e-05",
    "max_grad_norm": 1,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "mixed_precision": "fp16",
    "dataloader_num_workers": 8,
    "seed": 1,
}
PROMPTS = ("a large red star", "a small blue circle", "a large green square", "a small purple triangle")
# the launchers' flags in the spelling of the door; what it has not is refused by name
SPELLED = {
    "batch_size": "train_batch_size",
    "max_train_epoch": "num_train_epochs",
    "mixed_precision": "mixed_precision",
    "resolution": "resolution",
    "model_name": "pretrained_model_name_or_path",
    "vae_model_path": "vae",
    "tokenizer1_path": "tokenizer1_path",
    "dataset_name": "dataset_name",
    "performance": "performance",
    "ddp_timeout": "ddp_timeout",
    "dry_run": "dry_run",
}


@dataclass(frozen=True)
class TextToImageRecipe(LaunchRecipe):
    """A recipe whose door takes the flags of diffusers' example."""

    def line(self, flags: LaunchFlags, output: Path) -> list[str]:
        """Return the whole command line of the training script: what comes later counts."""
        return [*self.words, *to_door(flags, SPELLED), *flags.remaining, f"--output_dir={output}"]

    def parse(self, words: list[str]) -> TrainConfig:
        """Read a command line as the training script does. Raises ConfigFault."""
        from difftrain.config.parse_text_to_image import parse
        from difftrain.hub.identify import identify

        return parse(words, identify).config

    def prepare(self, *, dry: bool) -> int:
        """Make the demo's pictures in a process of its own; its model is random weights. Return the exit code."""
        if not self.demo:
            return 0
        environ = {"OMP_NUM_THREADS": str(min(8, cores())), **with_library(os.environ)}
        return subprocess.run([sys.executable, "-m", "difftrain.demo", *self.demo], env=environ).returncode

    def dry_words(self, words: list[str]) -> list[str]:
        """Return the flags of a dry run: the same, since no model is made."""
        return words

    def checkable(self, words: list[str]) -> list[str]:
        """Return flags whose faults can be asked for before the demo's folder is made."""
        if not self.demo:
            return words
        return [*(word for word in words if not word.startswith("--train_data_dir=")), f"--train_data_dir={LIBRARY}"]


def choose(flags: LaunchFlags, where: Where) -> TextToImageRecipe:
    """Return the baseline's job, or the demo where there is neither a model nor data."""
    requested, own = flags.text("dataset_name"), flags.names_rest()
    has_model = "model_name" in flags.values or bool(own & WEIGHTS)
    has_data = bool(requested) or bool(own & {"train_data_dir"})
    faults = []
    if "tokenizer2_path" in flags.values:
        faults.append(f"{flags.origins['tokenizer2_path']}: Stable Diffusion 1 has one tokenizer (--tokenizer1_path)")
    if requested in DEMOS or not (has_model or has_data or own & SELF_CONTAINED):
        return _demo(requested or DEMOS[0], flags, where, faults)
    if not own & SELF_CONTAINED:
        if not has_model:
            faults.append("--model_name: is missing (a folder or hub id of Stable Diffusion 1.4)")
        if not has_data:
            faults.append("--dataset_name: is missing (a folder or hub id of images with captions)")
    if "demo_scale" in flags.values:
        faults.append(f"{flags.origins['demo_scale']}: is only for the embedded demo, and this is a run on your data")
    words, notes = _real(flags, where)
    return TextToImageRecipe(DOOR, words, notes, faults)


def _real(flags: LaunchFlags, where: Where) -> tuple[list[str], list[str]]:
    own = flags.names_rest()
    common: dict[str, object] = {"resume_from_checkpoint": "latest"}
    if own & SELF_CONTAINED:
        return _own_or(common, flags), ["--config sets what is trained: the baseline's own flags are not used"]
    recipe, notes = dict(BASELINE), []
    if "max_train_epoch" in flags.values or "num_train_epochs" in own:
        del recipe["max_train_steps"]

    # the published figures are of the baseline's own length, from its weights
    changed = recipe.keys() & own or {"batch_size", "resolution", "max_train_epoch"} & flags.values.keys()
    if changed or own & {"init_from_config", "num_train_epochs"}:
        notes.append("no target loss: the baseline's target belongs to its own flags and weights")
    else:
        recipe["loss_target"] = LOSS_TARGET
        notes.append(
            f"the Stable Diffusion 1.4 baseline: the time of step {TIMED_STEP} of {STEPS}, and the last loss below "
            f"{LOSS_TARGET}; a single global batch says little, so the report also has the mean of all steps"
        )
    recipe["timed_step"] = TIMED_STEP

    if where.devices.kind == "cpu":
        recipe["dataloader_num_workers"] = max(1, min(8, cores() // where.processes))
        if "mixed_precision" not in flags.values:
            recipe["mixed_precision"] = "no"
            notes.append("mixed_precision no: the baseline's fp16 is for NPU and CUDA, this is the CPU")
    return _own_or({**recipe, **common}, flags), notes


def _demo(dataset: str, flags: LaunchFlags, where: Where, faults: list[str]) -> TextToImageRecipe:
    """Train the smallest model, random, on the embedded demo's pictures: the baseline's steps, in a minute or two."""
    from difftrain.demo import recipe as demo

    if "model_name" in flags.values:
        faults.append(f"{flags.origins['model_name']}: the demo {dataset} has its own model (leave it out)")
    scale = demo_scale(flags, faults)
    flags.values.pop("dataset_name", None)  # --dataset_name=shapes names no folder

    cpu = where.devices.kind == "cpu"
    batch = max(1, 8 // where.processes) if cpu else 8
    steps = max(2, round(STEPS * scale))
    recipe = {
        **BASELINE,
        "init_from_config": "tiny",
        "train_data_dir": demo.folder(dataset, scale) / "data",
        "resolution": demo.SIDE,
        "train_batch_size": batch,
        "gradient_accumulation_steps": 1 if cpu else 4,
        "max_train_steps": steps,
        "learning_rate": "1e-3",
        "mixed_precision": "no" if cpu else "fp16",
        "dataloader_num_workers": 0 if cpu else 4,
        "timed_step": max(1, steps - 1),
        "resume_from_checkpoint": "latest",
    }
    if "max_train_epoch" in flags.values or "num_train_epochs" in flags.names_rest():
        del recipe["max_train_steps"]
    prompts = [] if "validation_prompts" in flags.names_rest() else ["--validation_prompts", *PROMPTS]
    notes = [
        f"the embedded demo: the smallest Stable Diffusion 1 from a seed, on {dataset} at {demo.SIDE} px, {steps} steps"
        + (f", {scale:g} of its full length" if scale != 1 else ""),
        f"  batch {batch} x {where.processes} process{'es' if where.processes > 1 else ''}, precision "
        f"{recipe['mixed_precision']}; random weights, so no target loss",
    ]
    preparation = [f"--dataset={dataset}", f"--scale={scale:g}", "--data_only"]
    return TextToImageRecipe(DOOR, [*prompts, *_own_or(recipe, flags)], notes, faults, preparation)


def _own_or(defaults: dict[str, object], flags: LaunchFlags) -> list[str]:
    """Return flags that the user has given in neither spelling."""
    taken = flags.names_rest() | {word.split("=")[0][2:] for word in to_door(flags, SPELLED)}
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in defaults.items() if key not in taken]
