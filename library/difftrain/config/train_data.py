"""The data sets of train.py's files: what is trained on, and what is measured on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from difftrain.config import dataset_file, dataset_toml, rules_data
from difftrain.config.families import row_of
from difftrain.config.finding import value_of
from difftrain.config.sections import EvalSetSection, TrainConfig
from difftrain.config.train_settle import Settling
from difftrain.config.train_words import faults_in_own_words, in_own_words
from difftrain.config.validate import default_of

_FILE, _SETS, _EVAL = "data.dataset_config", "data.datasets", "eval.sets"
_AT_RANDOM = ("flip", "random_crop", "color_aug", "face_crop_range")


def with_data_sets(out: Settling, *, named_now: bool) -> TrainConfig:
    """Read the files of data sets, unless an earlier reading of them is here (a run's config.toml).

    named_now: the command line names the file, which then counts.
    """
    cfg = out.cfg
    multiple = row_of(cfg).multiple
    path = cfg.data.dataset_config
    if path and not (cfg.data.datasets and not named_now) and _FILE not in out.bad:
        found = dataset_toml.resolve(Path(path), cfg, multiple=multiple, batch_of=_batch_of(out, cfg))
        _say(out, found, _SETS, path)
        given = {each for each in found.overridden & out.origins.keys() if value_of(cfg, each) != default_of(each)}
        out.notes += map(in_own_words, rules_data.overridden(given, path))
        cfg = dataset_file.applied(cfg, found)
    elif (batch_of := _batch_of(out, cfg)) and not path and not cfg.data.datasets and cfg.data.resolution:
        width, height = cfg.data.resolution  # of the folders that the run's own file names
        batch = {"batch_size": batch_of(round(math.sqrt(width * height)))}
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update=batch)})
    if _EVAL in out.bad or not cfg.eval.sets:
        return cfg
    sets = [each if each.datasets else _eval_set(out, cfg, each, multiple) for each in cfg.eval.sets]
    return cfg.model_copy(update={"eval": cfg.eval.model_copy(update={"sets": tuple(sets)})})


def _eval_set(out: Settling, cfg: TrainConfig, section: EvalSetSection, multiple: int) -> EvalSetSection:
    """Resolve an evaluation set: every caption as it stands, no words dropped, and pictures as they are."""
    plain = cfg.model_copy(
        update={
            "captions": cfg.captions.model_copy(update={"dropout_rate": 0.0}),
            "validation": cfg.validation.model_copy(update={"split": 0.0}),
            "data": cfg.data.model_copy(update={name: default_of(f"data.{name}") for name in _AT_RANDOM}),
        }
    )
    batch_of = None if cfg.eval.batch_size else _batch_of(out, cfg)  # the former counts for every set
    found = dataset_toml.resolve(Path(section.config), plain, multiple=multiple, batch_of=batch_of)
    _say(out, found, _EVAL, section.config)
    return section.model_copy(update={"datasets": found.datasets})


def _say(out: Settling, found: dataset_file.Resolved, field: str, path: str) -> None:
    out.faults += [fault for fault in faults_in_own_words(found.faults) if fault not in out.faults]
    out.notes += [note for note in map(in_own_words, found.notes) if note not in out.notes]
    out.origins.setdefault(field, path)
    if found.faults:
        out.bad.add(field)


def _batch_of(out: Settling, cfg: TrainConfig) -> Any:
    """Return how many samples are taken at once at a resolution; one that is not named takes that of the next larger."""
    pairs = sorted(out.batch_of)
    if not pairs:
        return None

    def batch_of(side: int) -> int:
        return next((batch for named, batch in pairs if named >= side), pairs[-1][1])

    return batch_of
