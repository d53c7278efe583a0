"""The learning-rate schedule that a configuration names, attached to an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from difftrain.config.schema.rates import ADAFACTOR, is_relative, is_schedule_free, schedule_name
from difftrain.config.schema.section import WHOLE_SHARE
from difftrain.config.schema.sections import OptimizerSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.optim import arguments
from difftrain.optim.builders import AdafactorSchedule

_ARGS, _NAME, _TYPE = "optimizer.scheduler_args", "optimizer.scheduler", "optimizer.scheduler_type"
_OURS = ("optimizer", "last_epoch")  # set by us; a user's last_epoch would break resume


def make_schedule(section: OptimizerSection, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Make the schedule; every parameter group's own rate follows it. Step it once per optimizer update.

    Raises ConfigFault for a name or an argument that is not known.
    """
    if is_relative(section):
        rate = section.scheduler.partition(":")[2]
        return AdafactorSchedule(optimizer, float(rate) if rate else section.learning_rate)
    if section.scheduler_type and not is_schedule_free(section):
        return _dotted(section, optimizer)
    return LambdaLR(optimizer, factor_of(section, total_steps))


def factor_of(section: OptimizerSection, total_steps: int) -> Factor:
    """Return the named schedule as a function of the update, without an optimizer: plots and dry runs use it."""
    name = schedule_name(section)
    if name == ADAFACTOR:
        what = f"works only with {option('optimizer.type')}=Adafactor and its relative_step"
        raise ConfigFault([Fault(option(_NAME, ADAFACTOR), what, "another schedule")])
    if name not in SCHEDULES:
        raise ConfigFault([Fault(option(_NAME), f"got {section.scheduler!r}", f"one of {', '.join(SCHEDULES)}")])
    settings = {} if is_schedule_free(section) else arguments.parse(option(_ARGS), section.scheduler_args)
    function, flag_names = SCHEDULES[name]
    arguments.check(option(_ARGS), name, function, settings, flag_names)
    w = updates(section.warmup_steps, total_steps)
    flags = {
        "w": w,
        "d": updates(section.decay_steps, total_steps),
        "n": total_steps,
        "lr": section.learning_rate,
        "cycles": section.num_cycles,
        "power": section.power,
        "timescale": section.timescale or w or 10_000,
        "floor": section.min_lr_ratio,
    }
    if name == "warmup_stable_decay":
        flags["floor"] = section.min_lr_ratio or 0.0
    return bind(name, flags, settings)


def _dotted(section: OptimizerSection, optimizer: Optimizer) -> LRScheduler:
    path = section.scheduler_type
    settings = arguments.parse(option(_ARGS), section.scheduler_args)
    kind = arguments.load(option(_TYPE), path if "." in path else f"torch.optim.lr_scheduler.{path}", LRScheduler)
    if issubclass(kind, ReduceLROnPlateau):
        raise ConfigFault([Fault(option(_TYPE), f"{path} needs a metric, which no step provides", "another schedule")])
    arguments.check(option(_ARGS), path, kind, settings, _OURS)
    try:
        return kind(optimizer, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigFault([Fault(option(_ARGS), f"{path} refuses them: {error}")]) from error


# --- Learning-rate schedules: factors of the base rates by optimizer update, with kohya's meaning of its flags
# Written out here and not taken from transformers or diffusers, whose versions differ: a resumed run must repeat its
# schedule. s = update, 0 first; w = warm-up; d = decay; n = all updates, all counted in optimizer updates.


Factor = Callable[[int], float]

_RISE: dict[str, Callable[[float], float]] = {
    "linear": lambda p: p,
    "cosine": lambda p: 1.0 - half_wave(p),
    "1-sqrt": lambda p: 1.0 - math.sqrt(1.0 - p),
}


def half_wave(p: float) -> float:
    """Half a cosine, from 1 at p = 0 to 0 at p = 1."""
    return 0.5 * (1.0 + math.cos(math.pi * p))


def _warmed(w: int, after: Factor, warmup_type: str = "linear") -> Factor:
    """Rise from 0 to 1 over w updates, in a line or as DeepSpeed's ln(s + 1) / ln(w), then do as `after` says."""
    if warmup_type not in ("linear", "log"):
        raise ConfigFault([Fault(option(_ARGS), f"warmup_type={warmup_type!r}", "linear or log")])
    if warmup_type == "log":
        return lambda s: math.log(s + 1) / math.log(max(2, w)) if s < w else after(s)
    return lambda s: s / w if s < w else after(s)


def _progress(s: int, w: int, n: int) -> float:
    return (s - w) / max(1, n - w)


def constant() -> Factor:
    """Keep the rate."""
    return lambda s: 1.0


def constant_with_warmup(w: int, *, warmup_type: str = "linear") -> Factor:
    """Rise, then keep the rate."""
    return _warmed(w, lambda s: 1.0, warmup_type)


def linear(w: int, n: int, *, warmup_type: str = "linear") -> Factor:
    """Rise, then fall to 0 in a line."""
    return _warmed(w, lambda s: max(0.0, 1.0 - _progress(s, w, n)), warmup_type)


def cosine(w: int, n: int, *, num_cycles: float = 0.5) -> Factor:
    """Rise, then fall along half a cosine; num_cycles counts whole ones."""
    return _warmed(w, lambda s: half_wave(2.0 * num_cycles * _progress(s, w, n)))


def cosine_with_restarts(w: int, n: int, cycles: int) -> Factor:
    """Rise, then fall along `cycles` half cosines, each from 1 again."""

    def after(s: int) -> float:
        p = _progress(s, w, n)
        return 0.0 if p >= 1.0 else half_wave(cycles * p % 1.0)

    return _warmed(w, after)


def cosine_with_min_lr(
    w: int,
    n: int,
    lr: float,
    floor: float | None,
    cycles: int,
    *,
    min_lr: float | None = None,
    warmup_type: str = "linear",
) -> Factor:
    """Rise, then fall along a cosine to `floor`, a share of the rate, or to the rate min_lr."""
    if floor is None and min_lr is None:
        need = f"needs {option('optimizer.min_lr_ratio')}, or min_lr in {option('optimizer.scheduler_args')}"
        raise ConfigFault([Fault(f"{option('optimizer.scheduler')} cosine_with_min_lr", need, "for example 0.1")])
    low = min_lr / lr if min_lr is not None else float(floor or 0.0)
    return _warmed(w, lambda s: half_wave(cycles * _progress(s, w, n)) * (1.0 - low) + low, warmup_type)


def polynomial(w: int, n: int, lr: float, power: float, *, lr_end: float = 1e-7) -> Factor:
    """Rise, then fall with the given power to the rate lr_end."""
    if not 0.0 <= lr_end < lr:
        what = f"ends at lr_end={lr_end:g}, which is not below {option('optimizer.learning_rate')}={lr:g}"
        raise ConfigFault(
            [
                Fault(
                    f"{option('optimizer.scheduler')} polynomial",
                    what,
                    f"lr_end=... in {option('optimizer.scheduler_args')}",
                )
            ]
        )
    end = lr_end / lr
    return _warmed(w, lambda s: (1.0 - end) * max(0.0, 1.0 - _progress(s, w, n)) ** power + end)


def inverse_sqrt(w: int, timescale: int) -> Factor:
    """Rise, then fall as 1 / sqrt(1 + (s - w) / timescale)."""
    return _warmed(w, lambda s: 1.0 / math.sqrt(1.0 + (s - w) / timescale))


def warmup_stable_decay(
    w: int, d: int, n: int, floor: float, cycles: int, *, warmup_type: str = "linear", decay_type: str = "cosine"
) -> Factor:
    """Rise from `floor` over w, hold, fall to `floor` over the last d of n."""
    for name, kind in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if kind not in _RISE:
            raise ConfigFault([Fault(option(_ARGS), f"{name}={kind!r}", f"one of {', '.join(_RISE)}")])
    fall: dict[str, Callable[[float], float]] = {
        "linear": lambda p: 1.0 - p,
        "cosine": lambda p: half_wave(cycles * p),
        "1-sqrt": lambda p: 1.0 - math.sqrt(p),
    }

    def factor(s: int) -> float:
        if s < w:
            share = _RISE[warmup_type](s / w)
        elif s < n - d:
            share = 1.0
        else:
            share = fall[decay_type]((s - (n - d)) / d) if s < n else 0.0
        return share * (1.0 - floor) + floor

    return factor


def piecewise_constant(*, step_rules: str = "") -> Factor:
    """Multiply by what the rules say: "1:10,0.1:20,0.01" is 1 before update 10, 0.1 before 20, then 0.01."""
    *steps, last = str(step_rules).split(",")
    try:
        pairs = sorted((int(until), float(value)) for value, until in (rule.split(":") for rule in steps))
        remaining = float(last)
    except ValueError as error:
        remedy = "step_rules='1:10,0.1:20,0.01', that is factor:until, factor:until, factor"
        raise ConfigFault([Fault(option(_ARGS), f"step_rules={step_rules!r} cannot be read", remedy)]) from error
    return lambda s: next((value for until, value in pairs if s < until), remaining)


def updates(value: float, total: int) -> int:
    """Turn a number of updates, or below 1 a share of all, into a number of updates."""
    return total if value == WHOLE_SHARE else int(value * total) if 0 < value < 1 else int(value)


# name -> (function, the arguments that flags give it)
SCHEDULES: dict[str, tuple[Callable[..., Factor], tuple[str, ...]]] = {
    "constant": (constant, ()),
    "constant_with_warmup": (constant_with_warmup, ("w",)),
    "linear": (linear, ("w", "n")),
    "cosine": (cosine, ("w", "n")),
    "cosine_with_restarts": (cosine_with_restarts, ("w", "n", "cycles")),
    "polynomial": (polynomial, ("w", "n", "lr", "power")),
    "inverse_sqrt": (inverse_sqrt, ("w", "timescale")),
    "cosine_with_min_lr": (cosine_with_min_lr, ("w", "n", "lr", "floor", "cycles")),
    "warmup_stable_decay": (warmup_stable_decay, ("w", "d", "n", "floor", "cycles")),
    "piecewise_constant": (piecewise_constant, ()),
}


def bind(name: str, flags: dict[str, Any], settings: dict[str, Any]) -> Factor:
    """Make the named schedule of the flags' values and of what the user gives in --lr_scheduler_args."""
    function, flag_names = SCHEDULES[name]
    return function(**{flag: flags[flag] for flag in flag_names}, **settings)
