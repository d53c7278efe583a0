"""A run's facts for the tests of reports, as the loop would hand them over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from difftrain.config import TrainConfig
from difftrain.report.clock import Account, Interval
from difftrain.report.report import ReportFacts


def facts(run_dir: Path, **changes: Any) -> ReportFacts:
    steady = Interval(steps=15, images=15 * 64, flops=15 * 64 * 2e12, wall_s=30.0, wait_s=6.0)
    account = Account(
        sessions=1, warm=Interval(5, 320, 0.0, 99.0, 9.0), steady=steady, pauses_s={"saving": 3.0}, e2e_s=140.0
    )
    values: dict[str, Any] = {
        "run_dir": run_dir,
        "network": "StableDiffusionXL",
        "argv": ["sdxl_pretrain.py", "--seed=1", "--huggingface_token=abc"],
        "device": {"kind": "x", "name": "Ascend910B3", "driver": "24.1", "host": {"cpu": "Kunpeng"}},
        "world_size": 8,
        "global_batch": 64,
        "steps": 20,
        "planned_steps": 20,
        "epochs": 2,
        "samples_seen": 1280,
        "account": account,
        "session": account,
        "dataset": {"name": "laion", "count": 640, "fingerprint": "ab12"},
        "weights": "https://me:secret@hub/model",
        "peak_memory_gib": 40.5,
        "flops_per_sample": 2e12,
        "matmul_flops": 25e12,
    }
    return ReportFacts(**{**values, **changes})


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"training": {"batch_size": 8, "seed": 1, "mixed_precision": "bf16", "max_epochs": 120}, **sections}
    )
