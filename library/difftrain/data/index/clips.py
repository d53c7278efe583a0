"""Which clips a video is: the windows of frames that become samples, by how long it is and what is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fractions import Fraction

from difftrain.contracts import Clip
from difftrain.data.media.clips import frames_in
from difftrain.data.media.media import Unusable
from difftrain.data.sources.base import ClipSettings, Span


def clips_of(duration_ms: int, span: Span, settings: ClipSettings, *, parted: bool) -> Iterator[Clip]:
    """Iterate over the clips of a video, or of a span of it, in the order of time.

    parted: several spans of the video are used, so that their names tell them apart.
    Raises: Unusable where it is too short for any, or the span lies behind its end.
    """
    end_ms = duration_ms if span.end_ms is None else min(span.end_ms, duration_ms)
    if span.start_ms >= end_ms:
        lies = f"from {span.start_ms / 1000:g} s to {(span.end_ms or duration_ms) / 1000:g} s"
        raise Unusable("no such part", f"{lies} of a video of {duration_ms / 1000:g} s")

    # how many frames there are, and of the buckets the largest that they fill
    rate = Fraction(settings.fps)
    available = max(1, frames_in(end_ms - span.start_ms, rate))
    filled = [frames for frames in settings.frame_buckets if frames <= available]
    if not filled:
        least = f"the smallest of frame_buckets has {min(settings.frame_buckets)}"
        raise Unusable("too short", f"{available} frames at {float(rate):g} a second, {least}")
    frames = max(filled)

    # where windows begin
    own = f"#{span.start_ms}-{end_ms}" if parted else ""
    for number, first in enumerate(_firsts(available, frames, settings.mode)):
        yield Clip(span.start_ms, first, frames, available, settings.fps, f"{own}#{number}" if number else own)


def _firsts(available: int, frames: int, mode: str) -> Sequence[int]:
    spare = available - frames
    if mode == "single_middle":
        return (spare // 2,)
    if mode == "multiple_overlapping" and spare:
        count = -(-available // frames)
        return [number * spare // (count - 1) for number in range(count)]
    return (0,)  # random: samples choose


def clip_json(clip: Clip) -> str:
    """Write a clip as the index keeps it."""
    return json.dumps(list(clip), separators=(",", ":"))


def clip_of_json(text: str) -> Clip:
    """Read a clip of an index."""
    return Clip(*json.loads(text))
