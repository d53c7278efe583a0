"""The learning-rate schedule that a configuration names, attached to an optimizer."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from difftrain.config.schema.rates import ADAFACTOR, is_relative, is_schedule_free, schedule_name
from difftrain.config.schema.sections import OptimizerSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.optim import arguments
from difftrain.optim.adafactor import AdafactorSchedule
from difftrain.optim.schedules import SCHEDULES, Factor, bind, updates

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
        what = f"goes with {option('optimizer.type')}=Adafactor and its relative_step alone"
        raise ConfigFault([Fault(option(_NAME, ADAFACTOR), what, "another schedule")])
    if name not in SCHEDULES:
        raise ConfigFault([Fault(option(_NAME), f"got {section.scheduler!r}", f"one of {', '.join(SCHEDULES)}")])
    given = {} if is_schedule_free(section) else arguments.parse(option(_ARGS), section.scheduler_args)
    function, wanted = SCHEDULES[name]
    arguments.check(option(_ARGS), name, function, given, wanted)
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
    return bind(name, flags, given)


def _dotted(section: OptimizerSection, optimizer: Optimizer) -> LRScheduler:
    path = section.scheduler_type
    given = arguments.parse(option(_ARGS), section.scheduler_args)
    kind = arguments.load(option(_TYPE), path if "." in path else f"torch.optim.lr_scheduler.{path}", LRScheduler)
    if issubclass(kind, ReduceLROnPlateau):
        raise ConfigFault(
            [Fault(option(_TYPE), f"{path} waits for a metric, which no step hands it", "another schedule")]
        )
    arguments.check(option(_ARGS), path, kind, given, _OURS)
    try:
        return kind(optimizer, **given)
    except (TypeError, ValueError) as error:
        raise ConfigFault([Fault(option(_ARGS), f"{path} refuses them: {error}")]) from error
