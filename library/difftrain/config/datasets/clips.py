"""What data sets say of clips: how many frames they have."""

from __future__ import annotations

from collections.abc import Iterable

from difftrain.contracts import ClipFacts

# of files that are videos; pictures that move (.gif, .webp) are known by their content
VIDEO_SUFFIXES = (".mp4", ".webm", ".mkv", ".mov", ".avi", ".m4v")


def clip_buckets(listed: Iterable[int], facts: ClipFacts) -> tuple[tuple[int, ...], list[str]]:
    """Return frames of clips, ascending, each of which the family takes, and what is to be said of those that are others.

    Images are clips of one frame: 1 is always there.
    """
    used = {frames: facts.frames(frames) for frames in sorted(set(listed))}
    notes = [
        f"{frames}: {taken} is used, of {facts.every} n + 1 frames" for frames, taken in used.items() if frames != taken
    ]
    return tuple(sorted({1, *used.values()})), notes


def reads_clips(frame_buckets: Iterable[int]) -> bool:
    """Tell whether videos are read."""
    return any(frames > 1 for frames in frame_buckets)
