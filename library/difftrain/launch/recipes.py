"""What a launcher trains when the user leaves something out: the recipe's flags, or the embedded demo."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.launch.flags import LaunchFlags, demo_scale, to_door
from difftrain.launch.machines import LIBRARY, Where, cores, with_library

if TYPE_CHECKING:
    from difftrain.config import TrainConfig

DEMOS = ("shapes", "emoji")
EPOCHS, EPOCHS_OF_A_SPEED_RUN = 120, 13
# Flags that say by themselves where data and weights come from.
SELF_CONTAINED = {"config"}
WEIGHTS = {"pretrained_model_name_or_path", "init_from_config"}
# How the training scripts begin what they say of data and weights that are not there.
MISSING = tuple(f"--{name}: is missing" for name in ("train_data_dir", "dataset_name", "pretrained_model_name_or_path"))


@dataclass(frozen=True)
class LaunchRecipe:
    """The training script of a recipe, its flags where the user gave none, and what is made before training."""

    door: str
    words: list[str]
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    demo: list[str] = field(default_factory=list)  # arguments of the demo's preparation; empty: no demo

    def line(self, flags: LaunchFlags, output: Path) -> list[str]:
        """Return the whole command line of the training script: what comes later counts."""
        return [*self.words, *to_door(flags), *flags.remaining, f"--output_dir={output}"]

    def parse(self, words: list[str]) -> TrainConfig:
        """Read a command line as the training script does. Raises ConfigFault."""
        from difftrain.config.parse_flags import parse

        return parse(words).config

    def door_faults(self, words: list[str]) -> list[str]:
        """Ask the training script's parser for every fault of its flags. Imports no torch."""
        from difftrain.contracts import ConfigFault

        try:
            self.parse(words)
        except ConfigFault as error:
            return [str(fault) for fault in error.faults]
        return []

    def prepare(self, *, dry: bool) -> int:
        """Make the demo's data and model, in a process of its own; return its exit code."""
        if not self.demo:
            return 0
        words = [*self.demo, *(["--data_only"] if dry else [])]
        threads = str(min(8, cores()))
        environ = {"OMP_NUM_THREADS": threads, **with_library(os.environ)}
        return subprocess.run([sys.executable, "-m", "difftrain.demo", *words], env=environ).returncode

    def dry_words(self, words: list[str]) -> list[str]:
        """Return the flags of a dry run; a demo's model is not made for it, its size says enough."""
        if not self.demo:
            return words
        kept = [word for word in words if not word.startswith("--pretrained_model_name_or_path=")]
        return [*kept, "--init_from_config=demo"]

    def checkable(self, words: list[str]) -> list[str]:
        """Return flags whose faults can be asked for before the demo's folder is made."""
        if not self.demo:
            return words
        made = ("--train_data_dir=", "--sample_prompts=", "--sample_every_n_steps=")
        return [*(word for word in self.dry_words(words) if not word.startswith(made)), f"--train_data_dir={LIBRARY}"]


SDXL = {
    "train_batch_size": 4,
    "mixed_precision": "fp16",
    "resolution": "1024,1024",
    "enable_bucket": True,
    "min_bucket_reso": 512,
    "max_bucket_reso": 2048,
    "gradient_checkpointing": True,
    "lr_scheduler": "cosine_with_restarts",
    "learning_rate": "1e-6",
    "train_text_encoder": True,
    "learning_rate_te1": "1e-7",
    "learning_rate_te2": "1e-7",
    "max_grad_norm": 1,
    "seed": 1,
    "shuffle_caption": True,
    "optimizer_type": "oss",
    "enable_npu_flash_attention": True,
    "max_train_epochs": EPOCHS,
    "save_every_n_epochs": 10,
    "save_last_n_epochs": 2,
    "save_state": True,
}
RECIPES = {"sdxl": ("sdxl_pretrain.py", SDXL)}
# an entry point's script in a checkout -> its command where the package is installed
COMMANDS = {
    "sdxl_pretrain.py": "sdxl",
    "sdxl_train_network.py": "sdxl_network",
    "train.py": "train",
    "train_text_to_image.py": "text_to_image",
}


def choose(name: str, flags: LaunchFlags, where: Where) -> LaunchRecipe:
    """Return the recipe's job, or the demo where there is neither a model nor data."""
    door, defaults = RECIPES[name]
    requested = flags.text("dataset_name")
    own = flags.names_rest()
    has_model = "model_name" in flags.values or bool(own & WEIGHTS)
    has_data = bool(requested) or "train_data_dir" in own
    if requested in DEMOS or not (has_model or has_data or own & SELF_CONTAINED):
        return _demo(door, requested or "shapes", flags, where)
    faults = []
    if not own & SELF_CONTAINED:
        if not has_model:
            faults.append(
                "--model_name: is missing (weights to start from, or --init_from_config=base for random ones)"
            )
        if not has_data:
            faults.append("--dataset_name: is missing (a folder of images, tars or parquet)")
    if "demo_scale" in flags.values:
        faults.append(f"{flags.origins['demo_scale']}: is only for the embedded demo, and this is a run on your data")
    words, notes = _real(defaults, flags, where)
    return LaunchRecipe(door, words, notes, faults)


def _real(defaults: dict[str, object], flags_given: LaunchFlags, where: Where) -> tuple[list[str], list[str]]:
    own = flags_given.names_rest()
    common = _own_or({"resume": "auto"}, own)
    if own & SELF_CONTAINED:
        return common, ["--config sets what is trained: the recipe's own flags are not used"]
    flags, notes = dict(defaults), []
    speed = bool(flags_given.values.get("performance")) or flags_given.number("max_train_epoch", EPOCHS) < EPOCHS
    if speed:
        flags["max_train_epochs"] = EPOCHS_OF_A_SPEED_RUN
        for key in ("save_every_n_epochs", "save_last_n_epochs", "save_state"):
            del flags[key]
        notes.append("a speed run: nothing is saved before the end")
    if "max_train_steps" in own:
        del flags["max_train_epochs"]
    if where.devices.kind == "cpu":
        flags["max_data_loader_n_workers"] = max(1, min(8, cores() // where.processes))
        if "mixed_precision" not in flags_given.values:
            flags["mixed_precision"] = "no"
            notes.append("mixed_precision no: the recipe's fp16 is for NPU and CUDA, this is the CPU")
    taken = {flag.split("=")[0][2:] for flag in to_door(flags_given)}
    return [*_own_or({k: v for k, v in flags.items() if k not in taken}, own), *common], notes


def _own_or(defaults: dict[str, object], own: set[str]) -> list[str]:
    """Return default flags that the user has not given; a False is left out."""
    return [
        f"--{key}" if value is True else f"--{key}={value}"
        for key, value in defaults.items()
        if key not in own and value is not False
    ]


def _demo(door: str, dataset: str, flags: LaunchFlags, where: Where) -> LaunchRecipe:
    from difftrain.demo import recipe as demo

    faults = []
    if "model_name" in flags.values:
        faults.append(f"{flags.origins['model_name']}: the demo {dataset} has its own model (leave it out)")
    scale = demo_scale(flags, faults)
    plan = demo.plan(dataset, where.devices.kind, where.world_size, scale)
    own, taken = flags.names_rest(), {flag.split("=")[0][2:] for flag in to_door(flags)}
    if taken & {"max_train_epochs"} or own & {"max_train_epochs", "max_train_epoch"}:
        taken.add("max_train_steps")
    if dataset in DEMOS:  # --dataset_name=shapes names no folder
        flags.values.pop("dataset_name", None)
        taken.discard("train_data_dir")
    words = _own_or({k: v for k, v in plan.flags.items() if k not in taken}, own)
    return LaunchRecipe(door, words, list(plan.notes), faults, plan.preparation)
