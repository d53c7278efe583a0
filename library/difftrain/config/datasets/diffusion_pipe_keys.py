"""Keys of diffusion-pipe's data set TOML, and reading its tables strictly."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from difftrain.config.paths import bytes_of
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.validate import show, unsupported_value
from difftrain.contracts.errors import Fault

Level = Literal["both", "directory"]
Check = Callable[[Any], str]  # what a value must be, or "" where it is that

LEAST_REPEATS = 0.0001
MOST_SIDE = 16384  # px
LEAST_RATIO, MOST_RATIO = 0.01, 100.0  # width / height
CLIP_MODES = ("single_beginning", "single_middle")


class DirectoryKey(NamedTuple):
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


KEYS: dict[str, DirectoryKey] = {
    "path": DirectoryKey(_some_text, "directory"),
    "root": DirectoryKey(_some_text, "directory"),
    "mask_path": DirectoryKey(_some_text),
    "default_mask_file": DirectoryKey(_some_text),
    "control_path": DirectoryKey(_some_text),
    "num_repeats": DirectoryKey(_repeats),
    "subsample_ratio": DirectoryKey(_number(0, 1)),
    "caption_prefix": DirectoryKey(_text),
    "caption_extension": DirectoryKey(_some_text),
    "shuffle_tags": DirectoryKey(_truth),
    "shuffle_delimiter": DirectoryKey(_some_text),
    "cache_shuffle_delimiter": DirectoryKey(_some_text),
    "shuffle_count": DirectoryKey(_count(0)),
    "cache_shuffle_num": DirectoryKey(_count(0)),
    "shuffle_capitalization": DirectoryKey(_truth),
    "online_captions": DirectoryKey(_truth),
    "skip_empty_caption": DirectoryKey(_truth),
    "shuffle_metadata": DirectoryKey(_truth),
    "resolutions": DirectoryKey(_sides),
    "enable_ar_bucket": DirectoryKey(_truth),
    "ar_buckets": DirectoryKey(_ratios),
    "min_ar": DirectoryKey(_ratio),
    "max_ar": DirectoryKey(_ratio),
    "num_ar_buckets": DirectoryKey(_count(1)),
    "size_buckets": DirectoryKey(_sizes),
    "frame_buckets": DirectoryKey(_frames),
    "support_video": DirectoryKey(_truth),
    "framerate": DirectoryKey(_number(0)),
    "video_clip_mode": DirectoryKey(_clip_mode),
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


Table = dict[str, Any]


@dataclass
class Directory:
    """One directory with the values of all levels, each checked. place: what messages call its table.

    faulted: keys that are there with a value that cannot be used. own: keys of the directory itself.
    """

    place: str
    values: Table
    faulted: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)

    def where(self, name: str) -> str:
        """Return what messages call a key: by its table, or alone where it stands above all directories."""
        return f"{self.place} {name}" if name in self.own or name not in self.values else name


def read(path: Path) -> tuple[list[Directory], list[Fault]]:
    """Read a file: its directories, and what is wrong with its keys and values."""
    faults: list[Fault] = []
    tables = tables_of(path, faults)
    return ([] if tables is None else directories_of(path, tables, faults)), faults


def is_kohyas(tables: Table) -> bool:
    """Tell kohya's data set TOML, whose sources are subsets, from diffusion-pipe's."""
    datasets = tables.get("datasets")
    listed = datasets if isinstance(datasets, list) else [datasets]
    return "general" in tables or any(isinstance(each, dict) and "subsets" in each for each in listed)


def tables_of(path: Path, faults: list[Fault]) -> Table | None:
    """Read a file as TOML; None where that cannot be done."""
    try:
        return tomllib.loads(bytes_of(path).decode("utf-8-sig"))
    except FileNotFoundError:
        faults.append(Fault(str(path), "no such file", "give a TOML file of data sets"))
    except (OSError, ValueError) as error:
        faults.append(Fault(str(path), f"cannot be read as TOML: {error}"))
    return None


def directories_of(path: Path, tables: Table, faults: list[Fault]) -> list[Directory]:
    """Check every key and value; what does not fit is a fault, and left out so that the rest can be judged."""

    def fault(place: str, what: str, remedy: str = "") -> None:
        faults.append(Fault(f"{path} {place}".rstrip(), what, remedy))

    def checked(table: Table, place: str, in_directory: bool) -> Directory:
        right: Table = {}
        bad: set[str] = set()
        for name, value in table.items():
            bad_value = unsupported_value(value)
            what = misplaced(name, in_directory=in_directory) or ((bad_value, "") if bad_value else wrong(name, value))
            if what:
                fault(f"{place} {name}".strip(), *what)
                bad.add(name)
            else:
                right[name] = value
        for one, other in SPELLINGS.items():
            if other in right:
                if right.setdefault(one, right[other]) != right[other]:
                    fault(
                        f"{place} {other}".strip(),
                        f"contradicts {one}: {right[other]!r} and {right[one]!r}",
                        "give one",
                    )
                del right[other]
            bad |= {one} if other in bad else set()
        return Directory(place, right, bad)

    lists = [name for name in LISTS if name in tables]
    if len(lists) != 1:
        what = "both [[directory]] and [[datasets]] are there" if lists else "no directory is named"
        fault("", what, "begin each with [[directory]]")
    above = checked({name: value for name, value in tables.items() if name not in LISTS}, "", False)
    found = []
    for name in lists:
        listed = tables[name] if isinstance(tables[name], list) else [tables[name]]
        for number, table in enumerate(listed, 1):
            place = f"[[{name}]] {number}"
            if not isinstance(table, dict):
                fault(place, "must be a table", f"write [[{name}]] above its keys")
                continue
            own = checked(table, place, True)
            values, bad = {**above.values, **own.values}, above.faulted | own.faulted
            found.append(Directory(place, values, bad, set(own.values)))
    return found
