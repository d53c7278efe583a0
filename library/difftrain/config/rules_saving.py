"""Rules about run directories, the names in them, and what a resume begins anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from difftrain.config.finding import Finding, Rule, option
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import SaveSection, TrainConfig
from difftrain.config.there import is_folder

WORDS = ("auto", "latest")  # what --resume_from_checkpoint takes beside a step and a folder
_NOTHING = "needs --resume_from_checkpoint: there is nothing to begin anew"
_EACH_TIME = "does not go with a resume that comes by itself: each restart would begin anew"


def _resumes(cfg: TrainConfig) -> object:
    return cfg.save.resume


def _once(cfg: TrainConfig) -> object:
    return cfg.save.resume != "auto"


_RESETS = ("save.reset_dataloader", "save.reset_optimizer", "save.reset_optimizer_params")
NEEDS: tuple[Need, ...] = (
    *(Need(field, _resumes, _NOTHING) for field in _RESETS),
    *(Need(field, _once, _EACH_TIME) for field in _RESETS),
    Need(
        "save.reset_optimizer_params",
        lambda c: not c.save.reset_optimizer,
        "has no effect: --reset_optimizer drops all",
        note=True,
    ),
    Need(
        "save.run_dirs",
        lambda c: c.save.naming == "steps",
        "needs naming = 'steps': a run directory holds no other names",
    ),
    Need("sample.test_only", lambda c: c.sample.prompts, "needs sample prompts: there is nothing to draw"),
    Need("ema.update_every", lambda c: c.ema.enable, "has no effect without an average of the weights", note=True),
)


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(NEEDS, cfg, asked)


def one_work(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """A start builds the cache, draws pictures or writes out the data set."""
    if cfg.cache.only and cfg.sample.test_only:
        what = f"contradicts {option('sample.test_only')}: one builds the cache and stops, the other draws pictures and stops"
        yield Finding(("cache.only", "sample.test_only"), what, "give one of them")


def can_be_resumed(save: SaveSection) -> bool:
    """Say whether what is to be resumed can be there: words and steps are looked up when the run begins."""
    given = save.resume or ""
    if save.run_dirs and (given in WORDS or given.isdecimal()):
        return True
    folders = [given, *([str(Path(save.output_dir) / given)] if save.run_dirs and save.output_dir else [])]
    return given == "auto" or any(map(is_folder, folders))


RULES: tuple[Rule, ...] = (companions, one_work)
