"""One sample prompt: what can be asked for, and kohya's line of it (`a red cat --w 512 --d 42 --n blurry`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from difflib import get_close_matches
from typing import Any

from difftrain.sampling.samplers import sampler_fault

MAX_STEPS = 1000
MAX_SIDE = 16384
UNIT = 8  # sides are rounded down to its multiples, as kohya does


@dataclass(frozen=True)
class Prompt:
    """What to draw. None: the model's native size (at most 512), the run's sampler, seed or embedded guidance, or the
    training's shift.
    """

    prompt: str = ""
    negative_prompt: str = ""
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    sample_steps: int = 30
    scale: float = 7.5
    sample_sampler: str | None = None
    flow_shift: float | None = None
    guidance_scale: float | None = None


@dataclass
class PromptEntry:
    """One prompt as somebody wrote it: its fields by kohya's names, what is wrong, and what is worth saying."""

    fields: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def settle(self, *, flow: bool, guided: bool = False) -> None:
        """Set the fields aside that mean something to other models only.

        flow: whether the model learns a flow. guided: whether it is told a guidance.
        """
        meant = {SHIFT: flow, GUIDANCE: guided}
        self.idle = [name for name in self.fields if name in IDLE and not meant.get(name)]
        if flow and SHIFT in self.fields:
            try:
                self.fields[SHIFT] = _shift(self.fields[SHIFT])
            except ValueError as error:
                self.faults.append(f"--fs ({SHIFT}): {error}")
        if guided and GUIDANCE in self.fields:
            try:
                self.fields[GUIDANCE] = _number(self.fields[GUIDANCE])
            except ValueError as error:
                self.faults.append(f"--g ({GUIDANCE}): {error}")

    def prompt(self) -> Prompt:
        """Return what is to be drawn; the entry must be settled and have no fault."""
        known = {one.name for one in fields_of(Prompt)} - set(self.idle)
        return Prompt(**{name: value for name, value in self.fields.items() if name in known})


SHIFT, GUIDANCE = "flow_shift", "guidance_scale"
# kohya's field -> (option of a line, why it does nothing); its SDXL script reads them and draws without them too
IDLE: dict[str, tuple[str, str]] = {
    GUIDANCE: ("--g", "is embedded guidance, which is not there; --l (scale) is classifier-free guidance"),
    "controlnet_image": ("--cn", "is a picture for a ControlNet, and there is none beside a full training"),
    "cfg_trunc_ratio": ("--ctr", "is a guidance cut-off of Lumina"),
    "renorm_cfg": ("--rcfg", "is Lumina's guidance renormalisation"),
    SHIFT: ("--fs", "is a shift of flow-matching models"),
}


def _whole(low: int, high: int) -> Callable[[Any], Any]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"must be a whole number, got {value!r}")
        if not low <= value <= high:
            raise ValueError(f"must lie in {low} to {high}, got {value}")
        return value

    return check


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"must be a finite number from 0 up, got {value}")
    return float(value)


def _shift(value: Any) -> float:
    try:
        shift = float(value)  # of a line it is still a text
    except (TypeError, ValueError):
        shift = math.nan
    if not 0 < shift < math.inf:
        raise ValueError(f"must be a finite number above 0, got {value!r}")
    return shift


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text, got {value!r}")
    return value


def _sampler(value: Any) -> str:
    fault = sampler_fault(_text(value))
    if fault:
        raise ValueError(fault)
    return str(value)


def _any(value: Any) -> Any:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        return value
    raise ValueError(f"must be a number or a text, got {value!r}")


# field -> its value, or a ValueError that says what it must be
FIELDS: dict[str, Callable[[Any], Any]] = {
    "prompt": _text,
    "negative_prompt": _text,
    "width": _whole(1, MAX_SIDE),
    "height": _whole(1, MAX_SIDE),
    "seed": _whole(0, 2**64 - 1),
    "sample_steps": _whole(1, MAX_STEPS),
    "scale": _number,
    "sample_sampler": _sampler,
    **dict.fromkeys(IDLE, _any),
}

_INT, _FLOAT, _REST = r"\d+", r"[\d.]+", r".+"
# option -> pattern of its value, field, conversion; kohya ignores the case of the option
OPTIONS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "w": (_INT, "width", int),
    "h": (_INT, "height", int),
    "d": (_INT, "seed", int),
    "s": (_INT, "sample_steps", lambda text: max(1, min(MAX_STEPS, int(text)))),
    "l": (_FLOAT, "scale", float),
    "g": (_FLOAT, "guidance_scale", float),
    "n": (r".*", "negative_prompt", str),
    "ss": (_REST, "sample_sampler", str.strip),
    "cn": (_REST, "controlnet_image", str),
    "ctr": (_REST, "cfg_trunc_ratio", float),
    "rcfg": (_REST, "renorm_cfg", float),
    "fs": (_REST, SHIFT, str),
}


def parse_line(line: str) -> PromptEntry:
    """Split a line into the fields that it gives; text behind " --" that begins with no option is dropped, and said."""
    text, *pieces = line.split(" --")
    entry = PromptEntry({"prompt": text})
    for piece in pieces:
        name, _, value = piece.partition(" ")
        if name.lower() in OPTIONS:
            _take(entry, name.lower(), value)
        else:
            entry.notes.append(f"{f'--{piece}'!r} is no option and no part of the prompt; it is left out")
    return entry


def _take(entry: PromptEntry, name: str, value: str) -> None:
    pattern, target, convert = OPTIONS[name]
    found = re.match(pattern, value)
    try:
        if not found:
            raise ValueError
        converted = convert(found[0])
    except ValueError:
        entry.faults.append(f"--{name} does not take {value!r}")
        return
    behind = value[found.end() :]
    if behind.strip():  # kohya reads the number in "512px" too
        entry.notes.append(f"--{name} takes {found[0]!r}; {behind!r} behind it is left out")
    _settle(entry, target, converted, f"--{name}")


def parse_table(table: Mapping[str, Any]) -> PromptEntry:
    """Take the fields of a TOML table or a JSON object."""
    entry = PromptEntry()
    for name, value in table.items():
        if name in FIELDS:
            _settle(entry, name, value, name)
        else:
            near = get_close_matches(name, FIELDS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(FIELDS)}"
            entry.faults.append(f"there is no key {name!r} ({remedy})")
    return entry


def _settle(entry: PromptEntry, name: str, value: Any, called: str) -> None:
    try:
        entry.fields[name] = FIELDS[name](value)
    except ValueError as error:
        entry.faults.append(f"{called}: {error}")


def rounded(prompt: Prompt) -> str:
    """Say how a size that is no multiple of 8 is drawn; an empty string where it is one."""
    sides = [side for side in (prompt.width, prompt.height) if side]
    if all(side % UNIT == 0 for side in sides):
        return ""
    drawn = " x ".join(str(max(UNIT, side - side % UNIT)) for side in sides)
    return f"{' x '.join(map(str, sides))} px is drawn as {drawn}: sides are multiples of {UNIT}"
