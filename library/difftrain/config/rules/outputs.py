"""Rules about what a run writes: saves, samples and evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from difftrain.config.datasets.datasets import subsets_of
from difftrain.config.paths import expanded, is_folder
from difftrain.config.rules.finding import Finding, Rule
from difftrain.config.rules.run import Companion, lacking
from difftrain.config.schema.outputs import step_ranges
from difftrain.config.schema.sections import CaptionSection, PictureSection, SaveSection, TrainConfig
from difftrain.config.spellings.spelling import option

_NO_SET = "has no effect: there is no evaluation set (eval_datasets)"
_NO_KID = "needs kid = true: no images are generated for a KID"
_TAKEN = frozenset({"train", "loss", "lr", "speed", "memory", "progress"})  # what other numbers' tags begin with

# published files say how often to evaluate and leave the sets to be filled in: told, no fault
EVAL_NEEDS: tuple[Companion, ...] = (
    *(
        Companion(f"eval.{field}", lambda c: c.eval.sets, _NO_SET, note=True)
        for field in ("every_n_steps", "every_n_epochs", "every_n_examples", "before_first_step", "batch_size")
    ),
    Companion("eval.kid", lambda c: c.eval.sets, "needs an evaluation set (eval_datasets) to compare with"),
    *(
        Companion(f"eval.{field}", lambda c: c.eval.kid, _NO_KID)
        for field in ("kid_pictures", "kid_every_n_steps", "kid_guidance", "kid_steps")
    ),
)


def eval_companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(EVAL_NEEDS, cfg, requested)


def names(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """The names of evaluation sets stand before their numbers: each its own, and nobody else's."""
    count = Counter(section.name for section in cfg.eval.sets)
    for name, times in count.items():
        if times > 1:
            yield Finding(("eval.sets",), f"{times} evaluation sets are named {name!r}", "give each its own name")
        elif not name.strip():
            yield Finding(("eval.sets",), "an evaluation set has no name", "its metrics are logged as NAME/loss")
        elif name.split("/")[0] in _TAKEN:
            what = f"the evaluation set name {name!r} is also the name of other metrics of the run"
            yield Finding(("eval.sets",), what, f"use any name that does not begin with {', '.join(sorted(_TAKEN))}")


def pictures(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """A distance between two handfuls of pictures is chance."""
    if cfg.eval.kid and cfg.eval.kid_pictures < LEAST_PICTURES:
        what = f"must be at least {LEAST_PICTURES}, got {cfg.eval.kid_pictures}"
        yield Finding(("eval.kid_pictures",), what, "fewer are meaningless; some hundreds are better")


LEAST_PICTURES = 20

EVAL_RULES: tuple[Rule, ...] = (eval_companions, names, pictures)


_UNBUCKETED = "has no effect with enable_bucket, as in kohya's: buckets are cropped in the centre, or at random"

SAMPLE_NEEDS: tuple[Companion, ...] = (
    Companion("loss.masked", lambda c: any(subset.alpha_mask or subset.conditioning_dir or subset.default_mask for subset in subsets_of(c)),
         "has no effect: there are no masks ({data.conditioning_dir}, {data.alpha_mask=true})", note=True),
)  # fmt: skip


def sample_companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(SAMPLE_NEEDS, cfg, requested)


class _Subset(NamedTuple):
    """Where settings of pictures and captions stand: in flags, or in a subset of the data set TOML."""

    name: str  # "" for the flags
    picture: PictureSection
    captions: CaptionSection
    bucketed: bool

    def finding(
        self, path: str, what: str, remedy: str = "", *, note: bool = False, passes_there: bool = False
    ) -> Finding:
        """Name a field, or the subset and its field."""
        if not self.name:
            return Finding((path,), what, remedy, note, passes_there)
        field = path.partition(".")[2]
        return Finding(("data.dataset_config", path), f"{self.name}: {field} {what}", remedy, note)


def _places(cfg: TrainConfig) -> Iterator[_Subset]:
    if not cfg.data.datasets:
        yield _Subset("", cfg.data, cfg.captions, cfg.data.enable_bucket)
    for dataset in cfg.data.datasets:
        for subset in dataset.subsets:
            name = subset.image_dir or subset.metadata_file or "a subset"
            yield _Subset(name, subset, subset.captions, dataset.enable_bucket)


def samples(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Judge the settings of every source."""
    findings: dict[Finding, None] = {}
    for subset in _places(cfg):
        findings |= dict.fromkeys((*_faces(subset), *_masks(subset, cfg.loss.masked), *_growth(subset)))
    yield from findings


def _faces(subset: _Subset) -> Iterator[Finding]:
    limits = subset.picture.face_crop_range
    if limits is None:
        return
    if limits[0] > limits[1]:
        remedy = "1.0,4.0: from the face only to a frame four times as large"
        yield subset.finding("data.face_crop_range", f"must be LOW,HIGH, got {limits[0]:g},{limits[1]:g}", remedy)
    if subset.bucketed:
        yield subset.finding("data.face_crop_range", _UNBUCKETED, note=True)


def _masks(subset: _Subset, masked: bool) -> Iterator[Finding]:
    folder = subset.picture.conditioning_dir
    if subset.picture.alpha_mask and (folder or getattr(subset.picture, "default_mask", None)):
        yield subset.finding("data.alpha_mask", "has no effect: mask files take precedence", note=True)
    if not folder:
        return
    if not masked:
        what = f"needs {option('loss.masked', True)}: it contains masks that nothing would use"
        yield subset.finding("data.conditioning_dir", what, passes_there=True)
    elif not subset.name and not is_folder(expanded(folder)):  # those of a TOML are looked for with its folders
        remedy = "give the folder of the masks, each named as its image"
        yield subset.finding("data.conditioning_dir", f"no such folder: {folder!r}", remedy)


def _growth(subset: _Subset) -> Iterator[Finding]:
    if subset.captions.token_warmup_min != 1 and not subset.captions.token_warmup_step:
        yield subset.finding("captions.token_warmup_min", "has no effect without token_warmup_step", note=True)


SAMPLE_RULES: tuple[Rule, ...] = (sample_companions, samples)


WORDS = ("auto", "latest")  # what --resume_from_checkpoint takes beside a step and a folder
_NOTHING = "needs --resume_from_checkpoint: there is no run to resume"
_EACH_TIME = "cannot be used with an automatic resume: it would apply again at every restart"


def _resumes(cfg: TrainConfig) -> object:
    return cfg.save.resume


def _once(cfg: TrainConfig) -> object:
    return cfg.save.resume != "auto"


_RESETS = ("save.reset_dataloader", "save.reset_optimizer", "save.reset_optimizer_params")
SAVE_NEEDS: tuple[Companion, ...] = (
    *(Companion(field, _resumes, _NOTHING) for field in _RESETS),
    *(Companion(field, _once, _EACH_TIME) for field in _RESETS),
    Companion(
        "save.reset_optimizer_params",
        lambda c: not c.save.reset_optimizer,
        "has no effect: --reset_optimizer resets everything",
        note=True,
    ),
    Companion(
        "save.run_dirs",
        lambda c: c.save.naming == "steps",
        "needs naming = 'steps': run directories have no other naming",
    ),
    Companion(
        "sample.test_only",
        lambda c: c.sample.prompts or c.sample.texts,
        "needs sample prompts: there is nothing to sample",
    ),
    Companion("ema.update_every", lambda c: c.ema.enable, "has no effect without averaged weights", note=True),
)


def save_companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(SAVE_NEEDS, cfg, requested)


def pipeline(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What lies at the top of the run's folder is a pipeline of diffusers."""
    layout = cfg.save.model_as
    if cfg.save.naming == "diffusers" and layout not in ("diffusers", "diffusers_safetensors"):
        what = f"{layout or 'unset'} is not a diffusers layout, which naming = 'diffusers' writes"
        yield Finding(("save.model_as", "save.naming"), what, option("save.model_as", "diffusers_safetensors"))
    if cfg.save.last_n_states == 1:
        yield Finding(
            ("save.last_n_states",), "1: two are kept, so that one is complete while the other is written", note=True
        )


def one_work(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """A start builds the cache, draws pictures or writes out the data set."""
    if cfg.cache.only and cfg.sample.test_only:
        what = f"contradicts {option('sample.test_only')}: one builds the cache and stops, the other samples images and stops"
        yield Finding(("cache.only", "sample.test_only"), what, "give one of them")


def can_be_resumed(save: SaveSection) -> bool:
    """Say whether what is to be resumed can be there: words and steps are looked up when the run begins."""
    resume = save.resume or ""
    if save.run_dirs and (resume in WORDS or resume.isdecimal()):
        return True
    folders = [resume, *([str(Path(save.output_dir) / resume)] if save.run_dirs and save.output_dir else [])]
    return resume == "auto" or any(map(is_folder, folders))


SAVE_RULES: tuple[Rule, ...] = (save_companions, pipeline, one_work)


def trace(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Steps are traced by hooks on modules that run as they are written, in an engine whose ranks hold them whole."""
    field, steps = "logging.trace", cfg.logging.trace
    if steps is None:
        return
    try:
        ranges = step_ranges(steps)
    except ValueError as error:
        yield Finding((field,), str(error), "steps and ranges of them, such as 1,3-5")
        return
    if not ranges:
        yield Finding((field,), "names no step", "steps and ranges of them, such as 1,3-5")
    if cfg.training.compile:
        what = f"contradicts {option('training.compile', True)}: a compiled block hides the modules inside it"
        yield Finding((field, "training.compile"), what, "trace without it; a few steps are enough")
    if cfg.training.engine != "native":
        what = f"needs {option('training.engine')}=native, got {cfg.training.engine}"
        yield Finding((field, "training.engine"), what, "ranks of other engines may hold parts of modules")
    if cfg.optimizer.fused_backward or cfg.optimizer.fused_groups is not None:
        what = "writes no gradients of parameters: they are consumed and freed during the backward pass"
        yield Finding((field, "optimizer.fused_backward"), what, note=True)


TRACE_RULES: tuple[Rule, ...] = (trace,)
