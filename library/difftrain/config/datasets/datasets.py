"""The data sets of a run in one form, whether they come from flags or from a data set TOML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from difftrain.config.datasets.clips import reads_clips
from difftrain.config.schema.sections import (
    CaptionSection,
    ClipSection,
    DataSection,
    DatasetSection,
    PictureSection,
    SizeSection,
    SubsetSection,
    TrainConfig,
)
from difftrain.contracts.errors import Fault


@dataclass
class Resolved:
    """The data sets of a file, what went wrong, and what is worth saying.

    overridden: "section.field" of the command line's values that no data set takes, since the file sets all.
    masked: the masks that the file names count, whatever loss.masked says.
    """

    datasets: tuple[DatasetSection, ...] = ()
    validation_seed: int | None = None
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    overridden: set[str] = field(default_factory=set)
    masked: bool = False


def applied(cfg: TrainConfig, resolved: Resolved) -> TrainConfig:
    """Put data sets into a configuration.

    What is said of a run as a whole becomes theirs: the largest batch, picture and share that is held out.
    """
    datasets = resolved.datasets
    if not datasets:
        return cfg
    largest = max((dataset.resolution or (0, 0) for dataset in datasets), key=lambda size: size[0] * size[1])
    seed = cfg.validation.seed if resolved.validation_seed is None else resolved.validation_seed
    rates = {dataset.framerate for dataset in datasets if reads_clips(dataset.frame_buckets)}
    changes: dict[str, dict[str, Any]] = {
        "loss": {"masked": cfg.loss.masked or resolved.masked},
        "data": {
            "datasets": datasets,
            "resolution": largest if all(largest) else None,
            "framerate": rates.pop() if len(rates) == 1 else cfg.data.framerate,
        },
        "training": {
            "batch_size": max(dataset.batch_size for dataset in datasets),
            "image_batch_size": max((d.image_batch_size for d in datasets if d.image_batch_size), default=None),
        },
        "validation": {"split": max(dataset.validation_split for dataset in datasets), "seed": seed},
    }
    return cfg.model_copy(
        update={name: getattr(cfg, name).model_copy(update=fields) for name, fields in changes.items()}
    )


def datasets_of(data: DataSection, captions: CaptionSection) -> tuple[DatasetSection, ...]:
    """Return the data sets: those of the TOML, or the one that the folders of the flags are."""
    if data.datasets:
        return data.datasets
    fields = (*SizeSection.model_fields, *ClipSection.model_fields)
    sizes: dict[str, Any] = {name: getattr(data, name) for name in fields}
    return (DatasetSection(subsets=tuple(_subsets(data, captions)), **sizes),)


def subsets_of(cfg: TrainConfig) -> tuple[SubsetSection, ...]:
    """Return the sources of all data sets: what a rule about pictures or captions has to look at."""
    return tuple(subset for dataset in datasets_of(cfg.data, cfg.captions) for subset in dataset.subsets)


def has_buckets(cfg: TrainConfig) -> bool:
    """Tell whether pictures keep their aspect ratio in any data set, so that steps differ in shape."""
    return any(dataset.enable_bucket for dataset in datasets_of(cfg.data, cfg.captions))


def draws_captions(cfg: TrainConfig, *, with_variants: bool = True) -> bool:
    """Tell whether uses of one record may have different words, dropped captions aside.

    with_variants: also where a source says itself how many captions are drawn of a record.
    """
    sections = [subset.captions for subset in subsets_of(cfg) if with_variants or subset.captions.variants is None]
    return any(
        section.shuffle or section.enable_wildcard or section.tag_dropout_rate > 0 or section.shuffle_capitalization
        for section in sections
    )


def _subsets(data: DataSection, captions: CaptionSection) -> list[SubsetSection]:
    look: dict[str, Any] = {name: getattr(data, name) for name in PictureSection.model_fields}
    look["captions"] = captions
    folder, once = next(iter(data.dirs), None), data.repeats[0]
    if data.dataset_class:
        return [SubsetSection(dataset_class=data.dataset_class, image_dir=folder, repeats=once, **look)]
    if data.in_json:
        return [SubsetSection(metadata_file=data.in_json, image_dir=folder, repeats=once, **look)]
    repeats = data.repeats * len(data.dirs) if len(data.repeats) == 1 else data.repeats
    trained = [
        SubsetSection(image_dir=image_dir, repeats=times, **look)
        for image_dir, times in zip(data.dirs, repeats, strict=False)
    ]
    return trained + [SubsetSection(image_dir=image_dir, is_reg=True, **look) for image_dir in data.reg_dirs]
