"""Rules about names: optimizers, schedules, samplers, compile backends, and the key=value words that go with them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from difftrain.config import names
from difftrain.config.families import learns_flow
from difftrain.config.finding import Finding, Rule, value_of
from difftrain.config.sections import TrainConfig

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def optimizer(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Names are case-insensitive, as in kohya's scripts; a dotted path is any class that is installed."""
    known = (*names.OPTIMIZERS, *names.TORCH_OPTIMIZERS)
    yield from _name("optimizer.type", cfg.optimizer.type, known, dotted=True)
    yield from _pairs("optimizer.args", cfg.optimizer.args)
    yield from _pairs("optimizer.schedulefree_wrapper_args", cfg.optimizer.schedulefree_wrapper_args)


def schedule(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """A schedule by name, or a class by its dotted path; kohya writes adafactor:RATE."""
    given, colon, rate = cfg.optimizer.scheduler.partition(":")
    yield from _name("optimizer.scheduler", given, names.SCHEDULERS)
    if colon and (given.lower() != "adafactor" or not re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", rate)):
        what = f"no such name: {cfg.optimizer.scheduler!r}"
        yield Finding(("optimizer.scheduler",), what, "only adafactor takes a rate, as in adafactor:1e-3")
    yield from _pairs("optimizer.scheduler_args", cfg.optimizer.scheduler_args)
    kind = cfg.optimizer.scheduler_type
    if kind and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", kind):
        yield Finding(("optimizer.scheduler_type",), f"is no class name: {kind!r}", "package.module.Class")


def sampler(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """The samplers of kohya's prompt files; a flow has its own."""
    given, family = cfg.sample.sampler, cfg.model.family
    flow = learns_flow(cfg)
    known, others = (names.FLOW_SAMPLERS, names.SAMPLERS) if flow else (names.SAMPLERS, names.FLOW_SAMPLERS)
    if given in others:
        if "sample.sampler" in asked:
            what = f"{given!r} is no sampler of {family}, which learns {'a flow' if flow else 'no flow'}"
            yield Finding(("sample.sampler",), what, f"known are {', '.join(known)}")
    else:
        yield from _name("sample.sampler", given, known)


def backend(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Backends that this torch has; some that kohya lists are gone from it."""
    name = cfg.training.compile_backend.lower()
    if name in names.COMPILE_BACKENDS_GONE:
        yield Finding(("training.compile_backend",), f"{name!r} is no longer part of torch", "inductor is its default")
    else:
        yield from _name("training.compile_backend", name, names.COMPILE_BACKENDS)


def one_of(field: str, known: tuple[str, ...]) -> Rule:
    """Make a rule of names that only a room above this one knows; the door hands it in."""
    return lambda cfg, asked: _name(field, value_of(cfg, field), known)


def _name(field: str, given: str, known: tuple[str, ...], *, dotted: bool = False) -> Iterator[Finding]:
    if given.lower() in {name.lower() for name in known} or (dotted and _DOTTED.fullmatch(given)):
        return
    or_any = ", or package.module.Class of an installed one" if dotted else ""
    remedy = names.did_you_mean(given, known) or f"known are {', '.join(known)}{or_any}"
    yield Finding((field,), f"no such name: {given!r}", remedy)


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
            yield Finding((field,), f"the value of {key} is no literal: {value!r}", remedy)


def patterns(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What is to be trained is named by regular expressions."""
    for pattern in cfg.model.train_only:
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"{pattern!r} is no regular expression: {error}"
            yield Finding(
                ("model.train_only",), what, r"Python's, as in '\.attn\.'; a dot or bracket itself is \. or \("
            )


RULES: tuple[Rule, ...] = (optimizer, schedule, sampler, backend, patterns)
