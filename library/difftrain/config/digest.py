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
from difftrain.config.datasets.clips import reads_clips
from difftrain.config.datasets.datasets import draws_captions
from difftrain.config.layers import PATHS
from difftrain.config.schema.families import row_of
from difftrain.config.schema.sections import ClipSection, DatasetSection, TrainConfig
from difftrain.config.schema.validate import default_of, fields

# sections and fields that may change between two starts of one run
FREE = frozenset({
    # features read from a cache are those that are encoded online, but for the rounding of other batches; see _cached
    "model.vae_batch_size", "model.disable_mmap", "cache", "model.tokenizer_cache_dir",
    # the folders' own names count, see identity; the records themselves are in the plan's digest
    "data.dirs", "data.reg_dirs", "data.control_dirs", "data.datasets", "data.dataset_config",
    "data.epoch_batches",
    "data.workers", "data.prefetch", "data.image_decoder", "data.cache_dir", "data.verify", "data.max_rejected_share",
    "training.batch_size", "training.image_batch_size", "training.accumulation",  # their product with the number of replicas counts
    "training.gradient_checkpointing", "training.checkpoint_blocks", "training.cpu_offload_checkpointing", "training.compile", "training.compile_backend",
    "training.fused_attention", "training.attention", "training.max_skipped_steps", "training.only_warn",
    "memory", "training.engine", "fsdp", "deepspeed", "training.device", "training.threads", "training.performance",
    "training.sequence_parallel",
    "training.pipeline_stages", "training.pipeline_schedule", "training.partition_method", "training.partition_split",
    "training.ddp_timeout_min", "training.ddp_bucket_view", "training.ddp_static_graph",
    "validation.every_n_steps", "validation.every_n_epochs", "validation.max_steps",
    "demo.score", "demo.make", "ema.snapshot_precision", "eval",
    "save", "hub", "sample", "logging", "metadata",
})  # fmt: skip
# fields whose value is a path or an id: a path is known by its last name, since machines mount things elsewhere
NAMED = frozenset({
    "model.pretrained", "model.vae", "model.tokenizer1", "model.tokenizer2", "model.tokenizer3", "model.tokenizer4",
    "model.init_from_config",
    "model.transformer", "model.text_encoder1", "model.text_encoder2", "model.text_encoder3", "model.text_encoder4",
    "repa.encoder", "demo.folder",
    "data.conditioning_dir", "data.in_json", "adapter.init_from_existing",
})  # fmt: skip
# fields that came after version 0.5: at their default they are left out, so that its runs are known again
ADDED = frozenset({
    "model.guidance", "model.first_frame_conditioning_p", "model.expert", "model.train_only", "model.base_dtype", "data.split", "data.max_samples", "loss.min_snr_plus_one",
    "ema.ramp",
    "adapter.type", "adapter.rank", "adapter.alpha", "adapter.use_rslora", "adapter.dropout", "adapter.target_modules",
    "adapter.exclude_modules", "adapter.rank_pattern", "adapter.alpha_pattern", "adapter.decompose_factor",
    "adapter.init_from_existing", "adapter.fuse_adapters",
    "training.allow_tf32", "data.num_control", "data.control_columns", "data.control_dropout",
    "data.control_size", "data.frame_buckets", "data.framerate", "data.video_clip_mode",
})  # fmt: skip


# what one machine of a job may have otherwise than another, beside paths; everything else ranks must have alike
OF_ONE_MACHINE = frozenset({
    "data.datasets", "data.workers", "data.prefetch", "data.image_decoder", "data.verify",
    "cache.workers", "cache.preload", "cache.copy_gib", "save.resume", "training.device", "training.threads",
})  # fmt: skip


def of_every_machine(cfg: TrainConfig) -> dict[str, Any]:
    """Return what must be the same on every machine of a job, by "section.field". Paths may differ: their content counts."""
    out: dict[str, Any] = {}
    for path in fields():
        if path in OF_ONE_MACHINE or path in PATHS:
            continue
        section, _, field = path.partition(".")
        out[path] = getattr(getattr(cfg, section), field)
    for number, dataset in enumerate(cfg.data.datasets, 1):
        of_it = _fields_of(f"data set {number}", dataset)
        out |= {name: value for name, value in of_it.items() if name.rpartition(" ")[2] not in _PATHS_OF_DATA}
    return out


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
        if path in ADDED and value == default_of(path):
            continue
        if path == "data.framerate" and not reads_clips(cfg.data.frame_buckets):
            continue
        out[path] = _last_name(value) if path in NAMED and value else value
    for field in ("dirs", "reg_dirs"):
        out[f"data.{field}"] = tuple(_last_name(folder) for folder in getattr(cfg.data, field))
    if cfg.data.control_dirs:
        out["data.control_dirs"] = tuple(map(_last_name, cfg.data.control_dirs))
    for number, dataset in enumerate(cfg.data.datasets, 1):
        out |= _fields_of(f"data set {number}", dataset)
    out |= _cached(cfg)
    batches = [size * cfg.training.accumulation * dp_size for size in cfg.batch_sizes]
    out["global batch"] = batches if cfg.data.datasets or len(batches) > 1 else batches[0]
    if cfg.training.max_epochs and not cfg.training.first_limit:
        del out["training.max_steps"]  # epochs win
    return without_empty(out)


def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an identity as it is where images without a caption are rejected, which 0.5 did with kohya's flags too.

    Whether there are such images the plan's digest says.
    """
    kept = dict(fields)
    if fields.get("captions.dialect") == "kohya":
        kept["captions.allow_empty"] = False
    for name, value in fields.items():
        if name.endswith(": captions") and value["dialect"] == "kohya":
            kept[name] = value | {"allow_empty": False}
    return kept


def _cached(cfg: TrainConfig) -> dict[str, Any]:
    """Return what makes cached features others than those of online training: what is rounded, or drawn once."""
    cache = cfg.cache
    pictures, captions = cache.latents or cache.latents_to_disk, cache.text or cache.text_to_disk
    words = row_of(cfg).text_features
    kept = {
        "latents_as": cache.latents_as,
        "latents_dtype": cache.latents_dtype if pictures else None,
        "text_dtype": cache.text_dtype if captions else None,
        "dtypes": {name: dtype for name, dtype in cache.dtypes.items() if (captions if name in words else pictures)},
        "shuffle_num": cache.shuffle_num if draws_captions(cfg) else None,
    }
    return {f"cache.{name}": value for name, value in kept.items() if value not in (None, default_of(f"cache.{name}"))}


_PATHS_OF_DATA = ("image_dir", "metadata_file", "conditioning_dir", "control_dirs", "default_mask")


def _fields_of(name: str, dataset: DatasetSection) -> dict[str, Any]:
    """Return what a data set is: paths by their last name, without what its global batch or no weight depends on."""
    unset = {name for name in ClipSection.model_fields if getattr(dataset, name) == default_of(f"data.{name}")}
    values = dataset.model_dump(mode="json", exclude={"batch_size", "image_batch_size", "subsets", *unset})
    by_name = {f"{name}: {field}": value for field, value in values.items()}
    for number, subset in enumerate(dataset.subsets, 1):
        for field, value in subset.model_dump(mode="json", exclude={"custom_attributes"}).items():
            if field == "control_dirs":
                if value:  # version 0.5 had none
                    by_name[f"{name}, subset {number}: {field}"] = [_last_name(folder) for folder in value]
                continue
            is_path = value and field in _PATHS_OF_DATA
            by_name[f"{name}, subset {number}: {field}"] = _last_name(value) if is_path else value
    return by_name


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
