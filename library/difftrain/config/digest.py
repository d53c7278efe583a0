"""Which fields decide what a run IS: two configurations with one digest give the same weights.

Where things are mounted, how many processes decode, what is logged and how often is saved do not belong to it; neither
does how the global batch is split over cards and micro batches.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from difftrain.config import hub_ids
from difftrain.config.sections import TrainConfig
from difftrain.config.validate import fields

# sections and fields that may change between two starts of one run
FREE = frozenset({
    "model.vae_batch_size", "model.tokenizer_cache_dir",
    "data.dirs",  # the folders' own names count, see identity; the records themselves are in the plan's digest
    "data.workers", "data.cache_dir", "data.verify", "data.max_rejected_share",
    "training.batch_size", "training.accumulation",  # their product with the number of replicas counts
    "training.gradient_checkpointing", "training.cpu_offload_checkpointing", "training.compile", "training.compile_backend",
    "training.fused_attention", "training.attention", "training.max_skipped_steps",
    "training.engine", "training.device", "training.threads", "training.performance",
    "training.ddp_timeout_min", "training.ddp_bucket_view", "training.ddp_static_graph",
    "validation.every_n_steps", "validation.every_n_epochs", "validation.max_steps",
    "demo.score", "ema.snapshot_precision",
    "save", "hub", "sample", "logging", "metadata",
})  # fmt: skip
# fields whose value is a path or an id: a path is known by its last name, since machines mount things elsewhere
NAMED = frozenset({
    "model.pretrained", "model.vae", "model.tokenizer1", "model.tokenizer2", "model.init_from_config",
    "data.conditioning_dir",
})  # fmt: skip


def identity(cfg: TrainConfig, dp_size: int = 1) -> dict[str, Any]:
    """Return what the run is, by "section.field".

    cfg: as it was given, before a seed is drawn for a run without one. dp_size: data-parallel replicas.
    """
    out: dict[str, Any] = {}
    for path in fields():
        section, _, field = path.partition(".")
        if path in FREE or section in FREE:
            continue
        value = getattr(getattr(cfg, section), field)
        out[path] = _last_name(value) if path in NAMED and value else value
    out["data.dirs"] = tuple(_last_name(folder) for folder in cfg.data.dirs)
    out["global batch"] = cfg.training.batch_size * cfg.training.accumulation * dp_size
    if cfg.training.max_epochs:
        del out["training.max_steps"]  # epochs win
    return out


def digest(cfg: TrainConfig, dp_size: int = 1) -> str:
    """Return a short hash of what the run is."""
    text = json.dumps(identity(cfg, dp_size), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Name what makes two runs different, a line a field; either may have been through JSON."""
    old, new = json.loads(json.dumps(old)), json.loads(json.dumps(new))
    return [
        f"{path}: {old.get(path)} there, {new.get(path)} here"
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    ]


def _last_name(path: str) -> str:
    name = os.path.basename(os.path.abspath(path))  # noqa: PTH100, PTH119 - no link is followed
    return hub_ids.known_by(path, name)
