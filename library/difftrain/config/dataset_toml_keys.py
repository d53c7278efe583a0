"""The keys of diffusion-pipe's data set TOML: where each may stand, and what its value must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from difftrain.config.names import did_you_mean
from difftrain.config.validate import show

Level = Literal["both", "directory"]
Check = Callable[[Any], str]  # what a value must be, or "" where it is that

LEAST_REPEATS = 0.0001
MOST_SIDE = 16384  # px
LEAST_RATIO, MOST_RATIO = 0.01, 100.0  # width / height
CLIP_MODES = ("single_beginning", "single_middle")


class Key(NamedTuple):
    """One key. level: both: above all directories, or in one of them."""

    check: Check
    level: Level = "both"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _truth(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) else "text in quotes"


def _some_text(value: Any) -> str:
    return "" if isinstance(value, str) and value else "text in quotes, not empty"


def _count(least: int) -> Check:
    def check(value: Any) -> str:
        right = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return "" if right else f"a whole number, at least {least}"

    return check


def _number(least: float, most: float = float("inf")) -> Check:
    said = f"a number above {least:g}" if most == float("inf") else f"a number above {least:g}, at most {most:g}"

    def check(value: Any) -> str:
        return "" if _is_number(value) and least < value <= most and value != float("inf") else said

    return check


def _repeats(value: Any) -> str:
    right = _is_number(value) and LEAST_REPEATS <= value < float("inf")
    return "" if right else f"a number, at least {LEAST_REPEATS:g}: 2, or 0.5 for every second epoch"


def _is_side(value: Any) -> bool:
    return not _count(1)(value) and value <= MOST_SIDE


def _whole_numbers(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(map(_is_side, value))


def _is_ratio(value: Any) -> bool:
    return _is_number(value) and LEAST_RATIO <= value <= MOST_RATIO


def _ratio(value: Any) -> str:
    return "" if _is_ratio(value) else f"width / height: a number from {LEAST_RATIO:g} to {MOST_RATIO:g}"


def _sides(value: Any) -> str:
    def right(each: Any) -> bool:
        return _is_side(each) or _whole_numbers(each, 2)

    said = f"a list of sides up to {MOST_SIDE}, or of [width, height], such as [512, 1024] or [[1280, 720]]"
    return "" if isinstance(value, list) and value and all(map(right, value)) else said


def _ratios(value: Any) -> str:
    def right(each: Any) -> bool:
        return _is_ratio(each) or (_whole_numbers(each, 2) and _is_ratio(each[0] / each[1]))

    said = (
        f"a list of width / height, {LEAST_RATIO:g} to {MOST_RATIO:g}, or of [width, height], such as [0.75, 1.0, 1.5]"
    )
    return "" if isinstance(value, list) and value and all(map(right, value)) else said


def _sizes(value: Any) -> str:
    said = "a list of [width, height, frames], such as [[512, 512, 1], [640, 384, 1]]"
    right = isinstance(value, list) and value and all(_whole_numbers(each, 3) for each in value)
    return "" if right else said


def _frames(value: Any) -> str:
    right = isinstance(value, list) and value and not any(_count(1)(each) for each in value)
    return "" if right else "a list of whole numbers, such as [1, 33]"


def _clip_mode(value: Any) -> str:
    if value == "multiple_overlapping":
        return (
            f"one of {', '.join(CLIP_MODES)}: multiple_overlapping is retired, since it made epochs of unknown length"
        )
    return "" if value in CLIP_MODES else f"one of {', '.join(CLIP_MODES)}"


KEYS: dict[str, Key] = {
    "path": Key(_some_text, "directory"),
    "root": Key(_some_text, "directory"),
    "mask_path": Key(_some_text),
    "default_mask_file": Key(_some_text),
    "control_path": Key(_some_text),
    "num_repeats": Key(_repeats),
    "subsample_ratio": Key(_number(0, 1)),
    "caption_prefix": Key(_text),
    "caption_extension": Key(_some_text),
    "shuffle_tags": Key(_truth),
    "shuffle_delimiter": Key(_some_text),
    "cache_shuffle_delimiter": Key(_some_text),
    "shuffle_count": Key(_count(0)),
    "cache_shuffle_num": Key(_count(0)),
    "shuffle_capitalization": Key(_truth),
    "online_captions": Key(_truth),
    "skip_empty_caption": Key(_truth),
    "shuffle_metadata": Key(_truth),
    "resolutions": Key(_sides),
    "enable_ar_bucket": Key(_truth),
    "ar_buckets": Key(_ratios),
    "min_ar": Key(_ratio),
    "max_ar": Key(_ratio),
    "num_ar_buckets": Key(_count(1)),
    "size_buckets": Key(_sizes),
    "frame_buckets": Key(_frames),
    "support_video": Key(_truth),
    "framerate": Key(_number(0)),
    "video_clip_mode": Key(_clip_mode),
}
# two spellings of one thing; the first is the one that we write
SPELLINGS = {"path": "root", "cache_shuffle_delimiter": "shuffle_delimiter", "cache_shuffle_num": "shuffle_count"}
RENAMED = {"resolution": "resolutions", "repeats": "num_repeats", "image_dir": "path", "directories": "[[directory]]",
           "dataset": "[[datasets]]", "prefix": "caption_prefix", "frames": "frame_buckets"}  # fmt: skip
LISTS = ("directory", "datasets")


def misplaced(name: str, *, in_directory: bool) -> tuple[str, str] | None:
    """Say why a key must not stand in a table, and what would be right; None where it may."""
    known = [key for key, each in KEYS.items() if in_directory or each.level == "both"]
    if name in known:
        return None
    if name in KEYS:
        return "has no place here", "put it into [[directory]]"
    meant = f"did you mean {RENAMED[name]}?" if name in RENAMED else did_you_mean(name, known)
    return "no such key", meant or f"known here are {', '.join(known)}"


def wrong(name: str, value: Any) -> tuple[str, str] | None:
    """Say what is wrong with the value of a known key, and what would be right; None where it is right."""
    wanted = KEYS[name].check(value)
    return (f"is {show(value)}", f"must be {wanted}") if wanted else None
