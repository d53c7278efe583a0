"""How SD3-Light's demos run on the device at hand: over configs/sd3_light/shapes.toml or emoji.toml.

Imports no torch: launchers ask it before anything is started.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from difftrain.demo.make import MODEL, TRAIN, UNSEEN
from difftrain.demo.recipe import GLOBAL_BATCH, DemoPlan, cache_root, ema_decay

_PARTS_OF_KEY = (
    "datasets.py", "model.py", "prepare.py", "splits.py"
)  # fmt: skip
STEPS = {"shapes": 600, "emoji": 3600}  # as their files say
STEPS_BY_MANY = {"shapes": 400, "emoji": 2400}  # where several processes share a CPU
_WHAT = {
    "shapes": "coloured shapes on white, drawn here, so that nothing is downloaded",
    "emoji": "3372 emoji in all skin tones with their names, fetched through npm at first use",
}


def folder(dataset: str, scale: float) -> Path:
    """Return where a demo's data and model are kept; another version of the code has another folder."""
    key = hashlib.blake2b(digest_size=6)
    for name in _PARTS_OF_KEY:
        key.update(resources.files(__package__).joinpath(name).read_bytes())
    return cache_root() / "demo" / f"sd3_light-{dataset}-{scale:g}-{key.hexdigest()}"


def plan(dataset: str, kind: str, processes: int, scale: float = 1.0) -> DemoPlan:
    """Choose precision, batch and steps for the device at hand.

    kind: of device, as the device room names it. processes: ranks over all machines. scale: share of the full demo.
    """
    home, cpu = folder(dataset, scale), kind == "cpu"
    crowded = cpu and processes > 1
    batch = max(1, GLOBAL_BATCH // processes)
    steps = max(2, round((STEPS_BY_MANY if crowded else STEPS)[dataset] * scale))
    third = max(1, steps // 3)

    # the flags of the run
    unseen = f'[{{name = "{UNSEEN}", config = "{home / f"{UNSEEN}.toml"}"}}]'
    flags: dict[str, object] = {
        "demo.folder": home,
        "model.diffusers_path": home / MODEL,
        "output.dataset": home / f"{TRAIN}.toml",
        "eval.eval_datasets": unseen,
        "sample.prompts": home / "prompts.txt",
        "data.cache_dir": home / "cache",
        "save.output_name": dataset,
        "model.dtype": "float32" if cpu else "bfloat16",
        "training.micro_batch_size_per_gpu": batch,
        "training.max_steps": steps,
        "training.warmup_steps": max(1, steps // 10),
        "ema.decay": ema_decay(steps),
        "eval.eval_every_n_steps": third,
        "sample.every_n_steps": third,
        "save.save_every_n_steps": third,
        "data.num_dataloader_workers": 0 if crowded else 1 if cpu else 4,
        "monitoring.logging_steps": 10 if steps >= 100 else 1,
    }
    if dataset == "emoji":
        flags["eval.kid_every_n_steps"] = third

    # what is said of them at the start
    notes = (
        f"the embedded demo: {_WHAT[dataset]}, a small SD3-Light from random weights"
        + (f", {scale:g} of its full length" if scale != 1 else ""),
        f"  precision {'fp32: a CPU computes best in it' if cpu else 'bf16, with fp32 weights'}",
        f"  batch {batch} x {processes} process{'es' if processes > 1 else ''} = {batch * processes}: "
        "what the demo is tuned for"
        + ("" if batch * processes == GLOBAL_BATCH else ", as near as the processes allow"),
        f"  {steps} steps" + (": fewer than one process takes, since they share the cores" if crowded else ""),
    )
    return DemoPlan(flags, notes, [f"--make={dataset}", f"--folder={home}", f"--scale={scale:g}"])
