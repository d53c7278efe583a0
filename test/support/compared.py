"""Run folders for the tests of comparisons: files as training writes them, with whatever is to be otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from difftrain.config import TrainConfig
from difftrain.config.digest import identity
from difftrain.config.toml import dump

BASE: dict[str, dict[str, Any]] = {
    "model": {"pretrained": "/models/sdxl"},
    "data": {"dirs": ("/data/pictures",)},
    "training": {"batch_size": 2, "seed": 1, "max_steps": 20},
    "optimizer": {"learning_rate": 1e-4},
}
FIGURES = {"fps": 20.0, "compute_fps": 22.0, "ips": 20.0, "training_time_s": 0.1, "peak_memory_gib": 20.0}


def made_run(
    folder: Path,
    *,
    change: dict[int, dict[str, Any]] | None = None,
    first: int = 1,
    last: int = 20,
    log_every: int = 1,
    plan_digest: str | None = "abc",
    fingerprint: str | None = "ab12",
    figures: dict[str, Any] | None = None,
    report: bool = True,
    outcome: str = "finished",
    **sections: dict[str, Any],
) -> Path:
    """Write a run's folder; its loss at step k is 1 / k. change: values of lines, by step. sections: of the configuration."""
    cfg = TrainConfig.model_validate(
        {name: BASE.get(name, {}) | sections.get(name, {}) for name in BASE.keys() | sections.keys()}
    )
    folder.mkdir(parents=True)
    batch = cfg.training.batch_size * cfg.training.accumulation
    lines = [
        {"step": step, "epoch": 1, "step_loss": 1 / step, "lr": 1e-4, "grad_norm": 1.0, "fps": 20.0, "compute_fps": 22.0,
         "data_wait_s": 0.01, "peak_memory_gib": 20.0, "samples_seen": batch * step, "step_s": 0.1, "skipped": 0,
         "session": 1} | (change or {}).get(step, {})
        for step in range(first, last + 1)
        if step % log_every == 0 or step == last
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    # --- what a session says of itself, and the run of its configuration
    session = {"session": 1, "from_step": 0, "outcome": outcome, "elapsed_s": 9.0, "world_size": 1, "device": "x"}
    session |= {"global_batch": batch, "plan_digest": plan_digest, "data_fingerprint": fingerprint}
    history = {"run_id": folder.name, "sessions": [session]}
    (folder / "sessions.json").write_text(json.dumps(history))
    record = {"seed": cfg.training.seed, "identity": identity(cfg), "hub": {}}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.toml").write_text(dump(cfg))

    # --- what its end knows
    if report:
        content = {
            "network": "StableDiffusionXL", "finished": True, "steps": last, "planned_steps": last, "world_size": 1,
            "precision": cfg.training.mixed_precision, "global_batch": batch, "seed": cfg.training.seed,
            "dataset": {"name": "pictures", "fingerprint": fingerprint}, "versions": {"torch": "2.13.0"},
            "device": {"kind": "x", "name": "Card"}, "machine": {"cores": 2}, "weights": "/models/sdxl",
            "code_version": "0.5.0", "sessions": history["sessions"], "config": cfg.model_dump(mode="json"),
            "command": "python train.py", **(FIGURES | (figures or {})),
        }  # fmt: skip
        (folder / "report.json").write_text(json.dumps(content))
    return folder
