"""JSON beside a video, or beside a folder of frames: its captions, the parts of it that are used, its frames a second.

{"caption": "a dog runs"}                                    one caption, or a list of which each use draws one
{"caption": "a dog runs", "start": 1.5, "end": 4.0}          a part of it, in seconds; each may be left out
{"clips": [{"start": 0, "end": 2, "caption": "..."}, ...]}   several parts, with captions of their own or that of all
{"fps": 24}                                                  of a folder of frames
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any, NamedTuple

from difftrain.data.sources.base import Span
from difftrain.data.sources.captions import BadCaption, captions_of, decode_text

SUFFIX = ".json"
_LONGEST_S = 1e6


class SideFile(NamedTuple):
    """What the JSON of a video says. fps: None where it says none."""

    captions: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    fps: Fraction | None = None


def parse_side_file(data: bytes, where: str, *, multi_line: bool = False) -> SideFile:
    """Read the JSON of a video.

    Raises: BadCaption that names what is wrong.
    """
    try:
        content = json.loads(decode_text(data, where))
    except (ValueError, RecursionError) as error:
        raise BadCaption(f"broken sidecar: {where} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise BadCaption(f'broken sidecar: {where} must be an object, such as {{"caption": "..."}}')
    captions = captions_of(content.get("caption"), where, multi_line=multi_line)

    # the parts that are used
    listed = content.get("clips", [content] if {"start", "end"} & content.keys() else [])
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise BadCaption(
            f'broken sidecar: clips of {where} must be a list of {{"start": 0, "end": 2, "caption": "..."}}'
        )
    spans = tuple(_span(entry, where, multi_line=multi_line) for entry in listed)
    if len({span[:2] for span in spans}) < len(spans):
        raise BadCaption(f"broken sidecar: {where} names one part twice")

    rate = content.get("fps")
    if rate is None:
        return SideFile(captions, spans)
    if not _is_number(rate) or not 0 < rate <= 1000:
        raise BadCaption(f"broken sidecar: fps of {where} must be a number from 0 to 1000, got {rate!r}")
    return SideFile(captions, spans, Fraction(str(rate)).limit_denominator(1001))


def _span(entry: dict[str, Any], where: str, *, multi_line: bool) -> Span:
    times: list[int | None] = []
    for name in ("start", "end"):
        value = entry.get(name)
        if value is not None and (not _is_number(value) or not 0 <= value <= _LONGEST_S):
            raise BadCaption(f"broken sidecar: {name} of {where} must be seconds from 0 on, got {value!r}")
        times.append(None if value is None else round(value * 1000))
    start, end = times[0] or 0, times[1]
    if end is not None and end <= start:
        raise BadCaption(
            f"broken sidecar: a part of {where} ends at {end / 1000:g} s, before it begins ({start / 1000:g} s)"
        )
    return Span(start, end, captions_of(entry.get("caption"), where, multi_line=multi_line))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
