"""`difftrain cache build`: the caches of a training command, without the training."""

from __future__ import annotations

from collections.abc import Iterable

from difftrain.cli.words import LOADING, alive
from difftrain.config import parse_flags
from difftrain.config.door import enter
from difftrain.config.parse_flags import Parsed, resolve
from difftrain.config.render.help import entries
from difftrain.config.rules import data
from difftrain.config.rules import run as rules
from difftrain.config.rules.finding import Finding, Rule
from difftrain.config.rules.optimizer import one_of
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.flags import FLAGS
from difftrain.contracts.errors import ConfigFault
from difftrain.device.choice import KINDS
from difftrain.report.progress import SIGNS

SAYS = "encode what a training command would cache, and stop"
PROG = "difftrain cache build"
_SHOWN = ("cache", "data", "captions")


def main(argv: list[str]) -> int:
    """Build what is missing; return the exit code. Every rank of a launcher calls it."""
    return enter(PROG, argv, lambda: read(argv), alive(PROG, work, LOADING), _help)


def read(argv: list[str]) -> Parsed:
    """Read the flags of a training command, with those that it implies here. Raises: ConfigFault with every fault."""
    judged = (_lenient(rule) for rule in parse_flags.RULES if rule is not data.only)  # what that asks for is implied
    return resolve([*argv, *implied(argv)], FLAGS, (*judged, one_of("training.device", ("auto", *KINDS))))


def implied(argv: list[str]) -> list[str]:
    """Return the flags of a cache that were not given: what is built is on disk, and both kinds where none is named."""
    added = ["--cache_only"]
    try:
        cfg = resolve(argv, FLAGS, ()).config
    except ConfigFault:  # they are all said when the whole line is read
        return added
    cache = cfg.cache
    neither = not (cache.latents or cache.latents_to_disk or cache.text or cache.text_to_disk)
    if cache.latents or neither:
        added.append("--cache_latents_to_disk")
    if cache.text or (neither and not cfg.model.train_text_encoder):
        added.append("--cache_text_encoder_outputs_to_disk")
    return added


def _lenient(rule: Rule) -> Rule:
    """Leave out of a rule's findings the folder that only a training writes to."""
    if rule is not rules.required:
        return rule

    def kept(cfg: TrainConfig, requested: set[str]) -> Iterable[Finding]:
        return (problem for problem in rule(cfg, requested) if problem.about[0] != "save.output_dir")

    return kept


def work(parsed: Parsed) -> int:
    """Build; torch is imported here, where the configuration is known to be sound."""
    from difftrain.device.choice import calm_threads, hide_unusable_npu, hold_autoload
    from difftrain.distributed.launch import end_with_launcher

    hold_autoload()
    calm_threads()
    end_with_launcher()
    hide_unusable_npu(parsed.config.training.device)
    from difftrain.train.run import run

    SIGNS.now("starting")
    return run(parsed.config, list(parsed.argv))


def _help() -> str:
    shown = [flag for flag in FLAGS.values() if flag.to.split(".")[0] in _SHOWN and flag.status == "offered"]
    return (
        f"usage: {PROG} --cache_dir=CACHE --pretrained_model_name_or_path=PATH --train_data_dir=DIR --resolution=W,H\n"
        "           [--flag=value ...]\n\n"
        "Encode what the same training command would read from its cache, then stop: as --cache_only does, with\n"
        "--cache_latents_to_disk and --cache_text_encoder_outputs_to_disk where neither is given. Every flag of a training\n"
        "command is accepted; also under torchrun. What is already cached is not encoded again.\n\n" + entries(shown)
    )
