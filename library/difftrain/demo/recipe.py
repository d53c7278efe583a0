"""What the demo trains: its flags for the training script, and where its data and its model are kept.

Imports no torch: launchers ask it before anything is started.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

SIDE = 64  # pixels
GLOBAL_BATCH = 32
SEED = 1
_PARTS_OF_KEY = ("recipe.py", "datasets.py", "model.py", "prepare.py")


class Size(NamedTuple):
    """How much one data set's demo does."""

    pictures: int  # drawn; 0: as many as there are
    steps: int
    steps_by_many: int  # where several processes share a CPU
    held_out: float
    vae_steps: int  # of 16 pictures, for the VAE's decoder


SIZES = {
    "shapes": Size(4096, 1000, 700, 0.05, 250),
    "emoji": Size(0, 1200, 700, 0.08, 400),
}


def ema_decay(steps: int) -> float:
    """Return the decay of the moving average: its window is a fifth of a long run, and never most of a short one."""
    return next(decay for least, decay in ((1000, 0.995), (500, 0.99), (200, 0.97), (0, 0.9)) if steps >= least)


@dataclass(frozen=True)
class DemoPlan:
    """A demo, decided: flags by name as the training script spells them, and how its folder is prepared."""

    flags: dict[str, object]
    notes: tuple[str, ...]
    preparation: list[str]  # arguments of `python -m difftrain.demo`


def cache_root() -> Path:
    """Return this package's folder in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "difftrain"


def folder(dataset: str, scale: float) -> Path:
    """Return where a demo's data and model are kept; another version of the code has another folder."""
    key = hashlib.blake2b(digest_size=6)
    for name in _PARTS_OF_KEY:
        key.update(resources.files(__package__).joinpath(name).read_bytes())
    return cache_root() / "demo" / f"{dataset}-{scale:g}-{key.hexdigest()}"


def model_folder(home: Path) -> Path:
    """Return the model's folder, whose own name tells versions apart: a run knows its weights by it."""
    return home / f"model-{home.name}"


def plan(dataset: str, kind: str, processes: int, scale: float = 1.0) -> DemoPlan:
    """Choose precision, batch and steps for the device at hand.

    kind: of device, as the device room names it. processes: ranks over all machines. scale: share of the full demo.
    """
    size, home = SIZES[dataset], folder(dataset, scale)
    cpu = kind == "cpu"
    crowded = cpu and processes > 1
    batch = max(1, GLOBAL_BATCH // processes)
    steps = max(2, round((size.steps_by_many if crowded else size.steps) * scale))
    precision = "no" if cpu else "fp16"

    # the flags of the run
    flags: dict[str, object] = {
        "demo": dataset,
        "demo_score": True,
        "pretrained_model_name_or_path": model_folder(home),
        "train_data_dir": home / "data",
        "output_name": dataset,
        "resolution": f"{SIDE},{SIDE}",
        "v_parameterization": True,
        "train_batch_size": batch,
        "max_train_steps": steps,
        "mixed_precision": precision,
        "learning_rate": "1e-3",
        "lr_scheduler": "warmup_stable_decay",
        "lr_warmup_steps": min(100, max(1, steps // 5)),
        "lr_decay_steps": "0.4",
        "use_ema": True,
        "ema_decay": ema_decay(steps),
        "caption_dropout_rate": 0.1,
        "validation_split": size.held_out,
        "validate_every_n_steps": max(1, steps // 6),
        "sample_prompts": home / "prompts.txt",
        "sample_every_n_steps": max(1, steps // 3),
        "save_every_n_steps": max(1, steps // 3),
        "save_last_n_steps": max(1, steps // 3),
        "save_state": True,
        "enable_npu_flash_attention": True,
        "max_data_loader_n_workers": 0 if crowded else 1 if cpu else 4,
        "log_every": 10 if steps >= 100 else 1,
        "seed": SEED,
        "resume": "auto",
    }

    # what is said of them at the start
    notes = (
        f"the embedded demo: {_WHAT[dataset]}, a small SDXL from a seed"
        + (f", {scale:g} of its full length" if scale != 1 else ""),
        f"  precision {precision}: " + ("a CPU computes best in fp32" if cpu else "every NPU and CUDA device has fp16"),
        f"  batch {batch} x {processes} process{'es' if processes > 1 else ''} = {batch * processes}: "
        "the batch the demo is tuned for"
        + ("" if batch * processes == GLOBAL_BATCH else ", as close as the number of processes allows"),
        f"  {steps} steps" + (": smaller than with one process, since they share the cores" if crowded else ""),
    )
    words = [f"--dataset={dataset}", f"--scale={scale:g}"]
    return DemoPlan(flags, notes, words)


_WHAT = {
    "shapes": "coloured shapes on white, generated here, so nothing is downloaded",
    "emoji": "1852 emoji with their names, fetched through npm at first use",
}
