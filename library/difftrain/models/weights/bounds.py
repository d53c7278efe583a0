"""What sizes of a model may be: types, whole numbers that end, finite constants, and no more than its files can hold.

Sizes come from config.json or a header of strangers. They are judged before anything is built of them: a layer too many
costs minutes, a table of positions too long all memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from difftrain.contracts import Fault

MOST_LAYERS = 1024  # of any one count; the deepest models that are trained here have a hundred
MOST = 1 << 24  # of any other whole number: tokens, channels, positions
MOST_POSITIONS = 2048  # along a side of a table of fixed positions, which has its square
_LARGE = 1e6  # of constants, and one over them
_LAYERS = re.compile(r"(^|_)(num_)?(hidden_|single_|refiner_|double_)?layers(_per_block)?$|^depth$|_depth$")
_SIZED = re.compile(r"(size|dim|channels|layers|heads|length|factor)s?$")  # numbers also where a class has no default
_TABLES = re.compile(r"(config|scaling|parameters|kwargs|label)$")  # what may be an object
_IDS = re.compile(r"_ids?$")  # a token may be -1: none
# constants that are divided by, or that latents are multiplied with: none of them may be 0 or less
_POSITIVE = ("scaling_factor", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rms_norm_eps", "rope_theta")
_DEVIATIONS = ("latents_std",)


def size_faults(
    section: Mapping[str, Any], defaults: Mapping[str, Any], where: str, counts: Collection[str] = ()
) -> list[Fault]:
    """Name what of a part's sizes is of another type than its class takes, has no end, or is no finite number.

    defaults: the class's arguments with what it takes where nothing is said. where: of the section. counts: sizes that
    count positions where those of other classes say a side.
    """
    faults = []
    for key, value in section.items():
        known = "positions" if key in counts else key
        if why := _unfit(known, value, defaults.get(key)):
            faults.append(Fault(f"{where} {key}", f"is {_short(value)}, must be {why}"))
    return faults


def count_fault(part: str, count: int, num_bytes: int, where: str) -> list[Fault]:
    """Refuse sizes that have more numbers than the part's files have bytes."""
    if count <= num_bytes:
        return []
    what = f"{part} would have {count:,} weights, its files have {num_bytes:,} bytes"
    return [Fault(where, what, "weights and config.json must belong together")]


def _unfit(key: str, value: Any, default: Any) -> str:
    """Say what a value must be, "" where it may be right. The nesting that classes take (lists a level) is theirs to judge."""
    if default is None and isinstance(value, str | dict | bool) and _SIZED.search(key):
        return "a whole number"
    if isinstance(value, str):
        return "" if default is None or isinstance(default, str) or _holds(default, str) else _kind(key, default)
    if isinstance(value, dict):
        if isinstance(default, dict) or (default is None and _TABLES.search(key)):
            return ""
        return "no object" if default is None else _kind(key, default)
    if isinstance(value, bool):
        return _kind(key, default) if isinstance(default, str | list | tuple) or _is_number(default) else ""
    if isinstance(value, list | tuple):
        if isinstance(default, str | bool | float):
            return _kind(key, default)
        return next(filter(None, (_unfit_item(key, item) for item in value)), "")
    if _is_number(value):
        if isinstance(default, str) or _holds(default, str):
            return _kind(key, default)
        if isinstance(default, bool) and value not in (0, 1):
            return _kind(key, default)
        if isinstance(default, int) and not isinstance(default, bool) and not float(value).is_integer():
            return _kind(key, default)
        return _out_of_range(key, value)
    return ""


def _unfit_item(key: str, item: Any, depth: int = 0) -> str:
    if isinstance(item, list | tuple) and depth < 4:
        return next(filter(None, (_unfit_item(key, entry, depth + 1) for entry in item)), "")
    if isinstance(item, dict | list | tuple):
        return "a flat list"
    return _out_of_range(key, item) if _is_number(item) else ""


def _out_of_range(key: str, value: float) -> str:
    if isinstance(value, int):
        if _LAYERS.search(key):
            return "" if 0 <= value <= MOST_LAYERS else f"a whole number up to {MOST_LAYERS:,}"
        if key == "pos_embed_max_size":
            return "" if 0 <= value <= MOST_POSITIONS else f"a whole number up to {MOST_POSITIONS:,}"
        low = -MOST if _IDS.search(key) else -1
        if not low <= value <= MOST:
            return f"a whole number up to {MOST:,}"
    elif not math.isfinite(value):
        return "a finite number"
    if key in (*_POSITIVE, *_DEVIATIONS) and not 1 / _LARGE**2 <= value <= _LARGE * 1000:
        return "a number above 0"
    if key == "shift_factor" and abs(value) > _LARGE:
        return f"a number up to {_LARGE:g}"
    return ""


def _holds(default: Any, kind: type) -> bool:
    return isinstance(default, list | tuple) and bool(default) and all(isinstance(item, kind) for item in default)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(key: str, default: Any) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, int):
        return "a whole number"
    if isinstance(default, float):
        return "a number"
    if isinstance(default, str):
        return "a text"
    return "a list of texts" if _holds(default, str) else "a list of numbers"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
