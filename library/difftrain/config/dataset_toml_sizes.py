"""From resolutions and aspect ratios of a data set TOML to lists of buckets, in multiples of what a family takes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

Size = tuple[int, int]
Table = dict[str, Any]


class Sizes(NamedTuple):
    """The buckets of one resolution, as (width, height), in the order of their aspect ratios.

    side: of the square of the same area. nominal: that square, in multiples of what the family takes.
    """

    side: int
    nominal: Size
    sizes: tuple[Size, ...]


def sides_of(resolutions: list[Any]) -> list[float]:
    """Return the side of the square of each area, each once, ascending."""
    return sorted({float(each) if isinstance(each, int) else math.sqrt(each[0] * each[1]) for each in resolutions})


def ratios_of(values: Table) -> list[float]:
    """Return width / height of every bucket, ascending: as listed, or evenly in log space from min_ar to max_ar."""
    if not values.get("enable_ar_bucket", False):
        return [1.0]
    listed = values.get("ar_buckets")
    if listed:
        return sorted({each[0] / each[1] if isinstance(each, list) else float(each) for each in listed})
    low, high, count = values["min_ar"], values["max_ar"], values["num_ar_buckets"]
    if count == 1:
        return [float(low)]
    return sorted({low * (high / low) ** (n / (count - 1)) for n in range(count)})


def sizes_of(values: Table, multiple: int) -> list[Sizes]:
    """Return the buckets of each resolution: every one with the resolution's area, its sides rounded to `multiple`."""
    listed = values.get("size_buckets")
    if listed:
        sizes = tuple(dict.fromkeys((rounded(w, multiple), rounded(h, multiple)) for w, h, _ in listed))
        largest = round(math.sqrt(max(width * height for width, height in sizes)))
        return [Sizes(largest, _square(largest, multiple), tuple(sorted(sizes, key=lambda size: size[0] / size[1])))]
    found = []
    for side in sides_of(values["resolutions"]):
        sizes = tuple(dict.fromkeys(_of_area(side, ratio, multiple) for ratio in ratios_of(values)))
        found.append(Sizes(round(side), _square(side, multiple), sizes))
    return found


def rounded(side: float, multiple: int) -> int:
    """Round a side to the nearest multiple, up at the middle, and never to 0."""
    return max(1, int(side / multiple + 0.5)) * multiple


def _of_area(side: float, ratio: float, multiple: int) -> Size:
    width = math.sqrt(side * side * ratio)
    return rounded(width, multiple), rounded(side * side / width, multiple)


def _square(side: float, multiple: int) -> Size:
    return rounded(side, multiple), rounded(side, multiple)
