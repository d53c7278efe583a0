"""SD3-Light's recipes: train.py on a file of configs/sd3_light, with what the launcher's flags say over it."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.config.paths import recipes_dir
from difftrain.launch.flags import LaunchFlags, demo_scale, owned
from difftrain.launch.machines import LIBRARY, Where, cores, with_library
from difftrain.launch.recipes import DEMOS, EPOCHS, EPOCHS_OF_A_SPEED_RUN, LaunchRecipe

if TYPE_CHECKING:
    from difftrain.config import TrainConfig

CONFIGS = recipes_dir() / "sd3_light"
DOOR = "train.py"
RECIPES = {"sd3_light": "base.toml", "sd3_light_cache": "cache.toml"}
SIDE = 256
NEVER = 1_000_000_000  # steps, minutes: a file's cadence cannot be taken back, only made long
# the launchers' flags as keys of train.py
KEYS = {
    "batch_size": "training.micro_batch_size_per_gpu",
    "max_train_epoch": "training.epochs",
    "mixed_precision": "model.dtype",
    "model_name": "model.diffusers_path",
    "vae_model_path": "model.vae",
    "tokenizer1_path": "model.tokenizer1",
    "tokenizer2_path": "model.tokenizer2",
    "performance": "training.performance",
    "ddp_timeout": "training.ddp_timeout_min",
}
DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Keys that say by themselves where data and weights come from.
DATA = {"dataset", "output.dataset", "data.dirs"}
WEIGHTS = {"model.diffusers_path", "model.pretrained", "model.init_from_config"}


@dataclass(frozen=True)
class LightRecipe(LaunchRecipe):
    """A recipe whose door reads TOML. home: the demo's folder, made in prepare."""

    home: Path | None = None

    def line(self, flags: LaunchFlags, output: Path) -> list[str]:
        """Return the whole command line of the training script: what comes later counts."""
        dry = ["--dry_run"] if flags.values.get("dry_run") else []
        output_words = [f"--output.output_dir={output}", "--save.run_dirs=false", "--save.resume=auto"]
        return [*self.words, *_owned(flags), *output_words, *dry, *flags.remaining]

    def parse(self, words: list[str]) -> TrainConfig:
        """Read a command line as the training script does. Raises ConfigFault."""
        from difftrain.config.parse_keys import parse

        return parse(words).config

    def prepare(self, *, dry: bool) -> int:
        """Make the demo's data, and its model unless nothing is trained, in a process of its own; return its exit code."""
        if not self.demo:
            return 0
        environ = {"OMP_NUM_THREADS": str(min(8, cores())), **with_library(os.environ)}
        command = [sys.executable, "-m", "difftrain.demo", *self.demo, *(["--part=data"] if dry else [])]
        return subprocess.run(command, env=environ).returncode

    def dry_words(self, words: list[str]) -> list[str]:
        """Return the flags of a dry run; a demo's model is not made for it, its size says enough."""
        return words if self.home is None or (self.home / "model").is_dir() else _without_model(words, _aside())

    def checkable(self, words: list[str]) -> list[str]:
        """Return flags whose faults can be asked for before the demo's folder is made: those of a stand-in for it."""
        if self.home is None:
            return words
        folder = _aside()
        for name in ("train", "unseen"):
            (folder / f"{name}.toml").write_text(_data_set(LIBRARY, 64))
        (folder / "prompts.txt").write_text("a picture\n")
        return [word.replace(str(self.home), str(folder)) for word in _without_model(words, folder)]


_ASIDE: list[tempfile.TemporaryDirectory[str]] = []  # as long as this process


def _aside() -> Path:
    _ASIDE.append(tempfile.TemporaryDirectory())
    return Path(_ASIDE[-1].name)


def _without_model(words: list[str], folder: Path) -> list[str]:
    """Return the same flags on a copy of the recipe's file that names the demo's sizes in place of its model."""
    config = next(word for word in words if word.startswith("--config="))
    text = Path(config.partition("=")[2]).read_text(encoding="utf-8")
    copy = folder / "recipe.toml"
    copy.write_text(re.sub(r"(?m)^diffusers_path = .*$", 'init_from_config = "demo"', text), encoding="utf-8")
    remaining = [word for word in words if word != config and not word.startswith("--model.diffusers_path=")]
    return [f"--config={copy}", *remaining]


def choose(name: str, flags: LaunchFlags, where: Where) -> LightRecipe:
    """Return the recipe's job, or the demo where there is neither a model nor data."""
    stage = ["--cache_only"] if name == "sd3_light_cache" else []
    requested, own = flags.text("dataset_name"), flags.names_rest()
    has_model = "model_name" in flags.values or bool(own & WEIGHTS)
    has_data = bool(requested) or bool(own & DATA)
    if "config" in own:
        return LightRecipe(DOOR, stage, ["--config sets what is trained: the recipe's own file is not used"])
    # with nothing of the user's own, the embedded demo
    if requested in DEMOS or not (has_model or has_data):
        return _demo(requested or "shapes", flags, where, stage)
    faults = []
    if not has_model:
        what = "the folder that `difftrain init sd3_light --size=light --from=SD3_FOLDER --output=DIR` writes"
        faults.append(f"--model_name: is missing ({what})")
    if not has_data:
        faults.append("--dataset_name: is missing (a folder of images or tars, or a TOML file of datasets)")
    if "demo_scale" in flags.values:
        faults.append(f"{flags.origins['demo_scale']}: is only for the embedded demo, and this is a run on your data")
    if requested.endswith(".toml") and "resolution" in flags.values:
        faults.append(f"{flags.origins['resolution']}: the dataset file {requested} sets its own (its resolutions)")
    words, notes = _real(name, flags, where, faults)
    return LightRecipe(DOOR, [*stage, *words], notes, faults)


def _real(name: str, flags: LaunchFlags, where: Where, faults: list[str]) -> tuple[list[str], list[str]]:
    words, notes = [f"--config={CONFIGS / RECIPES[name]}"], [f"recipe: configs/sd3_light/{RECIPES[name]}"]
    speed = bool(flags.values.get("performance")) or flags.number("max_train_epoch", EPOCHS) < EPOCHS
    words.append(f"--training.epochs={EPOCHS_OF_A_SPEED_RUN if speed else EPOCHS}")
    if speed:
        words += [f"--save.save_every_n_steps={NEVER}", f"--save.checkpoint_every_n_minutes={NEVER}"]
        notes.append("a speed run: nothing is saved before the end")
    if where.devices.kind == "cpu":
        words.append(f"--data.num_dataloader_workers={max(1, min(8, cores() // where.processes))}")
        words.append("--model.dtype=float32")
        if "mixed_precision" not in flags.values:
            notes.append("precision fp32: the recipe's bf16 is for NPU and CUDA, this is the CPU")
    requested = flags.text("dataset_name")
    if requested:
        file = requested if requested.endswith(".toml") else _file_for(requested, flags, faults)
        words.append(f"--dataset={file}")
        notes += [] if file == requested else [f"dataset file: {file}"]
    return words, notes


def _file_for(folder: str, flags: LaunchFlags, faults: list[str]) -> str:
    """Write the data set file of a folder into the user's cache, and return its path."""
    from difftrain.config.paths import user_cache

    sides = [part.strip() for part in (flags.text("resolution") or str(SIDE)).split(",")]
    if not all(side.isdecimal() and int(side) for side in sides) or len(sides) > 2:
        faults.append(f"{flags.origins['resolution']}: must be WIDTH,HEIGHT or one number, got {','.join(sides)}")
        sides = [str(SIDE)]
    text = _data_set(Path(folder).expanduser().resolve(), sides[0] if len(sides) == 1 else f"[{', '.join(sides)}]")
    path = user_cache() / "launch" / f"{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def _data_set(folder: Path, resolution: int | str) -> str:
    buckets = "enable_ar_bucket = true\nmin_ar = 0.5\nmax_ar = 2.0\nnum_ar_buckets = 7\n"
    return f'resolutions = [{resolution}]\n{buckets}\n[[directory]]\npath = "{folder}"\n'


def _demo(dataset: str, flags_given: LaunchFlags, where: Where, stage: list[str]) -> LightRecipe:
    from difftrain.demo import make

    faults = []
    if "model_name" in flags_given.values:
        faults.append(f"{flags_given.origins['model_name']}: the demo {dataset} has its own model (leave it out)")
    if "resolution" in flags_given.values:
        faults.append(f"{flags_given.origins['resolution']}: the demo {dataset} has a fixed image size (leave it out)")
    scale = demo_scale(flags_given, faults)
    flags_given.values.pop("dataset_name", None)  # --dataset_name=shapes names no folder
    plan = make.plan(dataset, where.devices.kind, where.world_size, scale)
    flags = dict(plan.flags)
    if "max_train_epoch" in flags_given.values:
        flags.pop("training.max_steps")
    words = [f"--config={CONFIGS / f'{dataset}.toml'}", *(f"--{key}={value}" for key, value in flags.items())]
    return LightRecipe(DOOR, [*stage, *words], list(plan.notes), faults, plan.preparation, make.folder(dataset, scale))


def _owned(flags: LaunchFlags) -> list[str]:
    """Return the owned flags that were given, in the training script's spelling."""
    words = []
    for name, value in owned(flags, KEYS):
        text = DTYPES.get(str(value), value) if name == "mixed_precision" else "true" if value is True else value
        words.append(f"--{KEYS[name]}={text}")
    return words
