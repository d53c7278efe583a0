"""What the optimizer's fields say together: the rate of every part, the schedule that counts, one argument's value."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from difftrain.config.schema import names
from difftrain.config.schema.families import row_of
from difftrain.config.schema.sections import OptimizerSection, TrainConfig

UNET_BLOCKS = 23  # of SDXL, as --block_lr counts them
ADAFACTOR = "adafactor"


def part_rates(cfg: TrainConfig) -> dict[str, float]:
    """Return the rate of every part that is trained, without those that a rate of 0 freezes.

    As kohya: an encoder's rate defaults to --learning_rate; --learning_rate=0 freezes the UNet whatever its blocks say.
    Families without a UNet train their denoiser alone, at --learning_rate.
    """
    section, row = cfg.optimizer, row_of(cfg)
    denoiser = row.denoiser
    if denoiser != "unet":
        return {denoiser: section.learning_rate} if section.learning_rate > 0 else {}
    unet = section.learning_rate if section.unet_lr is None else section.unet_lr
    if section.block_lr and not any(section.block_lr):
        unet = 0.0
    rates = {"unet": unet}
    if cfg.model.train_text_encoder:
        both = section.text_encoder_lr[:1] + section.text_encoder_lr[-1:] or (None, None)
        encoders = [part for part in row.parts if part.startswith("text_encoder")]
        for part, one, other in zip(encoders, (section.learning_rate_te1, section.learning_rate_te2), both):
            own_rate = other if one is None else one
            rates[part] = section.learning_rate if own_rate is None else own_rate
    return {part: rate for part, rate in rates.items() if rate > 0}


def group_rates(cfg: TrainConfig) -> set[float]:
    """Return the different rates of the parameter groups."""
    rates = part_rates(cfg)
    blocks = {rate for rate in cfg.optimizer.block_lr if rate > 0} if "unet" in rates else set()
    if blocks:
        del rates["unet"]
    return blocks | set(rates.values()) | {rate * second_factor_ratio(cfg, part) for part, rate in rates.items()}


def second_factor_ratio(cfg: TrainConfig, part: str) -> float:
    """Return the rate of the second factors of a part's adapter over that of the first (LoRA+); 1 without an adapter."""
    section = cfg.adapter
    if section.type is None:
        return 1.0
    text = part.startswith("text_encoder")
    own = section.loraplus_text_encoder_lr_ratio if text else section.loraplus_unet_lr_ratio
    return own or section.loraplus_lr_ratio or 1.0


def argument(words: Iterable[str], name: str, default: Any) -> Any:
    """Return the value of one of several key=value words; what is no literal is some other rule's matter."""
    for word in words:
        key, _, text = word.partition("=")
        if key.strip() == name:
            try:
                return ast.literal_eval(text.strip())
            except (ValueError, SyntaxError):
                return default
    return default


def is_named(section: OptimizerSection, among: Iterable[str]) -> bool:
    """Say whether the optimizer is one of these, in whatever case it is spelt."""
    return bool(names.proper(section.type, among))


def is_relative(section: OptimizerSection) -> bool:
    """Say whether this is an Adafactor that computes its own rate: kohya's default, and forced by warmup_init."""
    if not is_named(section, ("Adafactor",)):
        return False
    return bool(argument(section.args, "relative_step", True) or argument(section.args, "warmup_init", False))


def is_schedule_free(section: OptimizerSection) -> bool:
    """Say whether the optimizer wants no schedule; by its name, as kohya, so that classes of one's own may say it."""
    return section.type.lower().endswith("schedulefree")


def schedule_name(section: OptimizerSection) -> str:
    """Return the named schedule that counts; a class of the user's own has none, and takes --lr_scheduler_args only."""
    if is_schedule_free(section):
        return "constant"
    if section.scheduler_type:
        return ""
    return ADAFACTOR if is_relative(section) else section.scheduler.partition(":")[0]
