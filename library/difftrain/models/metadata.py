"""What headers of exports have in common: modelspec.* (Stability's ModelSpec 1.0.1) and kohya's ss_*, all as text."""

from __future__ import annotations

import base64
import datetime
import json
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain import __version__
from difftrain.config.hub_ids import name_of
from difftrain.config.kohya_network import network_arguments
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, RunFacts

if TYPE_CHECKING:
    from difftrain.config.schema.sections import SubsetSection, TrainConfig
    from difftrain.models.facts import FamilyOption

IMPLEMENTATION = "difftrain"
# fields of [metadata] that ModelSpec names; training_comment is kohya's own
_MODELSPEC_FIELDS = (
    "author", "description", "license", "tags", "usage_hint", "merged_from", "trigger_phrase", "preprocessor",
    "is_negative_embedding",
)  # fmt: skip


def described(cfg: TrainConfig, title: str, saved_at: float, own: Mapping[str, str | None]) -> dict[str, str]:
    """Describe a model. own: what its family says, by ModelSpec's names. The date is local time to the second (kohya)."""
    values: dict[str, str | None] = {
        "sai_model_spec": "1.0.1",
        "implementation": IMPLEMENTATION,
        "implementation_version": __version__,
        "title": cfg.metadata.title or title,
        "date": datetime.datetime.fromtimestamp(int(saved_at)).isoformat(),
        "thumbnail": thumbnail(cfg.metadata.thumbnail),
    }
    values |= own
    values |= {name: getattr(cfg.metadata, name) for name in _MODELSPEC_FIELDS}
    return {f"modelspec.{name}": value for name, value in values.items() if value}


def thumbnail(value: str | None) -> str | None:
    """Turn a picture's path into a data URL; one that is a data URL already stays. Raises ConfigFault."""
    if not value or value.startswith("data:"):
        return value
    try:
        content = Path(value).expanduser().read_bytes()
    except OSError as error:
        remedy = "give an image file or a data: URL"
        raise ConfigFault(
            [Fault(option("metadata.thumbnail"), f"{value} cannot be read: {error.strerror}", remedy)]
        ) from None
    kind = mimetypes.guess_type(value)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def kohya_keys(
    cfg: TrainConfig, facts: RunFacts, saved_at: float, base_version: str, objective: Mapping[str, Any]
) -> dict[str, str]:
    """Describe the training under kohya's names; what this run has not or does not know has no key.

    base_version: kohya's word for the kind of model. objective: what the family says of its loss and noise.
    Folders and files are named without their paths.
    """
    values = _of_the_run(cfg, facts, saved_at) | {"base_model_version": base_version}
    values |= _of_the_settings(cfg) | dict(objective) | _of_the_data(cfg, facts) | _of_the_network(cfg)
    return {f"ss_{name}": _text(value) for name, value in values.items()}


def _of_the_run(cfg: TrainConfig, facts: RunFacts, saved_at: float) -> dict[str, Any]:
    return {
        "session_id": facts.session_id,
        "training_started_at": facts.started_at,
        "training_finished_at": saved_at,
        "output_name": cfg.save.output_name,
        "sd_model_name": _name(cfg.model.pretrained) or f"random weights ({_name(cfg.model.init_from_config)})",
        "vae_name": _name(cfg.model.vae),
        "steps": facts.step,
        "epoch": facts.epoch,
        "max_train_steps": facts.total_steps,
        "num_epochs": facts.num_epochs,
        "total_batch_size": facts.global_batch,
        "training_comment": cfg.metadata.training_comment,
        "sd_scripts_commit_hash": f"{IMPLEMENTATION} {__version__}",
    }


def _of_the_settings(cfg: TrainConfig) -> dict[str, Any]:
    training, optimizer, model = cfg.training, cfg.optimizer, cfg.model
    return {
        "learning_rate": optimizer.learning_rate,
        "unet_lr": optimizer.learning_rate if optimizer.unet_lr is None else optimizer.unet_lr,
        "text_encoder_lr": [optimizer.learning_rate_te1, optimizer.learning_rate_te2]
        if model.train_text_encoder
        else None,
        "optimizer": optimizer.type + (f"({','.join(optimizer.args)})" if optimizer.args else ""),
        "lr_scheduler": optimizer.scheduler_type or optimizer.scheduler,
        "lr_warmup_steps": optimizer.warmup_steps,
        "batch_size_per_device": training.batch_size,
        "gradient_accumulation_steps": training.accumulation,
        "gradient_checkpointing": training.gradient_checkpointing,
        "max_grad_norm": training.max_grad_norm,
        "mixed_precision": training.mixed_precision,
        "seed": training.seed,
        "max_token_length": model.max_token_length,
        "clip_skip": model.clip_skip,
        "v2": False,
        "v_parameterization": model.prediction_type == "v_prediction",
        "cache_latents": cfg.cache.latents or cfg.cache.latents_to_disk,
        "ema_decay": cfg.ema.decay if cfg.ema.enable else None,
        "ema_profiles": list(cfg.ema.profiles) or None,
    }


def _of_the_network(cfg: TrainConfig) -> dict[str, Any]:
    """Say of an adapter what its tensors do not; module, rank and alpha are written with these."""
    section = cfg.adapter
    if section.type is None:
        return {}
    words = network_arguments(section)
    return {
        "network_dropout": section.dropout or None,
        "scale_weight_norms": section.scale_weight_norms,
        **({"network_args": words} if words else {}),
    }


def _of_the_data(cfg: TrainConfig, facts: RunFacts) -> dict[str, Any]:
    if cfg.data.datasets:
        return _of_the_data_sets(cfg, facts)

    # draws of an epoch; the last count of repeats holds for the folders behind it
    data, captions = cfg.data, cfg.captions
    repeats = [*data.repeats, *data.repeats[-1:] * (len(data.dirs) - len(data.repeats))]
    uses = dict(facts.data.get("buckets", {}))
    num_images = facts.data.get("draws_per_epoch", sum(uses.values()))
    num_reg = facts.data.get("reg_draws_per_epoch", 0)

    # what kohya writes of the data, under its names
    return {
        "dataset_dirs": {_name(path): {"n_repeats": n} for path, n in zip(data.dirs, repeats)},
        "reg_dataset_dirs": {_name(path): {"n_repeats": 1} for path in data.reg_dirs},
        "num_train_images": num_images - num_reg,
        "num_reg_images": num_reg,
        "prior_loss_weight": cfg.loss.prior_weight if num_reg else None,
        "num_batches_per_epoch": -(-num_images // max(1, cfg.training.batch_size)),
        "resolution": list(data.resolution) if data.resolution else None,
        "enable_bucket": data.enable_bucket,
        "min_bucket_reso": data.min_bucket_reso,
        "max_bucket_reso": data.max_bucket_reso,
        "bucket_no_upscale": data.bucket_no_upscale,
        "bucket_info": _bucket_info(uses),
        "flip_aug": data.flip,
        "random_crop": data.random_crop,
        "shuffle_caption": captions.shuffle,
        "keep_tokens": captions.keep_tokens,
        "caption_dropout_rate": captions.dropout_rate,
        "caption_dropout_every_n_epochs": captions.dropout_every_n_epochs,
        "caption_tag_dropout_rate": captions.tag_dropout_rate,
        "dataset_fingerprint": facts.data.get("fingerprint"),
    }


def _of_the_data_sets(cfg: TrainConfig, facts: RunFacts) -> dict[str, Any]:
    """Describe the data sets of a TOML, as kohya does in ss_datasets, with the user's own words about each subset."""
    uses: dict[str, int] = dict(facts.data.get("buckets", {}))
    num_images = facts.data.get("draws_per_epoch", sum(uses.values()))
    num_reg = facts.data.get("reg_draws_per_epoch", 0)
    records = []
    for number, dataset in enumerate(cfg.data.datasets, 1):
        record = dataset.model_dump(mode="json", exclude={"subsets"})
        mark = f" of data set {number}"
        several = len(cfg.data.datasets) > 1
        own = {name.partition(" ")[0]: n for name, n in uses.items() if not several or name.endswith(mark)}
        record["bucket_info"] = _bucket_info(own)
        record["subsets"] = [_of_a_subset(subset) for subset in dataset.subsets]
        records.append(record)
    return {
        "datasets": records,
        "num_train_images": num_images - num_reg,
        "num_reg_images": num_reg,
        "prior_loss_weight": cfg.loss.prior_weight if num_reg else None,
        "resolution": list(cfg.data.resolution) if cfg.data.resolution else None,
        "dataset_fingerprint": facts.data.get("fingerprint"),
    }


def _of_a_subset(subset: SubsetSection) -> dict[str, Any]:
    """Return what kohya writes of a subset, under its names; paths by their last part."""
    facts = subset.model_dump(mode="json", exclude={"captions", "flat", "dataset_class"}, exclude_none=True)
    captions = subset.captions
    for field in ("image_dir", "metadata_file", "conditioning_dir", "default_mask"):
        if field in facts:
            facts[field] = _name(facts[field])
    if folders := facts.pop("control_dirs"):
        facts["control_dirs"] = [_name(folder) for folder in folders]
    facts["num_repeats"] = facts.pop("repeats")
    facts["flip_aug"] = facts.pop("flip")
    return facts | {
        "shuffle_caption": captions.shuffle,
        "keep_tokens": captions.keep_tokens,
        "caption_dropout_rate": captions.dropout_rate,
        "caption_tag_dropout_rate": captions.tag_dropout_rate,
    }


def _bucket_info(uses: Mapping[str, int]) -> dict[str, Any]:
    """Write {"64x32": 10} as kohya's {"buckets": {"0": {"resolution": [64, 32], "count": 10}}}."""
    rows = [{"resolution": [int(side) for side in name.split("x")[:2]], "count": n} for name, n in uses.items()]
    return {"buckets": {str(i): row for i, row in enumerate(rows)}}


def _name(path: str | None) -> str | None:
    return name_of(path) if path else None


def _text(value: Any) -> str:
    """Write a value as kohya does: JSON for lists and tables, else Python's own words (True, None)."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def flow_facts(cfg: TrainConfig, options: Sequence[FamilyOption]) -> dict[str, Any]:
    """Return what a header says of the loss and the times, under kohya's names."""
    loss, section = cfg.loss, cfg.flow
    facts = {
        "loss_type": loss.type,
        "pseudo_huber_c": loss.pseudo_huber_c,
        "timestep_sample_method": section.timestep_sample_method,
        "sigmoid_scale": section.sigmoid_scale,
        "shift": section.shift,
        "flux_shift": section.flux_shift,
        **{option.field.rpartition(".")[2]: _value(cfg, option.field) for option in options},
    }
    return {name: value for name, value in facts.items() if value is not None}


def _value(cfg: Any, field: str) -> Any:
    for name in field.split("."):
        cfg = getattr(cfg, name)
    return cfg
