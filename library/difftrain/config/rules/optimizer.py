"""Rules about optimizers and schedules: names that are known, packages, rates and arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from difftrain.config.constructors import wrong_arguments
from difftrain.config.hidden_imports import is_installed
from difftrain.config.rules.finding import Finding, Rule, value_of
from difftrain.config.schema import names
from difftrain.config.schema.families import learns_flow
from difftrain.config.schema.rates import (
    ADAFACTOR,
    UNET_BLOCKS,
    argument,
    group_rates,
    is_named,
    is_relative,
    is_schedule_free,
    part_rates,
    schedule_name,
)
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.spelling import option

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def optimizer(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Names are case-insensitive, as in kohya's scripts; a dotted path is any class that is installed."""
    known = (*names.OPTIMIZERS, *names.TORCH_OPTIMIZERS)
    yield from _name("optimizer.type", cfg.optimizer.type, known, dotted=True)
    yield from _pairs("optimizer.args", cfg.optimizer.args)
    yield from _pairs("optimizer.schedulefree_wrapper_args", cfg.optimizer.schedulefree_wrapper_args)


def schedule(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """A schedule by name, or a class by its dotted path; kohya writes adafactor:RATE."""
    scheduler, colon, rate = cfg.optimizer.scheduler.partition(":")
    yield from _name("optimizer.scheduler", scheduler, names.SCHEDULERS)
    if colon and (scheduler.lower() != "adafactor" or not re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", rate)):
        what = f"no such name: {cfg.optimizer.scheduler!r}"
        yield Finding(("optimizer.scheduler",), what, "only adafactor takes a rate, as in adafactor:1e-3")
    yield from _pairs("optimizer.scheduler_args", cfg.optimizer.scheduler_args)
    kind = cfg.optimizer.scheduler_type
    if kind and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", kind):
        yield Finding(("optimizer.scheduler_type",), f"is not a class name: {kind!r}", "package.module.Class")


def sampler(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """The samplers of kohya's prompt files; a flow has its own."""
    sampler_name, family = cfg.sample.sampler, cfg.model.family
    flow = learns_flow(cfg)
    known, others = (names.FLOW_SAMPLERS, names.SAMPLERS) if flow else (names.SAMPLERS, names.FLOW_SAMPLERS)
    if sampler_name in others:
        if "sample.sampler" in requested:
            what = f"{sampler_name!r} is not a sampler of {family}, which learns {'a flow' if flow else 'no flow'}"
            yield Finding(("sample.sampler",), what, f"known are {', '.join(known)}")
    else:
        yield from _name("sample.sampler", sampler_name, known)


def backend(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Backends that this torch has; some that kohya lists are gone from it."""
    name = cfg.training.compile_backend.lower()
    if name in names.COMPILE_BACKENDS_GONE:
        yield Finding(("training.compile_backend",), f"{name!r} is no longer part of torch", "inductor is its default")
    else:
        yield from _name("training.compile_backend", name, names.COMPILE_BACKENDS)


def one_of(field: str, known: tuple[str, ...]) -> Rule:
    """Make a rule of names that only a room above this one knows; the door hands it in."""
    return lambda cfg, requested: _name(field, value_of(cfg, field), known)


def _name(field: str, value: str, known: tuple[str, ...], *, dotted: bool = False) -> Iterator[Finding]:
    if value.lower() in {name.lower() for name in known} or (dotted and _DOTTED.fullmatch(value)):
        return
    or_any = ", or package.module.Class of an installed one" if dotted else ""
    remedy = names.did_you_mean(value, known) or f"known are {', '.join(known)}{or_any}"
    yield Finding((field,), f"no such name: {value!r}", remedy)


def _pairs(field: str, words: tuple[str, ...]) -> Iterator[Finding]:
    seen: set[str] = set()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            yield Finding((field,), f"must be key=value, got {word!r}", "weight_decay=0.01 betas=0.9,0.99")
            continue
        if key in seen:
            yield Finding((field,), f"{key} is given twice", "give it once")
        seen.add(key)
        try:
            ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            remedy = "a number, True, False, None, a list, or text in quotes: key=\"'text'\""
            yield Finding((field,), f"the value of {key} is not a literal: {value!r}", remedy)


def patterns(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What is to be trained is named by regular expressions."""
    for pattern in cfg.model.train_only:
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"{pattern!r} is not a regular expression: {error}"
            yield Finding(
                ("model.train_only",), what, r"Python's, as in '\.attn\.'; a dot or bracket itself is \. or \("
            )


def base(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Few bits are for weights that are only held."""
    if cfg.model.base_dtype and not cfg.model.train_only and cfg.adapter.type is None:
        what = f"is {cfg.model.base_dtype}, and nothing is only held: all weights are trained, in fp32"
        yield Finding(("model.base_dtype",), what, "leave it out, or train an adapter or what train_only names")


NAME_RULES: tuple[Rule, ...] = (optimizer, schedule, sampler, backend, patterns, base)


_TYPE, _ARGS, _RATE = "optimizer.type", "optimizer.args", "optimizer.learning_rate"
_SCHEDULE, _CLASS, _WARMUP = "optimizer.scheduler", "optimizer.scheduler_type", "optimizer.warmup_steps"
_BLOCKS, _UNET, _ENCODERS = "optimizer.block_lr", "optimizer.unet_lr", "optimizer.text_encoder_lr"
_SCHEDULE_ARGS, _WRAPPER = "optimizer.scheduler_args", "optimizer.schedulefree_wrapper"


def installed(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Some optimizers come in packages of their own."""
    package = names.PACKAGES.get(names.proper(cfg.optimizer.type, names.PACKAGES))
    if package and not is_installed(package[0]):
        what = f"{cfg.optimizer.type} is in the package {package[1]}, which is not installed"
        yield Finding((_TYPE,), what, f"pip install {package[1]}")
    for field, path in ((_TYPE, cfg.optimizer.type), (_CLASS, cfg.optimizer.scheduler_type or "")):
        first, dot, _ = path.partition(".")
        if dot and first.isidentifier() and not is_installed(first):
            what = f"{path} is in the package {first}, which is not installed"
            yield Finding((field,), what, "install it, or put it on PYTHONPATH")


def arguments(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What is handed to an optimizer or a schedule is something that it takes."""
    for field, what, remedy in wrong_arguments(cfg.optimizer):
        yield Finding((field, _TYPE) if field == _ARGS else (field,), what, remedy)


def ascend(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Ascend's own optimizers: one wants its parameters to stay where they are, another a mixed precision of its own."""
    section, training = cfg.optimizer, cfg.training
    if is_named(section, ("NpuFusedAdamW",)) and training.full_precision and training.master_weights != "fp32":
        what = f"updates weights in place in memory, unlike those of full {training.full_precision} do not"
        yield Finding(
            (_TYPE, "training.full_precision"),
            what,
            f"{option('training.master_weights')}=fp32, or {option('optimizer.type')}=AdamW",
        )
    if section.type.startswith("apex."):
        what = f"{section.type} works only under apex.amp, and precision is handled by this program"
        yield Finding((_TYPE,), what, "AdamW, which is fused here too")


def adaptive(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """D-Adaptation and Prodigy estimate one rate for all groups; --learning_rate is a factor of it, about 1."""
    section = cfg.optimizer
    if not is_named(section, names.ADAPTIVE):
        return
    rates = group_rates(cfg)
    if rates and max(rates) <= 0.1:
        what = f"is too low for {section.type}, which multiplies its own estimate by it: {max(rates):g}"
        yield Finding((_RATE,), what, "about 1.0 is usual", note=True)
    if len(rates) > 1:
        rate_texts = ", ".join(f"{rate:g}" for rate in sorted(rates))
        if is_named(section, names.FIRST_RATE):
            what = f"{section.type} uses only the first group's rate, there are {rate_texts}"
            yield Finding((_TYPE,), what, "give one rate for everything", note=True)
        else:
            what = f"{section.type} takes one rate for all groups, but there are {rate_texts}"
            yield Finding((_TYPE, _RATE), what, "give one rate for everything; 0 freezes a part")


def adafactor(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Adafactor computes its own rate unless relative_step=False; its schedule only shows that rate."""
    section = cfg.optimizer
    shows = section.scheduler.partition(":")[0] == ADAFACTOR
    if is_relative(section):
        yield from _relative_adafactor(cfg, requested, shows)
    elif shows and not section.scheduler_type:
        what = f"works only with {option('optimizer.type')}=Adafactor and its relative_step"
        yield Finding((_SCHEDULE, _TYPE), what, "another schedule")
    elif is_named(section, ("Adafactor",)):
        yield from _manual_adafactor(cfg)


def _relative_adafactor(cfg: TrainConfig, requested: set[str], shows: bool) -> Iterator[Finding]:
    """What a rate and a schedule of the user's mean where Adafactor has its own."""
    section = cfg.optimizer
    own, remedy = (
        "Adafactor computes its own rate",
        f"relative_step=False in {option('optimizer.args')} makes it use yours",
    )
    if argument(section.args, "warmup_init", False) and not argument(section.args, "relative_step", True):
        yield Finding((_ARGS,), "relative_step=True is set, because warmup_init=True needs it", note=True)
    if _RATE in requested:
        yield Finding((_RATE,), f"is only displayed until the first update: {own}", remedy, note=True)
    for field in (_UNET, _ENCODERS, _BLOCKS, "optimizer.learning_rate_te1", "optimizer.learning_rate_te2"):
        if field in requested:
            yield Finding((field,), f"only says what is trained (0: frozen), not how fast: {own}", remedy, note=True)
    if section.scheduler_type:
        yield Finding((_CLASS,), f"sets rates that nothing uses: {own}", remedy)
    elif _SCHEDULE in requested and not shows:
        yield Finding((_SCHEDULE,), f"has no effect: {own}", remedy, note=True)
    if section.scheduler_args:
        yield Finding((_SCHEDULE_ARGS,), f"has no effect: {own}", remedy, note=True)


def _manual_adafactor(cfg: TrainConfig) -> Iterator[Finding]:
    """What kohya recommends where Adafactor is given its rate."""
    section = cfg.optimizer
    if cfg.training.max_grad_norm:
        yield Finding(("training.max_grad_norm",), "clips before Adafactor clips by itself", "consider 0", note=True)
    if schedule_name(section) != "constant_with_warmup":
        yield Finding((_SCHEDULE,), "constant_with_warmup is recommended for Adafactor", note=True)
    if argument(section.args, "clip_threshold", 1.0) != 1.0:
        yield Finding((_ARGS,), "clip_threshold=1.0 is recommended for Adafactor", note=True)


def schedule_free(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Schedule-free optimizers average by themselves."""
    section = cfg.optimizer
    own = is_schedule_free(section)
    if own:
        options = {
            _SCHEDULE: section.scheduler != "constant",
            _CLASS: section.scheduler_type,
            _SCHEDULE_ARGS: section.scheduler_args,
            _WARMUP: section.warmup_steps,
        }
        for field in (field for field, changed in options.items() if changed):
            what = "has no effect: a schedule-free optimizer keeps its rate"
            yield Finding(
                (field,), what, f"AdamW's and SGD's take warmup_steps=N in {option('optimizer.args')}", note=True
            )
    if own and section.schedulefree_wrapper:
        yield Finding((_WRAPPER,), f"has no effect: {section.type} is schedule-free already", note=True)
    elif section.schedulefree_wrapper and is_named(section, ("oss",)):
        yield Finding(
            (_WRAPPER, _TYPE), "cannot average weights whose state is sharded", f"{option('optimizer.type')}=AdamW"
        )
    averages = {"ema.enable": cfg.ema.enable, "ema.profiles": cfg.ema.profiles}
    for field in (field for field, value in averages.items() if value and (own or section.schedulefree_wrapper)):
        what = "contradicts a schedule-free optimizer, which exports its own average"
        yield Finding((field, _TYPE), what, "leave one of them out")


def block_rates(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """A rate for each block of the UNet; only SDXL's own size is known here, a family knows the others."""
    section = cfg.optimizer
    blocks = section.block_lr
    if not blocks:
        return
    if cfg.model.init_from_config in (None, "base") and len(blocks) != UNET_BLOCKS:
        what = f"has {len(blocks)} values, SDXL's UNet has {UNET_BLOCKS} blocks"
        remedy = "0: time and label embeddings; 1-9: input; 10-12: middle; 13-21: output; 22: out"
        yield Finding((_BLOCKS,), what, remedy)
    if section.unet_lr is not None:
        yield Finding(
            (_UNET, _BLOCKS),
            f"contradicts {option('optimizer.block_lr')}",
            "give one rate for the UNet, or one for each block",
        )
    elif section.learning_rate == 0 and any(blocks):
        yield Finding(
            (_BLOCKS, _RATE),
            f"contradicts {option('optimizer.learning_rate')}=0, which freezes the UNet",
            "any rate other than 0",
        )


def encoder_rates(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """One rate for both text encoders, or one for each, in one of two spellings."""
    section = cfg.optimizer
    if len(section.text_encoder_lr) > 2:
        what = f"has {len(section.text_encoder_lr)} values for 2 text encoders"
        yield Finding((_ENCODERS,), what, "one for both, or one for each")
    for key in ("learning_rate_te1", "learning_rate_te2"):
        if section.text_encoder_lr and getattr(section, key) is not None:
            yield Finding((_ENCODERS, f"optimizer.{key}"), f"contradicts --{key}", "give one of them")


def unused_rate(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Where every part has a rate of its own, --learning_rate is nobody's."""
    section = cfg.optimizer
    if _RATE not in requested or (section.unet_lr is None and not section.block_lr) or is_relative(section):
        return
    other = section.model_copy(update={"learning_rate": section.learning_rate + 1.0})
    if group_rates(cfg) == group_rates(cfg.model_copy(update={"optimizer": other})) and part_rates(cfg):
        yield Finding((_RATE,), "has no effect: every part has a rate of its own", note=True)


OPTIMIZER_RULES: tuple[Rule, ...] = (
    installed, arguments, ascend, adaptive, adafactor, schedule_free, block_rates, encoder_rates, unused_rate,
)  # fmt: skip
