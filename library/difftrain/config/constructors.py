"""Which arguments of optimizers and schedules a user may give: those of their classes, but for what is set here.

optim/ makes them; a test holds both together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from difftrain.config import names
from difftrain.config.rates import ADAFACTOR, argument, is_schedule_free, schedule_name
from difftrain.config.sections import OptimizerSection
from difftrain.config.signatures import signature
from difftrain.config.validate import show

NPU_FUSED_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
_OURS = ("params", "lr")
_TORCH = "torch.optim"
_EXPERIMENTAL = {"DAdaptation": "DAdaptAdamPreprint", "DAdaptAdamPreprint": "", "DAdaptAdanIP": ""}
# optimizer -> its class, and what is not the user's beside params and lr
_CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (f"{_TORCH}.{name}", ()) for name in names.TORCH_OPTIMIZERS},
    **{name: (f"bitsandbytes.optim.{name}", ()) for name in names.EIGHT_BIT},
    **{name: (f"dadaptation.{name}", ()) for name in names.D_ADAPTATION},
    **{name: (f"dadaptation.experimental.{other or name}", ()) for name, other in _EXPERIMENTAL.items()},
    **{name: (f"schedulefree.{name}", ()) for name in names.SCHEDULE_FREE},
    "AdamW": (f"{_TORCH}.AdamW", ()),
    "oss": (f"{_TORCH}.AdamW", ()),
    "SGDNesterov": (f"{_TORCH}.SGD", ("nesterov",)),
    "SGDNesterov8bit": ("bitsandbytes.optim.SGD8bit", ("nesterov",)),
    "Lion": ("lion_pytorch.Lion", ()),
    "Prodigy": ("prodigyopt.Prodigy", ()),
    "Adafactor": ("transformers.optimization.Adafactor", ()),
    "Muon": ("difftrain.optim.muon.Muon", ("fused",)),
}
Taken = Mapping[str, Any] | None  # names with their defaults; None: that cannot be told from here
Wrong = tuple[str, str]  # what is wrong, and what would be right


def optimizer_takes(name: str) -> Taken:
    """Return the arguments that an optimizer may be given."""
    if names.proper(name, names.ASCEND):
        return NPU_FUSED_ADAMW
    known = names.proper(name, _CLASSES)
    if not known:  # of whose defaults nothing is known but that they are there
        taken = _takes(name, _OURS)
        return taken and dict.fromkeys(taken)
    path, own = _CLASSES[known]
    return _takes(path, (*_OURS, *own))


def schedule_takes(section: OptimizerSection) -> Taken:
    """Return the arguments that the schedule which counts may be given beside its own fields."""
    if section.scheduler_type and not is_schedule_free(section):
        path = section.scheduler_type
        return _takes(path if "." in path else f"{_TORCH}.lr_scheduler.{path}", ("optimizer", "last_epoch"))
    name = schedule_name(section)
    found = signature(f"difftrain.optim.schedules.{name}") if name in names.SCHEDULERS and name != ADAFACTOR else None
    return found and found.by_name


def wrong_argument(what: str, name: str, value: Any, taken: Taken, others: Iterable[str] = ()) -> Wrong | None:
    """Say what is wrong with an argument of something, or nothing. others: keys that may have been meant."""
    if taken is None:
        return None
    if name not in taken:
        known = ", ".join(sorted(taken)) or "none"
        return f"{what} takes no {name}", names.did_you_mean(name, (*taken, *others)) or f"its arguments are {known}"
    usual = taken[name]
    if _are_numbers(usual) and not (_are_numbers(value) and len(value) == len(usual)):
        return f"{what}'s {name} must be {len(usual)} numbers, got {show(value)}", f"as in {list(usual)}"
    if isinstance(usual, bool) and value not in (True, False, None):
        return f"{what}'s {name} must be true or false, got {show(value)}", ""
    if _is_number(usual) and not (value is None or isinstance(value, bool) or _is_number(value)):
        return f"{what}'s {name} must be a number, got {show(value)}", f"as in {show(usual)}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_number, value))


def wrong_arguments(section: OptimizerSection) -> Iterator[tuple[str, str, str]]:
    """Find arguments that nothing takes: (field, what is wrong, what would be right)."""
    told = [("args", section.type, section.args, optimizer_takes(section.type))]
    if not is_schedule_free(section):
        schedule = section.scheduler_type or section.scheduler
        told.append(("scheduler_args", schedule, section.scheduler_args, schedule_takes(section)))
        if section.schedulefree_wrapper:
            taken = _takes("difftrain.optim.schedule_free.ScheduleFree", ("base",))
            told.append(("schedulefree_wrapper_args", "the wrapper", section.schedulefree_wrapper_args, taken))
    for field, what, words, taken in told:
        for name in dict.fromkeys(word.partition("=")[0].strip() for word in words):
            value = argument(words, name, _UNREAD)
            if value is not _UNREAD and (wrong := wrong_argument(what, name, value, taken)):
                yield f"optimizer.{field}", *wrong


_UNREAD = object()  # what is no literal is another rule's matter


def _takes(path: str, own: Collection[str]) -> Taken:
    found = signature(path)
    if found is None or found.anything:
        return None
    return {name: usual for name, usual in {**found.positional, **found.by_name}.items() if name not in own}
