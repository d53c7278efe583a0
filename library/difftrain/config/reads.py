"""Which settings a run has read by its first step: one that somebody gave and that nothing has read stops it.

Reads are recorded while a run is put together, by a class attribute that is there no longer than that: a step pays
nothing for it. What may be read later, elsewhere, or not at all where an earlier run has left its work, is LATER's.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from difftrain.config.schema.section import Section
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import default_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts.errors import ConfigFault, Fault

# section or field -> where it is read, if not on every start before the first step
LATER: dict[str, str] = {
    # by the file of data sets in place of the run, which each take it; where a run is fresh, and does not go on
    "training.batch_size": "models/metadata.py, engine/accelerate.py",
    "training.image_batch_size": "data/prepare.py",
    "training.initial_step": "train/run.py",
    "training.initial_epoch": "train/run.py",
    "training.skip_until_initial_step": "train/run.py",
    # in loader processes, and where an index is built anew
    "data": "data/recipe.py, data/prepare.py, data/index/build.py, data/loader.py",
    "captions": "data/captions.py, data/recipe.py, models/unet.py",
    # where a cache is built; what is cached already is only read
    "cache": "cache/build.py, cache/disk.py, cache/locations.py, cache/request.py, models/vae/latents.py",
    "model.vae_batch_size": "models/vae/latents.py",
    "model.tokenizer_cache_dir": "hub/fetch.py",
    # where weights lie in files, and where there are several ranks: one command line serves other machines too
    "model.disable_mmap": "models/weights/find.py",
    "fsdp": "engine/fsdp.py",
    "training.ddp_bucket_view": "engine/ddp.py, engine/accelerate.py",
    "training.ddp_static_graph": "engine/ddp.py, engine/accelerate.py",
    # in the loss; test/contracts/test_objective_settings.py holds that each of them changes it
    "loss": "models/objective/ddpm.py, models/objective/flow.py, diffusion/losses.py",
    "noise": "models/objective/ddpm.py",
    "flow": "models/objective/flow.py",
    "repa.weight": "models/speedups.py",
    "repa.until_step": "models/repa.py",
    "patch_masking.until_step": "models/routing.py",
    # between steps, at a save and at the end
    "training.max_skipped_steps": "train/meter.py",
    "training.performance": "report/report.py",
    "training.only_warn": "train/session.py",
    "ema.snapshot_precision": "train/averages.py",
    "validation": "train/evaluating.py, data/evaluation_sets.py",
    "eval": "train/evaluating.py, train/kid.py, data/evaluation_sets.py",
    "sample": "train/drawing.py",
    "save": "train/saving.py, checkpoint/retain.py, train/run_dir.py",
    "hub": "hub/uploads.py, hub/fetch.py",
    "logging": "report/trackers/registry.py, train/meter.py, train/outputs.py",
    "metadata": "models/metadata.py",
    "demo": "demo/make.py, demo/score.py, train/finalize.py",
}
# they read every field alike, to write it, compare it or judge it
_GENERIC = (
    "difftrain.config.digest",
    "difftrain.config.toml",
    "difftrain.config.rules",
    "difftrain.config.schema.validate",
)
_SECTIONS: dict[type, str] = {
    field.annotation: name for name, field in TrainConfig.model_fields.items() if isinstance(field.annotation, type)
}


@contextmanager
def recorded() -> Iterator[set[str]]:
    """Note every "section.field" that is read meanwhile, by this process."""
    reads: set[str] = set()

    def tracked(self: Section, name: str) -> Any:
        section = _SECTIONS.get(type(self))
        if section is not None and name in type(self).model_fields:
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if not reader.startswith(_GENERIC):
                reads.add(f"{section}.{name}")
        return object.__getattribute__(self, name)

    Section.__getattribute__ = tracked  # type: ignore[assignment,method-assign]
    try:
        yield reads
    finally:
        del Section.__getattribute__


def explicit_fields(cfg: TrainConfig, origins: Mapping[str, str], noted: Collection[str]) -> dict[str, str]:
    """Return what somebody gave and is not the default anyway: field -> where. noted: what has been said to have no effect."""
    values = ((path, getattr(getattr(cfg, path.partition(".")[0]), path.partition(".")[2])) for path in origins)
    return {path: origins[path] for path, value in values if path not in noted and value != default_of(path)}


def refuse_unread(explicit: Mapping[str, str], reads: Collection[str]) -> None:
    """Stop a run that somebody gave what nothing has read by its first step. Raises ConfigFault that names all of it."""
    unread = [path for path in explicit if path not in reads and not is_read_later(path)]
    if unread:
        what = "nothing in this run uses it"
        remedy = "leave it out, or also give what it belongs to"
        raise ConfigFault([Fault(explicit[path] or option(path), what, remedy) for path in unread])


def is_read_later(path: str) -> bool:
    """Tell whether a field may be unread at the first step."""
    return path in LATER or path.partition(".")[0] in LATER
