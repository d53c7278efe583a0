"""What one field cannot know alone: contradictions and missing companions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from difftrain.config.datasets.datasets import has_buckets
from difftrain.config.rules.finding import Finding, Rule, value_of
from difftrain.config.schema.families import row_of, takes
from difftrain.config.schema.rates import is_schedule_free, schedule_name
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import default_of
from difftrain.config.spellings.spelling import option, spelled


class Companion(NamedTuple):
    """A field that means something only together with another."""

    field: str
    met: Callable[[TrainConfig], object]
    needs: str
    note: bool = False  # kohya lets it pass: said, no fault
    passes_there: bool = False  # a fault at train.py; at kohya's entry point a note, and it counts as not given


_CYCLED = ("cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay")
_FLOORED = ("cosine_with_min_lr", "warmup_stable_decay")
_UNWARMED = ("constant", "piecewise_constant", "adafactor")
_BUCKETS = "has no effect without {data.enable_bucket=true}"

_SKIPS = "needs {training.skip_until_initial_step=true}: the step number is the position in the data, so the data before it must be skipped too"

_SENDS = "needs {hub.repo_id}: nothing is uploaded to a hub"

NEEDS: tuple[Companion, ...] = (
    Companion("data.min_bucket_reso", lambda c: has_buckets(c), _BUCKETS, note=True),
    Companion("data.max_bucket_reso", lambda c: has_buckets(c), _BUCKETS, note=True),
    Companion("data.bucket_reso_steps", lambda c: has_buckets(c), _BUCKETS, note=True),
    Companion("data.bucket_no_upscale", lambda c: has_buckets(c), _BUCKETS, note=True),
    Companion("training.compile_backend", lambda c: c.training.compile, "has no effect without {training.compile=true}", note=True),
    Companion("optimizer.learning_rate_te1", lambda c: c.model.train_text_encoder, "needs {model.train_text_encoder=true}", passes_there=True),
    Companion("optimizer.learning_rate_te2", lambda c: c.model.train_text_encoder, "needs {model.train_text_encoder=true}", passes_there=True),
    Companion("training.initial_step", lambda c: _skips(c), _SKIPS),
    Companion("training.initial_epoch", lambda c: _skips(c), _SKIPS),
    Companion("training.skip_until_initial_step", lambda c: c.training.initial_step or c.training.initial_epoch > 1 or c.save.resume,
         "needs {training.initial_step} or {training.initial_epoch}"),
    Companion("optimizer.text_encoder_lr", lambda c: c.model.train_text_encoder, "needs {model.train_text_encoder=true}", passes_there=True),
    Companion("optimizer.schedulefree_wrapper_args", lambda c: c.optimizer.schedulefree_wrapper,
         "needs {optimizer.schedulefree_wrapper=true}"),
    Companion("ema.decay", lambda c: c.ema.enable, "needs {ema.enable=true}"),
    Companion("ema.ramp", lambda c: c.ema.enable, "needs {ema.enable=true}"),
    Companion("loss.min_snr_plus_one", lambda c: c.loss.min_snr_gamma, "needs {loss.min_snr_gamma}"),
    Companion("validation.seed", lambda c: c.validation.split, "needs {validation.split}: nothing is held out"),
    Companion("validation.every_n_steps", lambda c: c.validation.split, "needs {validation.split}: nothing is held out"),
    Companion("validation.every_n_epochs", lambda c: c.validation.split, "needs {validation.split}: nothing is held out"),
    Companion("validation.max_steps", lambda c: c.validation.split, "needs {validation.split}: nothing is held out"),
    Companion("save.last_n_steps", lambda c: _saves_steps(c), "needs {save.every_n_steps}", passes_there=True),
    Companion("save.last_n_steps_state", lambda c: _saves_steps(c) or c.save.checkpoint_every_n_minutes, "needs {save.every_n_steps}", passes_there=True),
    Companion("save.last_n_epochs", lambda c: _saves_epochs(c), "needs {save.every_n_epochs} or {save.n_epoch_ratio}", passes_there=True),
    Companion("save.last_n_epochs_state", lambda c: _saves_epochs(c) or c.save.checkpoint_every_n_epochs,
         "needs {save.every_n_epochs} or {save.n_epoch_ratio}", passes_there=True),
    Companion("save.last_n_steps_state", lambda c: c.save.state or c.save.checkpoint_every_n_minutes, "needs {save.state=true}", passes_there=True),
    Companion("save.last_n_epochs_state", lambda c: c.save.state or c.save.checkpoint_every_n_epochs, "needs {save.state=true}", passes_there=True),
    Companion("hub.path_in_repo", lambda c: c.hub.repo_id, _SENDS, passes_there=True),
    Companion("hub.repo_type", lambda c: c.hub.repo_id, _SENDS, note=True),
    Companion("hub.visibility", lambda c: c.hub.repo_id, _SENDS, note=True),
    Companion("hub.async_upload", lambda c: c.hub.repo_id, _SENDS, note=True),
    Companion("hub.save_state", lambda c: c.hub.repo_id, _SENDS),
    Companion("hub.save_state", lambda c: c.save.state or c.save.state_on_train_end,
         "needs {save.state=true} or {save.state_on_train_end=true}: there are no states to upload"),
    Companion("sample.every_n_steps", lambda c: c.sample.prompts or c.sample.texts, "needs {sample.prompts}: there is nothing to sample", passes_there=True),
    Companion("sample.every_n_epochs", lambda c: c.sample.prompts or c.sample.texts, "needs {sample.prompts}: there is nothing to sample", passes_there=True),
    Companion("sample.at_first", lambda c: c.sample.prompts or c.sample.texts, "needs {sample.prompts}: there is nothing to sample", passes_there=True),
    Companion("sample.sampler", lambda c: c.sample.prompts or c.sample.texts or c.eval.kid or c.demo.score or _is_usual_sampler(c),
         "needs {sample.prompts}: there is nothing to sample", passes_there=True),
    Companion("demo.score", lambda c: c.demo.dataset, "needs {demo.dataset}: there is nothing to score"),
    Companion("optimizer.num_cycles", lambda c: _schedule(c) in _CYCLED, f"acts on {', '.join(_CYCLED)} only", note=True),
    Companion("optimizer.power", lambda c: _schedule(c) == "polynomial", "acts on polynomial only", note=True),
    Companion("optimizer.timescale", lambda c: _schedule(c) == "inverse_sqrt", "acts on inverse_sqrt only", note=True),
    Companion("optimizer.min_lr_ratio", lambda c: _schedule(c) in _FLOORED, f"acts on {', '.join(_FLOORED)} only", note=True),
    Companion("optimizer.decay_steps", lambda c: _schedule(c) == "warmup_stable_decay", "acts on warmup_stable_decay only", note=True),
    Companion("optimizer.warmup_steps", lambda c: not c.optimizer.warmup_steps or _schedule(c) not in ("", *_UNWARMED)
         or is_schedule_free(c.optimizer),
         "this schedule has no warm-up; {optimizer.scheduler}=constant_with_warmup has one"),
)  # fmt: skip


def _skips(cfg: TrainConfig) -> object:
    return cfg.training.skip_until_initial_step


def _saves_steps(cfg: TrainConfig) -> object:
    return cfg.save.every_n_steps or cfg.save.every_n_examples


def _saves_epochs(cfg: TrainConfig) -> object:
    return cfg.save.every_n_epochs or cfg.save.n_epoch_ratio


def _is_usual_sampler(cfg: TrainConfig) -> bool:
    """Tell whether the sampler is what the family has anyway: a run's record writes it, with and without prompts."""
    return cfg.sample.sampler in (default_of("sample.sampler"), row_of(cfg).defaults.get("sample.sampler"))


def _schedule(cfg: TrainConfig) -> str:
    return schedule_name(cfg.optimizer)


def companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(NEEDS, cfg, requested)


def lacking(needs: Iterable[Companion], cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find the fields of a table that were given and lack what they need."""
    for need in needs:
        value = value_of(cfg, need.field)
        if need.field in requested and value is not None and value is not False and not need.met(cfg):
            yield Finding((need.field,), spelled(need.needs), note=need.note, passes_there=need.passes_there)


def required(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find what every run needs and this one lacks."""
    if not cfg.save.output_dir:
        yield Finding(("save.output_dir",), "is missing", "give the folder for everything that the run writes")
    named = cfg.data.dirs or cfg.data.dataset_class or cfg.data.dataset_config or cfg.data.datasets
    if not named:
        yield Finding(("data.dirs",), "is missing", "give at least one folder of images, tars or parquet")
    if not cfg.data.resolution and not cfg.data.dataset_config:  # of each data set, where it is read
        yield Finding(("data.resolution",), "is missing", "give WIDTH,HEIGHT; for SDXL 1024,1024")


def model(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Weights come from one place."""
    parts = ("transformer", "vae", "text_encoder1", "text_encoder2", "text_encoder3", "text_encoder4")
    elsewhere = takes(cfg, "model.transformer") and any(value_of(cfg, f"model.{part}") for part in parts)
    if not cfg.model.pretrained and not cfg.model.init_from_config and not elsewhere:
        remedy = f"give weights, or {option('model.init_from_config')}={'|'.join(row_of(cfg).sizes[:2])}|FILE.json for random ones"
        yield Finding(("model.pretrained", "model.init_from_config"), "is missing", remedy)
    if cfg.model.pretrained and cfg.model.init_from_config:
        remedy = "give weights to start from, or a size for random ones, not both"
        yield Finding(
            ("model.init_from_config", "model.pretrained"), f"contradicts {option('model.pretrained')}", remedy
        )


def data_counts(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """One number of repeats for all folders, or one for each."""
    repeats, folders = len(cfg.data.repeats), len(cfg.data.dirs)
    if folders and repeats not in (1, folders):
        what = f"has {repeats} numbers for {folders} folder{'s' if folders > 1 else ''}"
        yield Finding(("data.repeats", "data.dirs"), what, f"give one number, or one per {option('data.dirs')}")


def cadence(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Say which of two counts holds where kohya lets both be given."""
    if {"training.max_epochs", "training.max_steps"} <= requested and not cfg.training.first_limit:
        yield Finding(("training.max_steps",), f"has no effect: {option('training.max_epochs')} wins", note=True)
    training, resume = cfg.training, cfg.save.resume
    if {"training.initial_step", "training.initial_epoch"} <= requested:
        yield Finding(("training.initial_epoch",), f"has no effect: {option('training.initial_step')} wins", note=True)
    if training.skip_until_initial_step and resume and resume != "auto":
        what = f"has no effect with {option('save.resume')}=FOLDER: the state records the step to resume from"
        yield Finding(("training.skip_until_initial_step",), what, note=True)
    if not training.max_epochs and training.initial_step >= training.max_steps:
        what = f"must be below {option('training.max_steps')}, {training.initial_step} of {training.max_steps}"
        yield Finding(("training.initial_step",), what, "nothing would be left to train")
    if training.max_epochs and training.initial_epoch > training.max_epochs:
        what = f"must be at most {option('training.max_epochs')}, {training.initial_epoch} of {training.max_epochs}"
        yield Finding(("training.initial_epoch",), what, "nothing would be left to train")
    if {"save.n_epoch_ratio", "save.every_n_epochs"} <= requested:
        yield Finding(("save.every_n_epochs",), f"has no effect: {option('save.n_epoch_ratio')} wins", note=True)


def no_metadata(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Nothing can be written into a header that is not written."""
    if cfg.save.no_metadata:
        for key in type(cfg.metadata).model_fields:
            if getattr(cfg.metadata, key) is not None:
                yield Finding(
                    (f"metadata.{key}",), f"contradicts {option('save.no_metadata', True)}", "give one of them"
                )


RULES: tuple[Rule, ...] = (required, model, data_counts, cadence, no_metadata, companions)
